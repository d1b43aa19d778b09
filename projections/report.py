"""A report started by Spark: `spark-submit projections/report.py latency --json`."""

if __name__ == "__main__":
    # Run by name, not imported: this layer must not depend on the adapters.
    import sys
    from runpy import run_module

    sys.argv.insert(1, "report")
    run_module("postroom.adapters.cli.spark_submit", run_name="__main__")
