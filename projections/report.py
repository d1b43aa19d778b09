"""A report started by Spark: `spark-submit projections/report.py latency --json`."""

if __name__ == "__main__":
    # Imported by name: this layer must not depend on the adapters.
    import sys
    from importlib import import_module

    sys.argv[1:1] = ["report"]
    import_module("postroom.adapters.cli.main").main()
