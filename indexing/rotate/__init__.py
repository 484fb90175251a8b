"""Maps between two embedding sets, and what is found through them."""
