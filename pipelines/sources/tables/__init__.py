"""Any table of captions: parquet, CSV, JSON lines."""
