"""What two datasets share, and what must be left out of one because of the other."""
