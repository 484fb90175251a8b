"""Frozen models: the files of a name, their facts, and the vectors that they give."""
