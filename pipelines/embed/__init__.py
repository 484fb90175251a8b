"""The embedding job: scenes in, a published embedding set out."""
