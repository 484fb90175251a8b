"""The main job: source files in, a committed version of a dataset out."""
