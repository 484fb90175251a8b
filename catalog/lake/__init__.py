"""The DuckLake behind the catalog: connections, locks, transactions, and what a user may ask."""
