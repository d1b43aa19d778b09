"""Apache Spark: the runner of rebuilds and verifications, and the log as a data source."""
