"""What `verify` says of a log whose chain is right, but whose index or events are not."""

import asyncio
from collections.abc import Callable

import pytest
import pytest_asyncio
from msgspec.structs import replace

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.mailbox import records as records_module
from postroom.application.mailbox.codec import make_commit, to_records
from postroom.application.queries import verify_index
from postroom.application.queries.verify import VerifyLog
from postroom.domain.commit import GENESIS, IndexEntry
from postroom.domain.errors import BrokenLog
from postroom.domain.message import MessageAcked, MessageSent
from postroom.domain.names import mailbox_stream
from postroom.domain.record import Event
from tests.support.commits import as_appended
from tests.support.stores import MAILBOX, Place, live, message, receive_one

MIDDLE = 20


class OpenLog(MemoryEventLog):
    """A log whose index a test may alter."""

    @property
    def index(self) -> dict[bytes, list[IndexEntry]]:
        return self._index


@pytest_asyncio.fixture
async def log(monkeypatch: pytest.MonkeyPatch) -> OpenLog:
    """The log of a mailbox, which indexes events 30 positions after the first of their message."""
    monkeypatch.setattr(records_module, "SCAN_POSITIONS", 30)
    monkeypatch.setattr(verify_index, "BATCH_STREAMS", 7)
    log = OpenLog(MAILBOX)
    async with Place(lambda: log).open() as mailbox:
        await mailbox.send_message(message(message_id="early"))
        await live(mailbox, 20, "busy")
        await mailbox.ack_messages([(await receive_one(mailbox)).receipt])
    return log


def broken(log: MemoryEventLog) -> BrokenLog:
    with pytest.raises(BrokenLog, match=f"the log of {MAILBOX} was altered. Restore the store") as found:
        VerifyLog(log)()
    return found.value


def sent(log: OpenLog, number: int = MIDDLE) -> IndexEntry:
    """Return the entry of a message in the middle of the log, or of another."""
    events = [event for _, event in log.replay() if isinstance(event, MessageSent)]
    return log.index[events[number].stream][0]


def test_a_log_that_nobody_touched_is_intact(log: OpenLog) -> None:
    assert VerifyLog(log)().messages == 21
    assert any(entry.last for entries in log.index.values() for entry in entries)


async def test_a_log_that_grows_while_it_is_verified_is_intact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "SCAN_POSITIONS", 30)
    log = OpenLog(MAILBOX)
    async with Place(lambda: log).open() as mailbox:
        await live(mailbox, 20)
        growing = asyncio.create_task(_grow(mailbox))
        try:
            for _ in range(20):
                assert (await asyncio.to_thread(VerifyLog(log))).messages >= 20
        finally:
            growing.cancel()


async def _grow(mailbox: OwnedMailbox) -> None:
    while True:
        await mailbox.send_batch([message()] * 10)
        for received in await mailbox.receive_messages("orders", max_messages=10):
            await received.ack()


def test_a_missing_entry_is_found(log: OpenLog) -> None:
    entry = sent(log)
    del log.index[entry.stream]
    found = broken(log)
    assert f"has no entry for version 1 of stream {entry.stream.hex()}" in str(found)
    assert found.position == entry.position


def test_an_entry_whose_stream_was_altered_is_found(log: OpenLog) -> None:
    entry = sent(log)
    log.index[entry.stream] = [replace(entry, stream=b"somebody's strm.")]
    found = broken(log)
    assert f"has no entry for version 1 of stream {entry.stream.hex()}" in str(found)
    assert found.position == entry.position


def test_an_entry_that_leads_elsewhere_is_found(log: OpenLog) -> None:
    entry = sent(log)
    log.index[entry.stream] = [replace(entry, position=5)]
    found = broken(log)
    assert f"has position 5 for version 1 of stream {entry.stream.hex()}" in str(found)
    assert found.position == entry.position


@pytest.mark.parametrize("position", [1, 50, 10**6])
def test_an_entry_that_leads_to_nothing_is_found(log: OpenLog, position: int) -> None:
    log.index[b"nobody's stream."] = [IndexEntry(b"nobody's stream.", 1, position)]
    found = broken(log)
    assert f"leads to position {position} for version 1 of stream {b'nobody'.hex()}" in str(found)
    assert found.position == position


