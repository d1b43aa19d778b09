"""Read models for other tools: the base of the Parquet and ClickHouse targets."""
