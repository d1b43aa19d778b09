"""`spark-submit projections/report.py NAME`: a report by Spark, with the options of `postroom report`."""

import sys

from postroom.adapters.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["report"]
    main()
