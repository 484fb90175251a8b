"""From published shards to batches of views."""
