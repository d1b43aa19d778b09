"""Data sources of Apache Spark for Postroom's logs.

```
from postroom.spark import events, register, report_frame

register(spark)
spark.read.format("postroom_events").load("orders.db")
events(spark, "orders.db", archive="archive").groupBy("topic", "event").count()
report_frame(spark, "orders.db", "latency")
```
"""

from postroom.adapters.compose.reports import report_frame
from postroom.adapters.compose.spark import events, register

__all__ = ["events", "register", "report_frame"]
