"""Reading the commits of logs by SQL in any database."""

from collections.abc import Generator, Iterable
from contextlib import closing
from typing import Any, Literal

import pyarrow as pa

from postroom.application.mailbox.codec import decompress, decompress_envelopes
from postroom.domain.commit import Commit

Driver = Literal["auto", "adbc", "python"]
"""ADBC or the database's ordinary Python driver; `auto` uses ADBC if it is installed and safe."""

Rows = Generator[tuple[Any, ...], None, None]


def rows_of(batches: Iterable[pa.RecordBatch]) -> Rows:
    """Yield the rows of batches."""
    for batch in batches:
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def to_commits(rows: Rows) -> Generator[Commit, None, None]:
    """Yield commits from rows with their fields; `envelopes` may be empty.

    Raises: BrokenLog when the events of a commit can't be decompressed.
    """
    with closing(rows):  # whatever is raised, the statement ends before its connection
        for first, last, epoch, at, chain, events, envelopes in rows:
            whole = decompress_envelopes(envelopes) if envelopes else b""
            yield Commit(first, last, epoch, at, chain, decompress(events, first), whole)


def envelopes_column(*, is_read: bool) -> str:
    """Return the expression that selects the envelopes, or nothing in their place."""
    return "envelopes" if is_read else "''"
