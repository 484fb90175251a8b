"""Checks of a machine, of HOME and of the catalog, each with what to do."""
