"""Read models for other tools: the base of the Parquet, Delta Lake and ClickHouse targets."""
