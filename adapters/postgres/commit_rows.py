"""Commits to and from the rows of a log in PostgreSQL, and their rows in its index."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from postroom.adapters.postgres.columns import BinaryValue, array, integer, integers, uuids
from postroom.adapters.sql.statements import statements
from postroom.application.mailbox.codec import compress, decompress, decompress_envelopes
from postroom.domain.commit import POSITIONS_PER_MAILBOX, Commit, IndexEntry

_SQL = statements("postroom.adapters.postgres", "append.sql")


def append_statement(mailbox: int, commits: Sequence[Commit]) -> tuple[str, dict[str, BinaryValue]]:
    """Return the statement that appends commits with their entries of the index, and its values.

    Arguments:
        mailbox: the mailbox's id.
    """
    base = mailbox * POSITIONS_PER_MAILBOX
    values = {
        "id": integer(mailbox),
        "first": integer(commits[0].first),
        "places": integers([base + commit.first for commit in commits]),
        "lasts": integers([commit.last for commit in commits]),
        "epochs": integers([commit.epoch for commit in commits]),
        "ats": integers([commit.at for commit in commits]),
        "chains": array(bytes, [commit.chain for commit in commits]),
        "events": array(bytes, [compress(commit.events) for commit in commits]),
        "envelopes": array(bytes, [compress(commit.envelopes) for commit in commits]),
    }
    entries = [entry for commit in commits for entry in commit.entries]
    last_events = [(event.stream, event.last) for commit in commits for event in commit.last_events]
    last_events += [(entry.stream, entry.last) for entry in entries if entry.last is not None]
    if not entries and not last_events:
        return _SQL["append"], values
    streams = [entry.stream for entry in entries] + [stream for stream, _ in last_events]
    positions = [entry.position for entry in entries] + [last for _, last in last_events]
    versions = [entry.version for entry in entries]
    values["entry_places"] = integers([base + position for position in positions])
    values["streams"] = uuids(streams)
    if versions.count(1) == len(streams):
        return _SQL["append_first_events"], values
    values["versions"] = integers(versions, nulls=len(last_events))
    return _SQL["append_with_versions"], values


def to_commit(row: Sequence[Any]) -> Commit:
    """Return the commit of a row whose first column is its first position.

    Raises: BrokenLog when its events can't be decompressed.
    """
    first, last, epoch, at, chain, events, envelopes = row
    return Commit(first, last, epoch, at, chain, decompress(events, first), decompress_envelopes(envelopes))


def index_rows(entries: Iterable[IndexEntry]) -> Iterator[tuple[bytes, int | None, int]]:
    """Yield the rows of the index, as stream, version and position: without a version for last events."""
    for entry in entries:
        yield entry.stream, entry.version, entry.position
        if entry.last is not None:
            yield entry.stream, None, entry.last
