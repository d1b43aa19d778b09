"""Exports: from the read models of a store to files for other tools."""

from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Literal

from postroom.adapters.compose import open_read_models
from postroom.application.ports.export import Export, Source, Written
from postroom.application.queries.export_messages import ExportMessages
from postroom.domain.errors import Unavailable
from postroom.domain.search import EventFilter

Format = Literal["parquet", "delta", "csv", "json"]


def export_messages(
    store: str,
    wanted: EventFilter,
    format_: Format,
    folder: str | Path,
    *,
    by_topic: bool = True,
    envelope: bool = True,
    payload: bool = False,
    overwrite: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[Source, Written]:
    """Export the messages of a store that match, and return what was exported and what that amounts to.

    Arguments:
        by_topic: partition by day and topic; else by day only.
        folder: made where missing; it holds the whole export in the end, or is as it was.
        envelope: with whole envelopes, but for the publishers' auth tokens.
        payload: with payloads, where they are not encrypted.
        overwrite: replace an export of the same format.
        progress: called with the number of messages so far.

    Raises: NotFound before the first rebuild; InvalidRequest when the folder holds something else;
        Unavailable when the read models can't be read, the files can't be written, or a library is
        missing.
    """
    with (
        closing(open_read_models(store)) as read_models,
        _open_export(format_, Path(folder).absolute(), by_topic, envelope, payload, overwrite) as export,
    ):
        query = ExportMessages(read_models, envelope=envelope, payload=payload)
        return query(wanted, export, progress)


def _open_export(
    format_: Format, target: Path, by_topic: bool, envelope: bool, payload: bool, overwrite: bool
) -> AbstractContextManager[Export]:
    # Imported here, as PyArrow takes long to load and not everybody has it.
    from postroom.adapters.export.files import export_files

    if format_ in ("csv", "json"):
        from postroom.adapters.export.text import CsvFile, JsonFile

        text = CsvFile if format_ == "csv" else JsonFile
        return export_files(target, format_, by_topic, lambda path: text(path, envelope, payload), overwrite)
    try:
        from postroom.adapters.export.parquet import ParquetFile, export_schema

        schema = export_schema(envelope, payload, by_topic)
        if format_ == "parquet":
            return export_files(target, format_, by_topic, lambda path: ParquetFile(path, schema), overwrite)
        from postroom.adapters.export.delta import export_delta
    except ImportError as error:
        raise Unavailable(
            f"Exporting as {format_} needs {error.name}, which is not installed; run: "
            f"pip install 'postroom[{'delta' if format_ == 'delta' else 'archive'}]'."
        ) from None
    return export_delta(target, schema, by_topic, overwrite)
