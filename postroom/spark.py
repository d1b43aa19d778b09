"""Postroom's logs as data sources of Apache Spark.

```
from postroom.spark import register, report_frame

register(spark)
spark.read.format("postroom_events").load("orders.db")
report_frame(spark, "orders.db", "latency")
```
"""

from postroom.adapters.compose.reports import report_frame
from postroom.adapters.compose.spark import register

__all__ = ["register", "report_frame"]