def test_a_second_entry_of_a_message_is_found(log: OpenLog) -> None:
    entry = sent(log)
    log.index[entry.stream].append(IndexEntry(entry.stream, 2, entry.position + 1))
    assert "version 2" in str(broken(log))


@pytest.mark.parametrize("version", [1, 2])
def test_a_missing_entry_of_the_mailbox_itself_is_found(log: OpenLog, version: int) -> None:
    own = mailbox_stream(MAILBOX)
    log.index[own] = [entry for entry in log.index[own] if entry.version != version]
    found = broken(log)
    assert f"no entry for version {version} of stream {own.hex()}" in str(found)
    assert found.position == version


@pytest.mark.parametrize("last", [None, 4])
def test_a_last_event_that_is_missing_or_elsewhere_is_found(log: OpenLog, last: int | None) -> None:
    entry = sent(log, 0)
    assert entry.last == log.head().position  # type: ignore[union-attr]  # it has events
    log.index[entry.stream] = [replace(entry, last=last)]
    found = broken(log)
    assert f"instead of position {entry.last}" in str(found)
    assert found.position == entry.position


def test_a_last_event_that_should_not_be_there_is_found(log: OpenLog) -> None:
    entry = sent(log)
    log.index[entry.stream] = [replace(entry, last=entry.position + 1)]
    assert "instead of none" in str(broken(log))


# -- events that an attacker chained again ---


def rewritten(log: MemoryEventLog, change: Callable[[list[Event], list[int]], None]) -> MemoryEventLog:
    """Return the log with changed events and distances, chained again from its start."""
    other = MemoryEventLog(log.mailbox)
    events: list[Event] = []
    distances: list[int] = []
    for record in log.read():
        events.append(record.event)
        distances.append(record.distance)
    change(events, distances)
    chain = GENESIS
    for commit in log.commits():
        own = slice(commit.first - 1, commit.last)
        made = make_commit(
            events[own], distances[own], first=commit.first, epoch=commit.epoch, previous=chain
        )
        other.append(as_appended([made]))
        chain = made.chain
    return other


def test_a_log_that_is_chained_again_without_a_change_is_intact(log: OpenLog, unindexed: None) -> None:
    assert VerifyLog(rewritten(log, lambda events, distances: None))().messages == 21


def test_an_event_that_does_not_lead_to_the_one_before_is_found(log: OpenLog, unindexed: None) -> None:
    def shift(events: list[Event], distances: list[int]) -> None:
        distances[-1] += 1

    found = broken(rewritten(log, shift))
    assert found.position == log.head().position  # type: ignore[union-attr]  # it has events


def test_an_event_that_cannot_be_applied_is_named_with_its_commit(log: OpenLog, unindexed: None) -> None:
    position = log.head().position  # type: ignore[union-attr]  # it has events

    def ack_again(events: list[Event], distances: list[int]) -> None:
        acked = next(event for event in events if isinstance(event, MessageAcked))
        events[-1] = replace(events[-1], stream=acked.stream)

    with pytest.raises(
        BrokenLog, match=f"position {position}, in the commit of positions .* can't be applied"
    ):
        VerifyLog(rewritten(log, ack_again))()


def test_an_epoch_that_its_owner_did_not_have_is_found(log: OpenLog) -> None:
    *commits, last = log.commits()
    (made,) = [
        make_commit(
            [record.event for record in to_records(last)],
            [record.distance for record in to_records(last)],
            first=last.first,
            epoch=last.epoch + 1,
            previous=commits[-1].chain,
        )
    ]
    other = MemoryEventLog(MAILBOX)
    other.append(as_appended([*commits, made]))
    with pytest.raises(BrokenLog, match="has epoch 2 instead of 1"):
        VerifyLog(other)()


@pytest.fixture
def unindexed(log: OpenLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index has no last events, as in a log of messages that live shortly."""
    monkeypatch.setattr(records_module, "SCAN_POSITIONS", 10**6)
