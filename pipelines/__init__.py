"""Ray jobs over data: sources, ingestion, embedding."""
