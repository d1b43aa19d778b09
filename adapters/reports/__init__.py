"""Reports as files: Parquet, and HTML pages with charts."""
