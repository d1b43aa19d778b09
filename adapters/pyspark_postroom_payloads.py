"""Lets Spark find `postroom_payloads` without `register`: it imports installed modules named `pyspark_...`.

Packaging maps this file to a module of its own, beside the package `postroom`.
"""

try:
    from postroom.adapters.compose.spark import PostroomPayloads as DefaultSource
except ImportError:  # an extra is missing; an error here would keep Spark from finding any Python data source
    pass
else:
    __all__ = ["DefaultSource"]
