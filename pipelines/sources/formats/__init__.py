"""File formats as such: CSV, JSON, parquet, tar, lines of text."""
