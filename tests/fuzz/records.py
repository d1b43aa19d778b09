"""Target: records of a log that was altered on disk.

The first byte of an input chooses the record, the second the column, and the third the type of the value and
whether the chain hashes are computed anew, as by somebody who hides the change; the rest is the value.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.queries import Reader
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.adapters.system.clock import SystemClock
from postroom.application.access.audit_records import ACCESS_AUDITED, to_entry, to_removal
from postroom.application.mailbox.codec import is_intact, to_event
from postroom.application.mailbox.fold import fold
from postroom.application.messages import NewMessage
from postroom.domain.errors import BrokenLog, PostroomError
from postroom.domain.policy import TopicPolicy
from postroom.domain.record import CHAIN, GENESIS, HEADERS, NO_HEADERS, Record, link
from tests.fuzz.target import Check

MAILBOX = "acme@one"
_COLUMNS = Record._fields
_NULL, _INT, _TEXT, _BYTES = range(4)


def _seed(record: int, column: str, kind: int, value: bytes, *, is_hidden: bool = True) -> bytes:
    return bytes([record, _COLUMNS.index(column), kind | (4 if is_hidden else 0)]) + value


SEEDS = [
    _seed(0, "state", _BYTES, b"\x92\xa8acme@one\xa5queue"),
    _seed(2, "state", _BYTES, b"\x91"),
    _seed(2, "topic", _NULL, b""),
    _seed(2, "shard", _INT, b"\xff" * 8),
    _seed(2, "envelope", _BYTES, b"\x0a\x00"),
    _seed(2, "envelope", _TEXT, b"text"),
    _seed(2, "custom_headers", _TEXT, b'{"a": 1}'),
    _seed(2, "timestamp", _INT, b"\x7f" + b"\xff" * 7),
    _seed(3, "due", _INT, b"\x7f" + b"\xff" * 7),
    _seed(3, "attempt", _TEXT, b"many"),
    _seed(4, "type", _TEXT, b"MessageSent.1"),
    _seed(5, "type", _TEXT, b"MessageAcked.1"),
    _seed(6, "at", _INT, b"\x80" + b"\x00" * 7),
    _seed(7, "version", _INT, b"\x00"),
    _seed(8, "reason", _TEXT, b"\x00"),
    _seed(1, "position", _INT, b"\x02", is_hidden=False),
    _seed(1, "chain", _BYTES, bytes(32), is_hidden=False),
]
BOMBS = [
    _seed(record, "state", _BYTES, bomb)
    for record in (0, 2, 3)
    for bomb in (b"\x91" * (1 << 20), b"\xdd\xff\xff\xff\xff", b"\x81\xa1a" * 300_000)
] + [_seed(2, "custom_headers", _TEXT, b'{"a":' * 100_000)]


class AlteredLog(MemoryEventLog):
    """A log whose records are not those that were appended."""

    def __init__(self, records: list[Record]) -> None:
        super().__init__(MAILBOX)
        self._altered = records

    def read(self, after: int = 0, limit: int | None = None) -> Iterator[Record]:
        """Yield records; see `EventLogReader.read`."""
        return iter(self._altered[after:][:limit])

    def read_stream(self, stream: bytes) -> list[Record]:
        """Return the records of one stream; see `EventLogReader.read_stream`."""
        return [record for record in self._altered if record.stream == stream]

    def first_position(self) -> int:
        """Return the first position; see `EventLogReader.first_position`."""
        return 1


async def _history() -> list[Record]:
    async with open_mailbox("memory:", MAILBOX, mode="queue") as mailbox:
        await mailbox.set_topic_policy("orders", TopicPolicy(max_attempts=2))
        await mailbox.send_message(NewMessage(topic="orders", payload=b"1", attrs={"a": "b"}, message_id="m"))
        for _ in range(2):
            (received,) = await mailbox.receive_messages("orders", consumer="c")
            await received.extend(60_000)
            await received.nack(reason="broken", delay_ms=0)
        await mailbox.redrive_dead_letters("orders")
        (received,) = await mailbox.receive_messages("orders")
        await received.ack()
        await mailbox.send_batch([NewMessage(topic="orders", payload=b"2", idem_key="k")] * 2)
        await mailbox.purge_topic("orders", ready=True)
        return list(mailbox.engine.log.read())


@contextmanager
def opened() -> Iterator[Check]:
    """Yield the check, over the history of a mailbox."""
    records = asyncio.run(_history())

    def check(data: bytes) -> None:
        altered = alter(records, data)
        if altered is not None:
            check_log(records, altered)

    yield check


def alter(records: list[Record], data: bytes) -> list[Record] | None:
    """Return the records with one column of one of them replaced; None without a value."""
    if len(data) < 3:
        return None
    index, column, kind = data[0] % len(records), data[1] % len(_COLUMNS), data[2]
    value: Any = data[3:]
    match kind & 3:
        case 0:
            value = None
        case 1:
            value = int.from_bytes(value[:8], "big", signed=True)
        case 2:
            value = value.decode("utf-8", "replace")
    altered = list(records)
    altered[index] = records[index]._replace(**{_COLUMNS[column]: value})
    if kind & 4:
        previous = GENESIS
        for at, record in enumerate(altered):
            headers = record[HEADERS:]
            previous = link(previous, record[:CHAIN], headers if headers != NO_HEADERS else ())
            altered[at] = record._replace(chain=previous)
    return altered


def check_log(records: list[Record], altered: list[Record]) -> None:
    """Check that an altered log is read, or refused by a documented error, and never verified as it was."""
    log = AlteredLog(altered)
    for record in altered:
        with suppress(BrokenLog):
            to_event(record)
            is_intact(record)
        with suppress(BrokenLog):
            to_entry(record._replace(type=ACCESS_AUDITED))
        with suppress(BrokenLog):
            to_removal(record)
    with suppress(BrokenLog):
        fold(log)
    reader = Reader(log, SystemClock())
    with suppress(BrokenLog):
        chain = reader.verify_log().chain
        assert (chain == records[-1].chain.hex()) == (altered == records)
    for query in (reader.get_message, reader.explain_message):
        for id_ in ("m", "unknown"):
            with suppress(PostroomError):
                query(id_)
    with suppress(PostroomError):
        reader.get_backlog()
    with suppress(PostroomError):
        reader.list_dead_letters()
    with suppress(PostroomError):
        reader.peek_messages("orders")
