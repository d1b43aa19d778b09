"""Files of the archive as earlier releases wrote them."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from postroom.projections.projection import EVENT_COLUMNS

_WIDTHS = {"stream": 16, "chain": 32}


def as_format_2(file: Path) -> None:
    """Rewrite a file of the archive in format 2."""
    table = pq.read_table(file)
    columns = table.select(["position", *EVENT_COLUMNS, "last", "commit"])
    fields = [
        pa.field(each.name, pa.binary(_WIDTHS[each.name]), each.nullable) if each.name in _WIDTHS else each
        for each in columns.schema
    ]
    metadata = table.schema.metadata | {b"postroom.format": b"2"}
    pq.write_table(columns.cast(pa.schema(fields, metadata=metadata)), file, compression="zstd")
