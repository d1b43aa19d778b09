"""Commits of real events, chained as an engine would write them, for the suites of the storage ports."""

from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec

from postroom.application.mailbox.codec import make_commit, to_records
from postroom.application.ports.event_log import EventLog
from postroom.domain.commit import GENESIS, Commit
from postroom.domain.mailbox.events import LogTruncated, MailboxCreated, OwnershipTaken, TopicPolicySet
from postroom.domain.message import (
    Headers,
    MessageAcked,
    MessageDeadLettered,
    MessageReceived,
    MessageRequeued,
    MessageSent,
)
from postroom.domain.names import mailbox_stream
from postroom.domain.policy import TopicPolicy
from postroom.domain.record import Event, Record, StoredEvent
from postroom.domain.schedule import (
    ScheduleDeleted,
    SchedulePaused,
    ScheduleRan,
    ScheduleResumed,
    ScheduleSet,
    ScheduleSpec,
)
from postroom.domain.subscription import (
    SubscriptionAdvanced,
    SubscriptionDeleted,
    SubscriptionFilter,
    SubscriptionRewound,
    SubscriptionSet,
)

FIRST_EVENTS = (
    *(MessageSent, MailboxCreated, OwnershipTaken, TopicPolicySet, LogTruncated, StoredEvent),
    SubscriptionSet,
    ScheduleSet,
)
"""Events that the index has."""


def stream(number: int) -> bytes:
    """Return the stream id of the test's message of that number."""
    return number.to_bytes(16, "big")


def sent(
    number: int, *, at: int = 1_000, headers: Headers | None = None, envelope: bytes = b"\x0a\x00"
) -> MessageSent:
    """Return the event that a message was sent."""
    return MessageSent(
        stream(number),
        1,
        at,
        "orders",
        3,
        at,
        at + 9,
        5,
        "key",
        bytes(32),
        b"\xff" * 32,
        headers or Headers(1),
        envelope,
    )


def received(number: int, *, at: int = 1_000, version: int = 2) -> MessageReceived:
    """Return the event that the message was received."""
    return MessageReceived(stream(number), version, at, version - 1, at + 5, "worker-1")


def stored(number: int, *, version: int = 1, at: int = 1_000) -> StoredEvent:
    """Return an event of a log that is not a mailbox's."""
    return StoredEvent(stream(number), version, at, "notes:Dog", b'{"name": "Fido"}')


def created(mailbox: str, *, at: int = 1_000) -> MailboxCreated:
    """Return the event that the mailbox was created."""
    return MailboxCreated(mailbox_stream(mailbox), 1, at, mailbox, "queue")


def life(number: int, *, at: int = 1_000) -> list[Event]:
    """Return a message's life up to its dead-lettering, with absent and present values of every column."""
    full = Headers(1, "ü-1", "text/plain", "s", "1", "aes", "c", "me", "ns", "t", "sp", {"k": "v", "ü": ""})
    return [
        sent(number, at=at, headers=full, envelope=bytes(range(256))),
        received(number, at=at),
        MessageRequeued(stream(number), 3, at, 1, at + 2, "nacked", None),
        received(number, at=at, version=4),
        MessageDeadLettered(stream(number), 5, at, 2, "max_attempts", "boom\n'\";--", at + 99, b"\x00\xff"),
    ]


def subscribed(number: int, *, at: int = 1_000) -> list[Event]:
    """Return the life of a subscription, and a copy that it got with a key."""
    place, filter_ = (stream(number), 2, at, "audit"), SubscriptionFilter(("*",), {"ü": ""})
    return [
        SubscriptionSet(stream(number), 1, at, "audit", filter_, 3, None),
        msgspec.structs.replace(sent(number + 1, at=at), topic="audit", unique_key="ü", copy_of="original"),
        SubscriptionAdvanced(*place, "copying", 7, 1),
        SubscriptionRewound(*place, 0, "me"),
        SubscriptionDeleted(*place, "me"),
        *_scheduled(number + 2, at),
    ]


def _scheduled(number: int, at: int) -> list[Event]:
    """Return the life of a schedule."""
    place, spec = (stream(number), 2, at, "nightly"), ScheduleSpec("orders", "0 3 * * *", payload=b"\xff")
    return [
        ScheduleSet(stream(number), 1, at, "nightly", spec, True, None),
        SchedulePaused(*place, "me"),
        ScheduleResumed(*place, None),
        ScheduleRan(*place, at, stream(number - 1), None),
        ScheduleDeleted(*place, "me"),
    ]


def mixed(count: int, mailbox: str) -> list[Event]:
    """Return `count` events of many kinds, of the mailbox and of its messages."""
    own = mailbox_stream(mailbox)
    events: list[Event] = [
        created(mailbox),
        OwnershipTaken(own, 2, 1_000, 1, "process 1", "boot", 7, False),
        TopicPolicySet(own, 3, 1_000, "orders", TopicPolicy()),
    ]
    number = 0
    while len(events) < count:
        number += 1
        events += life(number)
        events += [
            sent(10**6 + number),
            received(10**6 + number),
            MessageAcked(stream(10**6 + number), 3, 1_000, 1),
        ]
    return events[:count]


def commits_after(log: EventLog, groups: Iterable[Sequence[Event]], *, epoch: int = 1) -> list[Commit]:
    """Return the commits that append each group of events, of one log time, to the end of `log`."""
    head = log.head()
    end, chain = (0, GENESIS) if head is None else (head.position, head.chain)
    positions: dict[bytes, int] = {}
    commits: list[Commit] = []
    for events in groups:
        distances = []
        for position, event in enumerate(events, end + 1):
            if not isinstance(event, FIRST_EVENTS) and event.stream not in positions:
                earlier = log.read_stream(event.stream)
                positions[event.stream] = earlier[-1].position if earlier else position - 1
            distances.append(0 if isinstance(event, FIRST_EVENTS) else position - positions[event.stream])
            positions[event.stream] = position
        commits.append(make_commit(events, distances, first=end + 1, epoch=epoch, previous=chain))
        end, chain = commits[-1].last, commits[-1].chain
    return commits


def after(log: EventLog, events: Sequence[Event], *, epoch: int = 1) -> list[Commit]:
    """Return the commits that append `events` to the end of `log`: one for each log time."""
    groups = [list(group) for _, group in groupby(events, lambda event: event.at)]
    return commits_after(log, groups, epoch=epoch)


def append(log: EventLog, events: Sequence[Event], *, epoch: int = 1) -> list[Record]:
    """Append `events` to the end of `log`, one commit for each log time; return their records."""
    return _append(log, after(log, events, epoch=epoch))


def append_each(log: EventLog, events: Sequence[Event], *, epoch: int = 1) -> list[Record]:
    """Append `events` to the end of `log` at once, one commit each; return their records."""
    return _append(log, commits_after(log, ([event] for event in events), epoch=epoch))


def _append(log: EventLog, commits: Sequence[Commit]) -> list[Record]:
    log.append(commits)
    return [record for commit in commits for record in to_records(commit)]
