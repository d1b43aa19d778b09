"""Spark data sources by the address of a store."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import msgspec

from postroom.adapters.compose.store import is_on_servers, open_log_reader, open_store
from postroom.adapters.schemas.validator import ContentDecoder
from postroom.application.extras import explain_missing_extra
from postroom.application.telemetry import logger
from postroom.domain.errors import InvalidRequest
from postroom.projections.log_reader import LogReader, PayloadDecoder
from postroom.projections.spark.options import Options

with explain_missing_extra():
    from postroom.adapters.parquet.log_archive import ParquetLogArchive
    from postroom.adapters.parquet.segment_files import SCHEMA
    from postroom.projections.spark.sources import EventsSource, MessagesSource, PayloadsSource, scan_segments

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STORE_VARIABLE = "POSTROOM_STORE"
OptionValue = str | int | Path
"""Value of an option of a data source, bool included; the source receives text."""


def open_log(options: Options) -> LogReader:
    """Return the reader of the log of the store that the options name.

    Raises: InvalidRequest when they name no store, or two.
    """
    path, url = options.text("path"), options.text("url")
    if path and url:
        raise InvalidRequest(f"{options.source} has both the options path and url; name the store once.")
    store = _local_path(path) if path else url or os.environ.get(STORE_VARIABLE)
    if not store:
        raise InvalidRequest(
            f"{options.source} needs a store; name one by load(...), by the option path or url, or in "
            f"{STORE_VARIABLE}."
        )
    driver = options.choice("driver", "auto", "adbc", "python")
    return open_log_reader(
        open_store(store),
        options.text("archive"),
        driver,  # type: ignore[arg-type]
        allow_gaps=options.allow_gaps,
    )


class PostroomEvents(EventsSource):
    """`postroom_events`: the events of a store, one row each."""

    def open_log(self, options: Options) -> LogReader:
        """Return the reader of the store's log."""
        return open_log(options)


class PostroomMessages(MessagesSource):
    """`postroom_messages`: the messages of a store with their status, one row each."""

    def open_log(self, options: Options) -> LogReader:
        """Return the reader of the store's log."""
        return open_log(options)


class PostroomPayloads(PayloadsSource):
    """`postroom_payloads`: the messages of a store with their payloads decoded, one row each."""

    def open_log(self, options: Options) -> LogReader:
        """Return the reader of the store's log."""
        return open_log(options)

    def open_decoder(self, options: Options) -> PayloadDecoder:
        """Return the decoder by content type, and by the schemas of the option `namespaces`.

        Raises: InvalidRequest when that file or a schema in it is missing or invalid.
        """
        file = options.text("namespaces")
        if file is None:
            return ContentDecoder()
        with explain_missing_extra("namespaces"):
            from postroom.adapters.config.namespaces import load_namespaces
            from postroom.adapters.schemas.validator import SchemaDecoder
        namespaces = load_namespaces(Path(_local_path(file)).absolute())
        return SchemaDecoder({each.name: each.payload_schemas for each in namespaces})


SOURCES = (PostroomEvents, PostroomMessages, PostroomPayloads)


def events(spark: "SparkSession", store: str | Path, **options: OptionValue | None) -> "DataFrame":
    """Return the events of a store; Spark scans the segments of its archive natively.

    Spark pushes filters and the choice of columns down to the Parquet files. The data source
    `postroom_events` reads all other events, such as those that are only in the log; it reads all events if
    Spark has no connector for the archive's object store. The end of each log is fixed by this call.

    Arguments:
        spark: a session that has the data sources; see `register`.
        store: path or URL of the store.
        options: of `postroom_events` in batches, such as `archive`, `mailbox`, `topic`, `event`, `since` and
            `columns`, as text, numbers, paths or bools; None leaves one out.

    Raises: InvalidRequest for an unknown option or an invalid value; BrokenLog when records are missing;
        Unavailable when the store or the archive can't be read.
    """
    address = _option("store", store)
    values = {"url" if is_on_servers(address) else "path": _absolute(address)} | {
        name.lower(): _option(name, value) for name, value in options.items() if value is not None
    }
    if values.get("archive", "").strip():
        values["archive"] = _absolute(values["archive"])
    source = PostroomEvents(values)
    reader = spark.read.format(source.name()).options(**values)
    if "archive" not in values:
        return reader.load()
    ranges, filter_ = source.selection()
    files, rest = ParquetLogArchive(values["archive"]).divide(ranges)
    try:
        scan = scan_segments(spark, files, SCHEMA, source.schema(), filter_) if files else None
    except Exception as error:  # PySpark has no class for it
        if "ClassNotFoundException" not in str(error):
            raise
        logger().warning("spark.no_connector", files=len(files))
        scan = None
    if scan is None:
        return reader.load()
    others = reader.option("ranges", msgspec.json.encode(rest).decode())
    return scan.unionByName(others.load()) if rest else scan


def register(spark: "SparkSession") -> None:
    """Register Postroom's data sources with a Spark session, which then reads stores by `spark.read.format`.

    Without this call, Spark finds the sources by their installed modules, and divides the work by the size of
    the log alone. On a local master the session's workers use this Python, unless `PYSPARK_PYTHON` names
    another one.

    Arguments:
        spark: a session, also one of Spark Connect, whose server needs Postroom, too.
    """
    try:
        context = spark.sparkContext
        cores = context.defaultParallelism
    except Exception:  # Spark Connect has no context, and says so in several ways
        cores = None
    else:
        # Spark would start the first python3 of the path, which may not be the notebook's.
        if str(context.master).startswith("local") and "PYSPARK_PYTHON" not in os.environ:
            context.pythonExec = sys.executable
    for source in SOURCES:
        # Made here and so pickled by value: the number of cores is only known in this process.
        spark.dataSource.register(type(source.__name__, (source,), {"cores": cores}))


def _option(name: str, value: object) -> str:
    """Return the value of an option as text, as Spark's `options` does.

    Raises: InvalidRequest unless it is an `OptionValue`.
    """
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | int | Path):
        raise InvalidRequest(
            f"The option {name} of postroom_events must be text, a number, a path or a bool; it was "
            f"{type(value).__name__}."
        )
    return str(value)


def _absolute(path: str) -> str:
    """Return a path for Spark's processes, which may have another working directory; URLs are unchanged."""
    return path if "://" in path else str(Path(path).absolute())


def _local_path(path: str) -> str:
    """Return a path that Spark may have made a `file:` URI."""
    parts = urlsplit(path)
    return unquote(parts.path) if parts.scheme == "file" else path
