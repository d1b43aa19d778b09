"""Checks of the log that a rebuild reads: no record is missing or was altered."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import polars as pl
from blake3 import blake3

from postroom.application.mailbox.codec import decode_events
from postroom.application.queries.verify import check_name
from postroom.domain.commit import GENESIS, POSITIONS_PER_MAILBOX, Commit, chained
from postroom.domain.errors import BrokenLog
from postroom.projections.incremental import Cursor, Head, check_cursors
from postroom.projections.log_reader import POSITIONS_PER_READ, LogReader, Range, split

ENVELOPE_COLUMNS = ("place", "envelope", "envelope_hash")
"""The columns of the log that `check_envelopes` needs."""


def check_bounds(log: LogReader) -> None:
    """Check that each log still has the beginning and the end that its store has recorded.

    Raises: BrokenLog naming the first position that is missing.
    """
    # Retention and owners continue meanwhile: seals are read before the ends, and removals after the
    # beginnings.
    sealed = {name: bounds.sealed for name, bounds in log.bounds().items()}
    heads = log.heads()
    firsts = {extent.name: extent.first for extent in log.extents()}
    for name, (removed, _) in log.bounds().items():
        if firsts.get(name, 0) > removed + 1:
            raise BrokenLog(
                f"The log of {name} begins at position {firsts[name]}, but retention removed only those "
                f"through {removed}. Restore the store from a backup, or leave the others out "
                "with --allow-gaps.",
                removed + 1,
            )
        head = max(heads.get(name, 0), removed)
        if head < sealed.get(name, 0):
            raise BrokenLog(
                f"The log of {name} ends at position {head}, but reached {sealed[name]} when it was last "
                "closed: its end was cut off. Restore the store from a backup, or leave these records out "
                "with --allow-gaps.",
                head + 1,
            )


def check_names(log: LogReader) -> None:
    """Check that each log that still has its beginning belongs to the mailbox that the store names.

    Raises: BrokenLog naming both mailboxes.
    """
    with log.connected() as reader:
        for extent in reader.extents():
            if extent.first > 1:
                continue
            commit = next(reader.commits(Range(extent, 1, 1), envelopes=False), None)
            event = None if commit is None else next(decode_events(commit), None)
            check_name(extent.name, event)


def check_same_log(
    log: LogReader, cursors: Mapping[int, Cursor], where: str, command: str = "postroom views rebuild"
) -> None:
    """Check that no log was replaced or cut since cursors were set; see `check_cursors`.

    Raises: BrokenLog naming the mailbox.
    """
    heads = heads_at(log, {each.mailbox: each.position for each in cursors.values()})
    check_cursors(cursors, list(heads.values()), where, command)


def heads_at(log: LogReader, positions: Mapping[str, int]) -> dict[str, Head]:
    """Return the heads of the mailbox logs by name, which end at these positions at most."""
    extents = log.extents(positions)
    # Read afterwards: what retention removes in between then counts as removed, not as missing.
    removed = {name: bounds.removed for name, bounds in log.bounds().items()}
    heads = {name: Head(id_, name, removed[name] + 1, removed[name]) for name, id_ in log.mailboxes().items()}
    for each in extents:
        heads[each.name] = Head(each.id, each.name, each.first, each.last, each.chain, each.at)
    return heads


def check_positions(log: LogReader, ranges: Sequence[Range], places: pl.Series) -> None:
    """Check that each position of some ranges was read once.

    Positions that retention removed meanwhile are not missed.

    Arguments:
        places: places of the records that were read, in order.

    Raises: BrokenLog naming the first position that was not read, or was read twice.
    """
    pieces = [pl.int_range(*_places(range_), eager=True) for range_ in ranges]
    if places.equals(pl.concat([pl.Series(dtype=pl.Int64), *pieces])):
        return
    for range_, expected in zip(ranges, pieces, strict=True):
        extent, first, last = range_
        actual = places.filter(places.is_between(extent.place(first), extent.place(last)))
        if actual.n_unique() < len(actual):
            twice = actual.filter(actual.is_duplicated())[0] % POSITIONS_PER_MAILBOX
            raise BrokenLog(
                f"The log of {extent.name} has position {twice} twice: commits were moved. Restore the store "
                "from a backup.",
                twice,
            )
        missing = expected.filter(~expected.is_in(actual.implode())) - extent.place(0)
        missing = missing.filter(missing >= _first_position(log, range_))
        if len(missing):
            raise BrokenLog(
                f"The log of {extent.name} lacks {len(missing):,} of the positions {first} to {last}; the "
                f"first is {missing[0]}. Restore the store from a backup, or leave these records out with "
                "--allow-gaps.",
                int(missing[0]),
            )


def check_chain(log: LogReader, ranges: Iterable[Range]) -> None:
    """Check that the commits of some ranges match their hashes, and follow from the commit before.

    The first commit after what retention removed is not checked, as the hash before it is gone.

    Raises: BrokenLog naming the mailbox and the first commit that was altered.
    """
    for range_ in ranges:
        try:
            _check_range(log, range_)
        except BrokenLog as error:
            first = _first_position(log, range_)
            if error.position >= first:
                raise BrokenLog(f"In the log of {range_.extent.name}: {error}", error.position) from error
            rest = range_._replace(first=max(first, range_.first))
            check_chain(log, [rest] if first <= range_.last else [])


def check_envelopes(ranges: Sequence[Range], records: pl.DataFrame) -> None:
    """Check that envelopes match the hashes that the events of their messages contain.

    Arguments:
        records: columns `ENVELOPE_COLUMNS` of the records of these ranges.

    Raises: BrokenLog naming the first message whose envelope was altered.
    """
    sent = records.select(ENVELOPE_COLUMNS).filter(pl.col("envelope_hash").is_not_null())
    for place, envelope, expected in sent.iter_rows():
        if blake3(envelope or b"").digest() != expected:
            name = next(
                each.extent.name for each in ranges if each.extent.id == place // POSITIONS_PER_MAILBOX
            )
            position = place % POSITIONS_PER_MAILBOX
            raise BrokenLog(
                f"The envelope of the message at position {position} of {name} does not match its hash: it "
                "was altered. Restore the store from a backup.",
                position,
            )


def _check_range(log: LogReader, range_: Range) -> None:
    extent, first, last = range_
    commits = _commits(log, Range(extent, max(first - 1, extent.first), last))
    before = next(commits, None)
    if before is None:
        return
    if before.first == 1:
        deque(chained([before], GENESIS, 1), 0)
    deque(chained(commits, before.chain, before.last + 1), 0)


def _commits(log: LogReader, range_: Range) -> Iterator[Commit]:
    """Yield the commits that overlap a range by several short reads, each commit once."""
    last = 0
    for piece in split([range_], POSITIONS_PER_READ):
        for commit in log.commits(piece, envelopes=False):
            if commit.first > last:
                yield commit
                last = commit.last


def _places(range_: Range) -> tuple[int, int]:
    return range_.extent.place(range_.first), range_.extent.place(range_.last) + 1


def _first_position(log: LogReader, range_: Range) -> int:
    """Return the first position that the log still has, after all of the range if it has none."""
    firsts = {extent.id: extent.first for extent in log.extents()}
    return firsts.get(range_.extent.id, range_.last + 1)
