"""Embeddings in, answers out: neighbours, alignment, rotations. The commands of this stage are not built yet."""
