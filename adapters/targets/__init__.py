"""Read models for other tools: the base of the Parquet, Delta and ClickHouse targets."""
