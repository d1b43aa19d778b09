"""Reading the commits of logs by SQL in any database."""

from collections.abc import Generator, Iterable
from contextlib import closing
from typing import Any, Literal

import pyarrow as pa

from postroom.application.mailbox.codec import decompress, decompress_envelopes, envelopes_by_position
from postroom.domain.commit import POSITIONS_PER_MAILBOX, Commit
from postroom.projections.models.messages import without_token

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


def envelopes_at(places: Iterable[int], commits: Iterable[tuple[Any, ...]]) -> dict[int, bytes]:
    """Return the envelopes of messages, without auth tokens, by the places of their `MessageSent`.

    Arguments:
        commits: place, last position, events and envelopes of the commits that may hold the places.

    Raises: BrokenLog when the events of a commit can't be decoded.
    """
    requested = set(places)
    envelopes: dict[int, bytes] = {}
    for place, last, events, blob in commits:
        base, first = divmod(place, POSITIONS_PER_MAILBOX)
        commit = Commit(first, last, 0, 0, b"", decompress(events, first), decompress_envelopes(blob))
        for position, envelope in envelopes_by_position(commit).items():
            if (at := base * POSITIONS_PER_MAILBOX + position) in requested:
                envelopes[at] = without_token(envelope)
    return envelopes


def envelopes_column(*, is_read: bool) -> str:
    """Return the expression that selects the envelopes, or nothing in their place."""
    return "envelopes" if is_read else "''"
