"""Ray jobs over data: sources, cleaning, grouping, shards, ingestion."""
