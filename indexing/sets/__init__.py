"""Embedding sets side by side: joined by scene, of one space, seen in training or not."""
