"""The built-in world that needs no download."""
