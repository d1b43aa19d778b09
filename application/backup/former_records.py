"""Import of stores of the format before commits, which stay unchanged meanwhile (ADR 0101).

Stores had this format until 22 November 2026. It is read only to import them.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
from blake3 import blake3

from postroom.application.mailbox.codec import make_commit
from postroom.application.mailbox.groups import LoadedMailbox, is_indexed
from postroom.application.mailbox.stored_snapshots import fold_from
from postroom.application.ports.event_log import EventLogReader
from postroom.domain.commit import GENESIS, Commit, IndexEntry
from postroom.domain.errors import BrokenLog
from postroom.domain.mailbox.commands import TakeOwnership
from postroom.domain.mailbox.events import (
    Clock,
    LogTruncated,
    MailboxCreated,
    OwnershipTaken,
    TopicPaused,
    TopicPolicySet,
    TopicResumed,
)
from postroom.domain.message import (
    DEFAULT_PRIORITY,
    Headers,
    MessageAcked,
    MessageDeadLettered,
    MessageExpired,
    MessageReceived,
    MessageRedriven,
    MessageRequeued,
    MessageSent,
    MessageVisibilityExtended,
)
from postroom.domain.names import is_mailbox
from postroom.domain.policy import TopicPolicy
from postroom.domain.record import Event, StoredEvent

MAX_EVENTS, MAX_BYTES = 1_000, 8 << 20
"""Bounds of the events of a commit."""
CHAIN = 12
"""Index of the column `chain` in a row."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode
_decode_policy = msgspec.msgpack.Decoder(tuple[TopicPolicy]).decode
_decode_headers = msgspec.json.Decoder(dict[str, str]).decode
_DECODE_ERRORS = (msgspec.MsgspecError, TypeError, ValueError, KeyError, RecursionError)


class _Columns(NamedTuple):
    """The columns of a row before `chain`, which all events have."""

    position: int
    stream: bytes
    version: int
    epoch: int
    type: str
    at: int
    topic: str
    shard: int
    attempt: int
    due: int
    reason: Any
    state: bytes


def _own(event: type[Event], *names: str) -> Callable[[_Columns], Event]:
    """Return a function that makes an event from these columns, followed by the values in `state`."""

    def read(row: _Columns) -> Event:
        return event(*row[1:3], row.at, *(getattr(row, name) for name in names), *_decode(row.state))

    return read


_EVENTS: dict[str, Callable[[_Columns], Event]] = {
    "MessageReceived.1": lambda row: MessageReceived(
        row.stream, row.version, row.at, row.attempt, row.due, next(iter(_decode(row.state)), None)
    ),
    "MessageVisibilityExtended.1": _own(MessageVisibilityExtended, "attempt", "due"),
    "MessageAcked.1": _own(MessageAcked, "attempt"),
    "MessageRequeued.1": _own(MessageRequeued, "attempt", "due", "reason"),
    "MessageDeadLettered.1": _own(MessageDeadLettered, "attempt", "reason"),
    "MessageRedriven.1": _own(MessageRedriven, "due"),
    "MessageExpired.1": _own(MessageExpired, "reason"),
    "MailboxCreated.1": _own(MailboxCreated),
    "OwnershipTaken.1": _own(OwnershipTaken),
    "TopicPaused.1": _own(TopicPaused, "topic"),
    "TopicResumed.1": _own(TopicResumed, "topic"),
    "LogTruncated.1": _own(LogTruncated),
} | dict.fromkeys(
    ("TopicPolicySet.1", "TopicPolicySet.2"),
    lambda row: TopicPolicySet(row.stream, row.version, row.at, row.topic, *_decode_policy(row.state)),
)


