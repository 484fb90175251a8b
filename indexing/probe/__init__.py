"""What of a label can be read from an embedding set."""
