"""Lets Spark find `postroom_payloads` without `register`: it imports modules named `pyspark_...`."""

try:
    from postroom.adapters.compose.spark import PostroomPayloads as DefaultSource
except ImportError:  # an extra is missing; an error here would keep Spark from finding any Python data source
    pass
else:
    __all__ = ["DefaultSource"]
