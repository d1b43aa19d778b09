"""A log in Arrow tables, as the peers need it: by the reader that the rebuild uses, in one process."""

from typing import Any

from postroom.adapters.compose.store import open_store
from postroom.projections.log_reader import LogExtent, Range
from tests.benchmarks.pipeline.frames import FATES, LATER, SENT, Read

DEAD_LETTER_EVENTS = ("MessageDeadLettered", "MessageRedriven")


def read_log(store: str) -> Read:
    """Return the events of all mailboxes of a store by type; each commit is decoded once."""
    import pyarrow as pa
    import pyarrow.compute as pc

    log = open_store(store).log_reader("adbc")
    extents = log.extents()
    names = list(dict.fromkeys((*SENT, *LATER, *FATES)))
    tables: list[list[Any]] = [[], [], []]
    for batch in log.read(_ranges(extents), names):
        event = batch["event"]
        is_sent = pc.equal(event, "MessageSent")
        is_later = pc.and_(pc.starts_with(event, "Message"), pc.invert(is_sent))
        is_fate = pc.is_in(event, pa.array(DEAD_LETTER_EVENTS))
        parts = ((is_sent, SENT), (is_later, LATER), (is_fate, FATES))
        for table, (mask, columns) in zip(tables, parts, strict=True):
            table.append(batch.select(list(columns)).filter(mask))
    sent, later, fates = (pa.Table.from_batches(each) for each in tables)
    return Read(sent, later, fates, [(extent.id, extent.name, extent.at) for extent in extents])


def read_commits(store: str) -> int:
    """Read all commits with their envelopes without decoding them, and return their size in bytes."""
    log = open_store(store).log_reader("adbc")
    commits = (commit for range_ in _ranges(log.extents()) for commit in log.commits(range_))
    return sum(len(commit.events) + len(commit.envelopes) for commit in commits)


def _ranges(extents: list[LogExtent]) -> list[Range]:
    return [Range(extent, extent.first, extent.last) for extent in extents]
