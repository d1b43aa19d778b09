"""Mailboxes owned by a lease (RFC-049): the lease's epoch, and owners whose lease has ended."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.mailbox import engine as engine_module
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.messages import read_receipt, write_receipt
from postroom.domain.commit import Commit
from postroom.domain.errors import Fenced, InvalidRequest, Unavailable
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.message import MAX_EPOCH
from tests.support.clocks import ManualClock
from tests.support.commits import as_appended
from tests.support.stores import MAILBOX, Place, message, receive_one
from tests.support.waiting import SECONDS, until

TOPIC = "orders"


class Lease:
    """A lease that a test ends and renews."""

    is_held = True

    def may_append(self) -> bool:
        return self.is_held


@asynccontextmanager
async def leased(
    log: MemoryEventLog, lease: Lease, clock: ManualClock | None = None, epoch: int | None = None
) -> AsyncIterator[OwnedMailbox]:
    clock = clock or ManualClock()
    engine = MailboxEngine(log, clock, may_append=lease.may_append)
    await engine.open("test", epoch=epoch)
    try:
        yield OwnedMailbox(engine, clock)
    finally:
        await engine.close()


# -- the epoch of the lease ---


async def test_a_mailbox_is_opened_with_exactly_the_epoch_of_its_lease() -> None:
    log = MemoryEventLog(MAILBOX)
    for epoch in (7, 8, 1_800_000_000_000):
        async with leased(log, Lease(), epoch=epoch) as mailbox:
            await mailbox.send_message(message())
            assert mailbox.engine.mailbox.epoch == epoch
            head = log.head()
            assert head is not None
            assert head.epoch == epoch
    async with Place(lambda: log).open() as mailbox:
        assert mailbox.engine.mailbox.epoch == 1_800_000_000_001


@pytest.mark.parametrize("epoch", [1, 6, 7])
async def test_an_epoch_that_is_not_above_the_logs_is_refused_and_nothing_is_written(epoch: int) -> None:
    log = MemoryEventLog(MAILBOX)
    async with leased(log, Lease(), epoch=7) as owner:
        before = list(log.read())
        with pytest.raises(Fenced):
            await MailboxEngine(log, ManualClock()).open("test", epoch=epoch)
        assert list(log.read()) == before
        await owner.send_message(message())


async def test_an_epoch_that_another_owner_used_meanwhile_is_refused() -> None:
    class Raced(MemoryEventLog):
        late: Sequence[Commit] = ()

        def append(self, commits: Sequence[Commit]) -> None:
            late, self.late = self.late, ()
            super().append(late)
            super().append(commits)

    ahead, log = MemoryEventLog(MAILBOX), Raced(MAILBOX)
    async with leased(ahead, Lease(), epoch=5):
        pass
    log.late = as_appended(ahead.commits())
    with pytest.raises(Fenced, match="opened with epoch 5 before"):
        await MailboxEngine(log, ManualClock()).open("test", epoch=5)
    assert list(log.read()) == list(ahead.read())


@pytest.mark.parametrize("epoch", [0, -1, MAX_EPOCH + 1, 1.0, "1", True])
async def test_an_epoch_is_a_number_that_a_receipt_can_carry(epoch: object) -> None:
    with pytest.raises(InvalidRequest, match="epoch"):
        await MailboxEngine(MemoryEventLog(MAILBOX), ManualClock()).open("test", epoch=epoch)  # type: ignore[arg-type]


async def test_receipts_carry_the_greatest_epoch() -> None:
    async with leased(MemoryEventLog(MAILBOX), Lease(), epoch=MAX_EPOCH) as mailbox:
        await mailbox.send_message(message())
        receipt = (await receive_one(mailbox)).receipt
        assert read_receipt(write_receipt(receipt)) == receipt
        assert await mailbox.ack_messages([receipt]) == [None]


# -- the end of the lease ---


async def test_an_owner_whose_lease_has_ended_appends_nothing_until_it_is_renewed() -> None:
    log, lease = MemoryEventLog(MAILBOX), Lease()
    async with leased(log, lease) as mailbox:
        await mailbox.send_message(message(b"1"))
        before = log.head()
        lease.is_held = False
        with pytest.raises(Unavailable, match="lease of mailbox acme@one was not renewed") as refused:
            await mailbox.send_message(message(b"2"))
        assert refused.value.retry_after_ms > 0
        with pytest.raises(Unavailable):
            await mailbox.receive_messages(TOPIC, wait_ms=60_000)
        assert log.head() == before
        lease.is_held = True
        await mailbox.send_message(message(b"3"))
        received = await mailbox.receive_messages(TOPIC)
        assert [each.payload for each in received] == [b"1", b"3"]


async def test_an_owner_whose_lease_has_ended_answers_no_queries() -> None:
    lease = Lease()
    async with leased(MemoryEventLog(MAILBOX), lease) as mailbox:
        lease.is_held = False
        with pytest.raises(Unavailable, match="lease"):
            await mailbox.get_backlog()
        with pytest.raises(Unavailable, match="lease"):
            await mailbox.peek_messages(TOPIC)


async def test_timers_wait_while_the_lease_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "LEASE_CHECK_SECONDS", 0.01)
    log, lease, clock = MemoryEventLog(MAILBOX), Lease(), ManualClock()
    async with leased(log, lease, clock) as mailbox:
        await mailbox.send_message(message())
        await receive_one(mailbox)
        lease.is_held = False
        with pytest.raises(Unavailable):  # which wakes the owner, so that it looks at its lease
            await mailbox.send_message(message())
        clock.advance(3_600_000)
        before = log.head()
        await asyncio.sleep(0.05)
        assert log.head() == before
        lease.is_held = True
        await until(lambda: any(record.type == "MessageRequeued" for record in log.read()))


async def test_a_group_that_was_decided_before_the_lease_ended_is_not_appended_after_it() -> None:
    log, lease, clock = MemoryEventLog(MAILBOX), Lease(), ManualClock()

    def end_lease(state: Mailbox, size: int) -> None:
        lease.is_held = False  # in the middle of a decision

    engine = MailboxEngine(log, clock, may_append=lease.may_append, admit=end_lease)
    await engine.open("test")
    before = log.head()
    with pytest.raises(Unavailable, match="lease"):
        await OwnedMailbox(engine, clock).send_message(message())
    assert log.head() == before
    lease.is_held = True
    received = await OwnedMailbox(engine, clock).receive_messages(TOPIC)
    assert received == []  # the state was loaded again
    await engine.close()


async def test_a_mailbox_whose_lease_has_ended_closes_at_once() -> None:
    log, lease = MemoryEventLog(MAILBOX), Lease()
    async with asyncio.timeout(SECONDS):
        async with leased(log, lease) as mailbox:
            sending = [asyncio.create_task(mailbox.send_message(message())) for _ in range(3)]
            lease.is_held = False
        answers = await asyncio.gather(*sending, return_exceptions=True)
    assert all(isinstance(each, Unavailable) for each in answers)


async def test_a_mailbox_is_not_taken_over_after_the_lease_has_ended() -> None:
    log, lease = MemoryEventLog(MAILBOX), Lease()
    lease.is_held = False
    with pytest.raises(Unavailable, match="lease"):
        async with leased(log, lease, epoch=3):
            pass
    assert log.head() is None
