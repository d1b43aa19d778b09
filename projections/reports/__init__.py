"""Reports: tables of figures that one SQL query computes from the events of a store, in Spark or DuckDB."""
