"""Files of the archive as earlier releases wrote them."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from postroom.adapters.parquet.segment_files import FORMAT_2

_WIDTHS = {"stream": 16, "chain": 32}


def as_format_2(file: Path) -> Path:
    """Rewrite a file of the archive in format 2, without a manifest; return its path."""
    table = pq.read_table(file)
    columns = table.select(FORMAT_2)
    fields = [
        pa.field(each.name, pa.binary(_WIDTHS[each.name]), each.nullable) if each.name in _WIDTHS else each
        for each in columns.schema
    ]
    metadata = table.schema.metadata | {b"postroom.format": b"2"}
    former = file.with_name(file.name.replace(".v3", ""))
    pq.write_table(columns.cast(pa.schema(fields, metadata=metadata)), former, compression="zstd")
    file.unlink()
    (file.parent / "manifest.json").unlink(missing_ok=True)
    return former
