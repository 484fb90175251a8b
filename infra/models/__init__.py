"""Frozen models: which files a name stands for, what is known of them, and how they turn texts and pictures into vectors."""
