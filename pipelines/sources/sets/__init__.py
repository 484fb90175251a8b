"""Published caption sets, one module a set and its parts."""
