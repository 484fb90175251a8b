"""The demo: the main job end to end on the built-in toy world."""
