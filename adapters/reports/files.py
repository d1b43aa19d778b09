"""Report files, which are replaced atomically."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkstemp

import pyarrow as pa
import pyarrow.parquet as pq

from postroom.adapters.files import sync
from postroom.domain.errors import InvalidRequest, Unavailable

FILE = "report.parquet"
_REPORT = b"postroom.report"


def write_parquet_folder(rows: pa.Table, name: str, folder: Path, *, overwrite: bool = False) -> None:
    """Write rows as `report.parquet` in a folder, which is created if it is missing.

    Arguments:
        name: name of the report, stored in the file's metadata.
        overwrite: replace the file of an earlier report.

    Raises: InvalidRequest if the folder has other files, or has a report and `overwrite` is false;
        Unavailable if the file can't be written.
    """
    target = folder / FILE
    with _writing(target):
        if folder.exists() and not folder.is_dir():
            raise InvalidRequest(f"{folder} is a file; name a folder for the report.")
        names = sorted(each.name for each in folder.iterdir()) if folder.exists() else []
        others = [each for each in names if each != FILE]
        if others:
            raise InvalidRequest(
                f"The folder {folder} contains other files, such as {others[0]}; name an empty folder or one "
                "that does not exist yet."
            )
        if names and not overwrite:
            raise InvalidRequest(
                f"The folder {folder} already contains a report; add --overwrite to replace it, or name "
                "another folder."
            )
        folder.mkdir(parents=True, exist_ok=True)
    metadata = {**(rows.schema.metadata or {}), _REPORT: name.encode()}
    sink = pa.BufferOutputStream()
    pq.write_table(rows.replace_schema_metadata(metadata), sink, compression="zstd")
    replace_file(target, sink.getvalue().to_pybytes())


def replace_file(target: Path, content: bytes) -> None:
    """Replace the content of a file atomically and durably.

    Raises: InvalidRequest if the target is a folder; Unavailable if it can't be written.
    """
    if target.is_dir():
        raise InvalidRequest(f"{target} is a folder; name a file for the report.")
    with _writing(target):
        descriptor, name = mkstemp(".unfinished", f".{target.name}.", target.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(target)
        except BaseException:
            with suppress(OSError):
                Path(name).unlink()
            raise
        sync(target.parent)


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable(
            f"The report {target} can't be written: {error.strerror or error}. Check that the folder exists "
            "and is writable, and that its disk has space."
        ) from error
