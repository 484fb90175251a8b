"""How alike two embedding sets are."""
