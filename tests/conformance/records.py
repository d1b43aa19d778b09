"""Records of real events, chained as an engine would write them, for the suites of the storage ports."""

from collections.abc import Sequence

from postroom.application.mailbox.codec import to_record
from postroom.application.ports.event_log import EventLog
from postroom.domain.event import Event
from postroom.domain.mailbox.events import MailboxCreated, OwnershipTaken, TopicPolicySet
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
from postroom.domain.record import GENESIS, Record


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
        MessageDeadLettered(stream(number), 5, at, 2, "max_attempts", "boom\n'\";--", at + 99),
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


def after(log: EventLog, events: Sequence[Event], *, epoch: int = 1) -> list[Record]:
    """Return the records that append `events` to the end of `log`."""
    head = log.head()
    position, chain = (0, GENESIS) if head is None else (head.position, head.chain)
    records: list[Record] = []
    for event in events:
        position += 1
        record = to_record(event, position, epoch, chain)
        chain = record.chain
        records.append(record)
    return records


def append(log: EventLog, events: Sequence[Event], *, epoch: int = 1) -> list[Record]:
    """Append `events` to the end of `log` and return their records."""
    records = after(log, events, epoch=epoch)
    log.append(records)
    return records
