"""A training from its recipe to its record."""
