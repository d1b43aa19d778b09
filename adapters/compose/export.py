"""Exports: from the read models of a store to files for other tools."""

from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Literal

from postroom.adapters.compose.queries import open_read_models
from postroom.application.extras import explain_missing_extra
from postroom.application.ports.export import Export, ExportSize, ExportSource
from postroom.application.queries.export_messages import ExportMessages
from postroom.domain.search import EventFilter

Format = Literal["parquet", "delta", "csv", "json"]


def export_messages(
    store: str,
    filter_: EventFilter,
    format_: Format,
    folder: str | Path,
    *,
    by_topic: bool = True,
    envelope: bool = True,
    payload: bool = False,
    overwrite: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[ExportSource, ExportSize]:
    """Export the messages that a filter matches; return a description of the export and its size.

    Arguments:
        by_topic: partition by day and topic; otherwise by day only.
        folder: target, created if missing; it contains the complete export afterwards, or is unchanged.
        envelope: include envelopes, without the publishers' auth tokens.
        payload: include payloads that are not encrypted.
        overwrite: replace an export of the same format.
        progress: called with the number of messages exported so far.

    Raises: NotFound before the first rebuild; InvalidRequest when the folder contains anything else than an
        export; Unavailable when the read models can't be read, a file can't be written, or a library is
        missing.
    """
    with (
        closing(open_read_models(store)) as read_models,
        _open_export(format_, Path(folder).absolute(), by_topic, envelope, payload, overwrite) as export,
    ):
        query = ExportMessages(read_models, envelope=envelope, payload=payload)
        return query(filter_, export, progress)


def _open_export(
    format_: Format, target: Path, by_topic: bool, envelope: bool, payload: bool, overwrite: bool
) -> AbstractContextManager[Export]:
    # Imported here, because PyArrow is optional and slow to load.
    from postroom.adapters.export.files import export_files

    if format_ in ("csv", "json"):
        from postroom.adapters.export.text import CsvFile, JsonFile

        text = CsvFile if format_ == "csv" else JsonFile
        return export_files(
            target, format_, by_topic, lambda path: text(open(path, "wb"), envelope, payload), overwrite
        )
    with explain_missing_extra("delta" if format_ == "delta" else "archive"):
        from postroom.adapters.export.parquet import ParquetFile, export_schema

        schema = export_schema(envelope, payload, by_topic)
        if format_ == "parquet":
            return export_files(target, format_, by_topic, lambda path: ParquetFile(path, schema), overwrite)
        from postroom.adapters.export.delta import export_delta
    return export_delta(target, schema, by_topic, overwrite)
