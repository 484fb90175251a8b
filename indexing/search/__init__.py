"""Nearest neighbours: exact, approximate, and for a text."""
