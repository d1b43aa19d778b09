"""Reports: tables of figures that one SQL text computes from the events of a store, in Spark or in DuckDB."""
