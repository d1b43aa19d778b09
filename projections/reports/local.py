"""Reports in this process by DuckDB, without a JVM, for small stores."""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from tempfile import TemporaryDirectory

import duckdb
import pyarrow as pa

from postroom.projections.reports.report import Addition, MessageRows, Parameters, Report

_FUNCTIONS = """
CREATE MACRO unix_micros(moment) AS epoch_us(moment);
CREATE MACRO timestamp_micros(micros) AS make_timestamp(CAST(micros AS BIGINT));
"""
"""Spark functions that have other names in DuckDB."""
_MESSAGES = """
SELECT e.mailbox, e.stream, list(struct_pack({fields}) ORDER BY e.position) AS events
FROM events AS e WHERE hash(e.stream) % $buckets = $bucket GROUP BY e.mailbox, e.stream
"""
MESSAGES_PER_BATCH = 50_000
EVENTS_PER_BUCKET = 1_000_000
"""How many events are grouped by message at a time, which bounds memory."""
MEMORY_LIMIT = "1GB"
"""What DuckDB takes of memory before it writes to temporary files."""
_PARAMETER = re.compile(r"(?<!:):([a-z_]+)")


def run_report(
    report: Report, schema: pa.Schema, batches: Iterable[pa.RecordBatch], parameters: Parameters
) -> pa.Table:
    """Return the rows of a report.

    Arguments:
        schema: schema of the batches; times are UTC without a time zone.
        batches: rows that the report reads.
        parameters: parameters of the query; times and durations in µs.

    Raises: InvalidRequest for an unknown parameter.
    """
    arguments = report.arguments(parameters)
    if report.addition is not None:
        batches = _added(report.addition, batches)
        schema = schema.append(pa.field(report.addition.column, pa.string()))
    text = _PARAMETER.sub(r"$\1", report.sql).format(events="events")
    with (
        TemporaryDirectory(prefix="postroom-") as folder,
        duckdb.connect(config={"memory_limit": MEMORY_LIMIT, "temp_directory": folder}) as database,
    ):
        database.execute(_FUNCTIONS)
        database.register("rows", schema.empty_table())
        database.execute("CREATE TABLE events AS SELECT * FROM rows")
        # DuckDB would call an iterator in its own threads, where a SQLite connection can't be used.
        for batch in batches:
            database.register("rows", pa.Table.from_batches([batch], schema=schema))
            database.execute("INSERT INTO events SELECT * FROM rows")
        if report.messages is not None:
            _replace_events(database, report, report.messages)
        return database.sql(text, params=arguments).to_arrow_table()


def _replace_events(database: duckdb.DuckDBPyConnection, report: Report, rows: MessageRows) -> None:
    """Replace the table of events by the rows that `MessageRows` computes for each message."""
    fields = ", ".join(f"{name} := e.{name}" for name in report.event_columns)
    ((events,),) = database.execute("SELECT count(*) FROM events").fetchall()
    buckets = 1 + events // EVENTS_PER_BUCKET
    database.register("rows", rows.schema.empty_table())
    database.execute("CREATE TABLE rows_of_messages AS SELECT * FROM rows")
    for bucket in range(buckets):
        parameters = {"buckets": buckets, "bucket": bucket}
        messages = database.sql(_MESSAGES.format(fields=fields), params=parameters).to_arrow_table()
        for batch in messages.to_batches(max_chunksize=MESSAGES_PER_BATCH):
            results = rows.lists(batch["mailbox"], batch["stream"], batch["events"]).flatten()
            database.register("rows", pa.Table.from_struct_array(results))
            database.execute("INSERT INTO rows_of_messages SELECT * FROM rows")
    database.execute("DROP TABLE events; ALTER TABLE rows_of_messages RENAME TO events")


def _added(addition: Addition, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    function = lru_cache(10_000)(addition.function)
    for batch in batches:
        arguments = (batch[name].to_pylist() for name in addition.arguments)
        values = [function(*each) for each in zip(*arguments, strict=True)]
        yield batch.append_column(addition.column, pa.array(values, pa.string()))