class FormerLog:
    """The commits of a log of records, and their index, which is complete when all commits were read.

    Arguments:
        rows: the columns of each record, in the order of positions.
    """

    def __init__(self, mailbox: str, rows: Iterable[tuple[Any, ...]]) -> None:
        self.mailbox = mailbox
        self.last = 0
        self.chain = GENESIS
        self._rows = rows
        self._entries: dict[tuple[bytes, int], IndexEntry] = {}
        self._latest: dict[bytes, int] = {}

    def commits(self) -> Iterator[Commit]:
        """Yield commits of the events that were recorded together.

        Raises: BrokenLog when a record is missing, was altered, or can't be decoded.
        """
        events: list[Event] = []
        size = epoch = 0
        for row in verified(self._rows):
            event = self._event(row)
            is_full = len(events) >= MAX_EVENTS or size >= MAX_BYTES
            if events and (is_full or (row[3], event.at) != (epoch, events[0].at)):
                yield self._commit(events, epoch)
                events, size = [], 0
            events.append(event)
            epoch, size = row[3], size + len(row[11]) + len(row[-1] or b"")
        if events:
            yield self._commit(events, epoch)

    def entries(self) -> Iterator[IndexEntry]:
        """Yield the entries of the index of all commits that were yielded."""
        yield from self._entries.values()

    def _commit(self, events: list[Event], epoch: int) -> Commit:
        first = self.last + 1
        distances = [self._distance(event, position) for position, event in enumerate(events, first)]
        commit = make_commit(events, distances, first=first, epoch=epoch, previous=self.chain)
        self.last, self.chain = commit.last, commit.chain
        return commit._replace(entries=())

    def _distance(self, event: Event, position: int) -> int:
        """Return the distance from the previous event of a message, and note the event in the index."""
        stream = event.stream
        if stream not in self._latest:
            self._entries[stream, event.version] = IndexEntry(stream, event.version, position)
            if isinstance(event, MessageSent):
                self._latest[stream] = position
            return 0
        distance, self._latest[stream] = position - self._latest[stream], position
        sent = self._entries[stream, 1]
        if is_indexed(event, position - sent.position):
            self._entries[stream, 1] = msgspec.structs.replace(sent, last=position)
        return distance

    def _event(self, row: tuple[Any, ...]) -> Event:
        columns = _Columns(*row[:CHAIN])
        if not is_mailbox(self.mailbox):
            return StoredEvent(columns.stream, columns.version, columns.at, columns.type, columns.state)
        try:
            if columns.type.startswith("MessageSent."):
                return _sent(columns, row)
            return _EVENTS[columns.type](columns)
        except _DECODE_ERRORS as error:
            raise BrokenLog(
                f"The record at position {columns.position} of mailbox {self.mailbox} ({columns.type}) can't "
                "be decoded; restore the store from a backup.",
                columns.position,
            ) from error


def verified(rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Yield rows after verifying that none is missing and that every chain hash matches.

    Raises: BrokenLog naming the first position that fails verification.
    """
    chain = GENESIS
    for position, row in enumerate(rows, 1):
        after = row[CHAIN + 1 :]
        columns = _encode((row[:CHAIN], () if after == (None,) * len(after) else after))
        if row[0] != position or blake3(chain + columns).digest() != row[CHAIN]:
            raise BrokenLog(
                f"The record at position {position} is missing or does not match its hash; restore the store "
                "from a backup, or, if retention removed records, use the version that wrote it.",
                position,
            )
        chain = row[CHAIN]
        yield row


def _sent(columns: _Columns, row: tuple[Any, ...]) -> MessageSent:
    expires_at, size, idem_key, payload_hash, hash_chain, *later = _decode(columns.state)
    *headers, custom, envelope = row[CHAIN + 1 :]
    return MessageSent(
        *(columns.stream, columns.version, columns.at, columns.topic, columns.shard, columns.due),
        *(expires_at, size, idem_key, payload_hash, hash_chain),
        Headers(*(*headers, None if custom is None else _decode_headers(custom))),
        envelope,
        later[1] if len(later) > 1 else DEFAULT_PRIORITY,  # after a checksum, which the chain includes
    )


def fencing_commits(log: EventLogReader, epoch: int, owner: str) -> list[Commit]:
    """Return the commit that takes ownership of a restored mailbox; none for a log that is no mailbox.

    Epochs of owners after the backup are unknown. Receipts of their deliveries must not fit deliveries of the
    restored log, so the next epochs begin above all of these.

    Arguments:
        epoch: ms since 1970 UTC; an epoch is added by each change of owner, so none is as high. A log whose
            epoch is higher gets the next one.
        owner: name of the process that restores, shown to operators.

    Raises: BrokenLog when the log can't be folded.
    """
    head = log.head()
    if head is None or not is_mailbox(log.mailbox):
        return []
    mailbox, _ = fold_from(log)
    # The reading of the clocks is the last owner's, as of the last commit: log time stands still meanwhile.
    clock = mailbox.clock or Clock("", 0, mailbox.at)
    uptime = clock.uptime + mailbox.at - clock.at
    command = TakeOwnership(
        log.mailbox,
        None,
        owner,
        clock.boot,
        uptime,
        clock_continues=True,
        epoch=max(epoch, mailbox.epoch + 1),
    )
    return LoadedMailbox(mailbox, head.chain).take_ownership(command, mailbox.at)
