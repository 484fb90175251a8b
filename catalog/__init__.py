"""What exists and what shape it has: Arrow schemas, manifests, the DuckLake catalog."""
