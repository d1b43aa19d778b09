"""Target: commits of a log that was altered on disk.

The first byte of an input chooses the commit, the second the field, and the third how it is changed and
whether the chain hashes are computed anew, as by somebody who hides the change; the rest is the value. A
field keeps its type, which stores enforce.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.queries import Reader
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.adapters.system.clock import SystemClock
from postroom.application.access.audit import to_entry, to_removal
from postroom.application.mailbox.codec import is_intact, to_records
from postroom.application.mailbox.stored_snapshots import fold
from postroom.application.messages import NewMessage
from postroom.domain.commit import GENESIS, Commit, link
from postroom.domain.errors import BrokenLog, PostroomError
from postroom.domain.policy import TopicPolicy
from postroom.domain.record import StoredEvent
from tests.fuzz.target import Check

MAILBOX = "acme@one"
_FIELDS = ("first", "last", "epoch", "at", "chain", "events", "envelopes")
_VALUE, _SPLICE = range(2)
HIDDEN = 8
"""Flag of the third byte: the chain hashes are computed anew."""


def _seed(commit: int, field: str, kind: int, value: bytes, *, is_hidden: bool = True) -> bytes:
    return bytes([commit, _FIELDS.index(field), kind | (HIDDEN if is_hidden else 0)]) + value


SEEDS = [
    _seed(0, "events", _VALUE, b"\x90"),
    _seed(2, "events", _VALUE, b"\x91\x95\xaeMessageAcked.1\x01\xc4\x10" + bytes(16) + b"\x02\x01\x01"),
    _seed(2, "events", _VALUE, b""),
    _seed(2, "events", _SPLICE, b"\x00\x11\x02"),
    _seed(3, "events", _SPLICE, b"\x00\x20\xff"),
    _seed(4, "events", _SPLICE, b"\x00\x01\x96"),
    _seed(2, "envelopes", _VALUE, b"\x91\xc4\x02\x0a\x00"),
    _seed(2, "envelopes", _VALUE, b""),
    _seed(2, "envelopes", _SPLICE, b"\x00\x10\x00"),
    _seed(3, "last", _VALUE, b"\x7f" + b"\xff" * 7),
    _seed(3, "first", _VALUE, b"\x00"),
    _seed(4, "epoch", _VALUE, b"\x80" + b"\x00" * 7),
    _seed(6, "at", _VALUE, b"\x80" + b"\x00" * 7),
    _seed(1, "first", _VALUE, b"\x02", is_hidden=False),
    _seed(1, "chain", _VALUE, bytes(32), is_hidden=False),
]
BOMBS = [
    _seed(commit, field, _VALUE, bomb)
    for commit in (0, 2, 3)
    for field in ("events", "envelopes")
    for bomb in (b"\x91" * (1 << 20), b"\xdd\xff\xff\xff\xff", b"\x81\xa1a" * 300_000)
]


class AlteredLog(MemoryEventLog):
    """A log whose commits are not those that were appended."""

    def __init__(self, log: MemoryEventLog, commits: list[Commit]) -> None:
        super().__init__(MAILBOX)
        self._index = log._index
        self._commits = commits


async def _history() -> MemoryEventLog:
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
        log = mailbox.engine.log
        assert isinstance(log, MemoryEventLog)
        return log


@contextmanager
def opened() -> Iterator[Check]:
    """Yield the check, over the history of a mailbox."""
    log = asyncio.run(_history())
    commits = list(log.commits())

    def check(data: bytes) -> None:
        altered = alter(commits, data)
        if altered is not None:
            check_log(commits, AlteredLog(log, altered))

    yield check


def alter(commits: list[Commit], data: bytes) -> list[Commit] | None:
    """Return the commits with one field of one of them changed; None without a value."""
    if len(data) < 3:
        return None
    index, field, kind = data[0] % len(commits), _FIELDS[data[1] % len(_FIELDS)], data[2]
    former, value = getattr(commits[index], field), cast(Any, data[3:])
    if isinstance(former, int):
        value = int.from_bytes(value[:8], "big", signed=True)
    elif kind & 7 == _SPLICE and len(value) > 2:
        start = int.from_bytes(value[:2], "big") % (len(former) + 1)
        value = former[:start] + value[2:] + former[start + len(value) - 2 :]
    altered = list(commits)
    altered[index] = commits[index]._replace(**{field: value})
    if kind & HIDDEN:
        previous = GENESIS
        for at, commit in enumerate(altered):
            previous = link(previous, *commit[:4], commit.events)
            altered[at] = commit._replace(chain=previous)
    return altered


def check_log(commits: list[Commit], log: AlteredLog) -> None:
    """Check that an altered log is read, or refused by a documented error, and never verified as it was."""
    for commit in log.commits():
        with suppress(BrokenLog):
            for record in to_records(commit):
                is_intact(record)
                if isinstance(record.event, StoredEvent):
                    to_entry(record)
                    to_removal(record)
    with suppress(BrokenLog):
        fold(log)
    reader = Reader(log, SystemClock())
    with suppress(BrokenLog):
        chain = reader.verify_log().chain
        assert (chain == commits[-1].chain.hex()) == (list(log.commits()) == commits)
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
