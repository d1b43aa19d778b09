"""Postroom's logs as data sources of Apache Spark.

Packaging maps this file to `postroom/spark.py`:

    from postroom.spark import register

    register(spark)
    spark.read.format("postroom_events").load("orders.db")
"""

from postroom.adapters.compose.spark import register

__all__ = ["register"]
