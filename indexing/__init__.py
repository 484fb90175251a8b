"""Embeddings in, answers out: neighbours, alignment, rotations."""
