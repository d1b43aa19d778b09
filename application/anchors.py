"""Anchors: ends of logs that are stored outside of the store, for later verifications."""

import re
from collections.abc import Iterable, Sequence

import msgspec

from postroom.application.mailbox.segments import ends_with
from postroom.application.ports.event_log import EventLogReader
from postroom.domain.commit import GENESIS, Commit
from postroom.domain.errors import BrokenLog, InvalidRequest


class Anchor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The end of a log at a moment.

    Arguments:
        log: the mailbox, or the name of a reserved log.
        position: last position of a commit.
        chain: chain hash of the commit in hex, which depends on all earlier events.
        at: log time of the commit in µs.
        anchored_at: wall clock in µs since 1970 UTC.
        timestamp: response of an RFC 3161 authority for the other fields, or None.
    """

    log: str
    position: int
    chain: str
    at: int
    anchored_at: int
    timestamp: bytes | None = None

    def signed_bytes(self) -> bytes:
        """Return the bytes that a time stamp certifies: the encoded anchor without its time stamp."""
        return encode_anchor(msgspec.structs.replace(self, timestamp=None))


_CHAIN = re.compile("[0-9a-f]{64}")
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Anchor).decode


def encode_anchor(anchor: Anchor) -> bytes:
    """Return an anchor as JSON without line breaks."""
    return _encode(anchor)


def decode_anchor(line: bytes, where: str) -> Anchor:
    """Parse a line that `encode_anchor` wrote.

    Arguments:
        where: the file and the line, for the error.

    Raises: InvalidRequest for any other text.
    """
    try:
        anchor = _decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        anchor = None
    is_valid = anchor is not None and anchor.position > 0 and _CHAIN.fullmatch(anchor.chain)
    if anchor is None or not is_valid or encode_anchor(anchor) != line:
        raise InvalidRequest(
            f"{where} is not an anchor of postroom anchor; name another file, or restore this one."
        )
    return anchor


def next_anchor(log: EventLogReader, anchors: Iterable[Anchor], now: int) -> Anchor | None:
    """Return an anchor of the current end of a log, or None if it is empty or already anchored.

    Arguments:
        anchors: earlier anchors, oldest first; the log must still contain its newest one.
        now: wall clock in µs.

    Raises: BrokenLog if the log was truncated or rewritten since its newest anchor.
    """
    newest = next((each for each in reversed(list(anchors)) if each.log == log.mailbox), None)
    head, first = log.head(), log.first_position()
    if newest is not None:
        if head is None or head.position < newest.position:
            raise truncated_log(log.mailbox, 0 if head is None else head.position, newest.position)
        is_removed = first is not None and newest.position < first
        if not is_removed and not ends_with(log, newest.position, bytes.fromhex(newest.chain)):
            raise _rewritten(log.mailbox, newest.position)
    if head is None or (newest is not None and newest.position == head.position):
        return None
    return Anchor(log.mailbox, head.position, head.chain.hex(), head.at, now)


def check_logs(anchors: Iterable[Anchor], logs: Sequence[str], store: str) -> None:
    """Check that a store has all anchored logs.

    Raises: BrokenLog for a missing log.
    """
    for each in anchors:
        if each.log not in logs:
            raise BrokenLog(
                f"The store {store} has no log of {each.log}, anchored at position {each.position}: it "
                "was removed, or the anchors are of another store. Restore the store from a backup.",
                each.position,
            )


class ExpectedEnds:
    """Checks that a log contains known ends of commits; `check` takes its commits in order.

    Arguments:
        ends: positions with chain hashes in hex.
        start, link: position and chain hash before the first commit; earlier ends can't be checked.

    Raises: BrokenLog if the log begins with another commit than the one at `start`.
    """

    def __init__(self, log: str, ends: Iterable[tuple[int, str]], start: int, link: bytes) -> None:
        self._log = log
        self._ends = sorted({each for each in ends if each[0] >= start}, reverse=True)
        if link != GENESIS:
            self._pass(start, link)

    def check(self, commit: Commit) -> None:
        """Check the expected ends within a commit."""
        self._pass(commit.last, commit.chain)

    def finish(self, last: int) -> None:
        """Check that the log, which ends at `last`, has reached every expected end."""
        if self._ends:
            raise truncated_log(self._log, last, self._ends[0][0])

    def _pass(self, last: int, chain: bytes) -> None:
        while self._ends and self._ends[-1][0] <= last:
            end = self._ends.pop()
            if end != (last, chain.hex()):
                raise _rewritten(self._log, end[0])


def truncated_log(log: str, last: int, position: int) -> BrokenLog:
    """Return the error for a log that ends at position `last`, but contained `position` before."""
    return BrokenLog(
        f"The log of mailbox {log} ends at position {last}, but it reached {position} before: its end was "
        "cut off. Restore the store from a backup.",
        last + 1,
    )


def _rewritten(log: str, position: int) -> BrokenLog:
    return BrokenLog(
        f"The log of mailbox {log} has another commit at position {position} than before: it was rewritten. "
        "Restore the store from a backup.",
        position,
    )
