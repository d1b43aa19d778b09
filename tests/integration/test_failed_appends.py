"""What a mailbox is after an append that failed, and owners that race."""

import asyncio
from collections.abc import Sequence
from threading import Event

import msgspec
import pytest

from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.mailbox import engine as engine_module
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.mailbox.retention import Retention
from postroom.application.mailbox.stored_snapshots import fold
from postroom.application.ports.event_log import Answer, Head
from postroom.application.threads import cancel_and_wait
from postroom.domain.commit import Commit
from postroom.domain.errors import DuplicateRecord, Fenced, InternalError, Unavailable, WrongPosition
from postroom.domain.mailbox.commands import Ack, Command, Send, SetPolicy
from postroom.domain.mailbox.events import TopicPolicySet
from postroom.domain.message import Headers, Receipt
from postroom.domain.policy import TopicPolicy
from tests.support.clocks import ManualClock
from tests.support.commits import as_appended
from tests.support.snapshots import take_snapshot
from tests.support.stores import MAILBOX, Place, folded_whole, memory_place, message, receive_one
from tests.support.waiting import until

TOPIC = "orders"
HANG_SECONDS = 240
SEND = Send(b"m" * 16, TOPIC, 1, bytes(32), bytes(32), Headers(0), b"x")
RECEIPT = Receipt(b"r" * 16, 1, 1)


class FailingLog(MemoryEventLog):
    """A log whose next append fails when told to, before or after it kept the commits."""

    fails: str | None = None

    def append(self, commits: Sequence[Commit]) -> None:
        failure, self.fails = self.fails, None
        if failure == "before":
            raise Unavailable("The disk is full.")
        super().append(commits)
        if failure == "after":
            raise Unavailable("The connection was lost.")


async def test_a_mailbox_whose_append_failed_ends_deliveries_without_being_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "RECOVERY_SECONDS", 0.01)
    log = FailingLog(MAILBOX)
    place = Place(lambda: log)
    async with place.open() as mailbox:
        await mailbox.send_message(message())
        await receive_one(mailbox)
        log.fails = "before"
        with pytest.raises(Unavailable):
            await mailbox.send_message(message())
        place.clock.advance(40_000)
        async with asyncio.timeout(HANG_SECONDS):
            while all(record.type != "MessageRequeued" for record in log.read()):
                await asyncio.sleep(0.001)


async def test_a_failed_append_voids_the_state_also_behind_a_group_that_is_still_checked() -> None:
    class Checked(FailingLog):
        is_asked, is_checked = Event(), Event()

        def head(self) -> Head | None:
            self.is_asked.set()
            self.is_checked.wait(HANG_SECONDS)
            return super().head()

    log = Checked(MAILBOX)
    log.is_checked.set()
    async with Place(lambda: log).open() as mailbox:
        await mailbox.send_message(message())
        log.is_checked.clear()
        log.is_asked.clear()
        nothing = asyncio.create_task(mailbox.receive_messages("others"))  # answered once nobody else owns it
        await until(log.is_asked.is_set)
        log.fails = "before"
        sending = asyncio.create_task(mailbox.send_message(message()))
        async with asyncio.timeout(HANG_SECONDS):
            await until(lambda: log.fails is None)
        log.is_checked.set()
        assert await nothing == []
        with pytest.raises(Unavailable):
            await sending
        await receive_one(mailbox)
        assert await mailbox.receive_messages(TOPIC) == []
        assert mailbox.engine.mailbox.position == folded_whole(log).position


async def test_a_command_that_can_not_be_queued_fails_alone() -> None:
    async with memory_place().open() as mailbox:
        loop = asyncio.get_running_loop()
        answers: list[asyncio.Future[list[Answer]]] = [loop.create_future() for _ in range(3)]
        malformed = msgspec.structs.replace(SEND, envelope=None)
        requests: list[list[Command]] = [[SEND], [malformed], [Ack(RECEIPT)]]
        for commands, each in zip(requests, answers, strict=True):
            assert mailbox.engine.start(commands, each)
        sent, error, acked = await asyncio.gather(*answers, return_exceptions=True)
        assert isinstance(sent, list)
        assert isinstance(error, TypeError)
        assert isinstance(acked, list)


async def test_a_receive_that_is_cancelled_before_its_mailbox_closes_leaves_its_message_ready() -> None:
    class SlowLog(FailingLog):
        is_appending, may_append = Event(), Event()

        def append(self, commits: Sequence[Commit]) -> None:
            self.is_appending.set()
            self.may_append.wait(HANG_SECONDS)
            super().append(commits)

    log = SlowLog(MAILBOX)
    log.may_append.set()
    place = Place(lambda: log)
    async with place.open() as mailbox:
        await mailbox.send_message(message())
        log.may_append.clear()
        log.is_appending.clear()
        receiving = asyncio.create_task(mailbox.receive_messages(TOPIC))
        async with asyncio.timeout(HANG_SECONDS):
            await until(log.is_appending.is_set)
        await cancel_and_wait(receiving)
        asyncio.get_running_loop().call_later(0.05, log.may_append.set)  # when it has begun to close
    async with place.open() as mailbox:
        assert (await receive_one(mailbox)).attempt == 1


async def test_a_defect_of_the_log_fails_the_calls_that_need_it_and_no_others() -> None:
    class DefectiveLog(FailingLog):
        is_defective = False

        def head(self) -> Head | None:
            if self.is_defective:
                raise OSError("The disk is gone.")
            return super().head()

    log = DefectiveLog(MAILBOX)
    async with Place(lambda: log).open() as mailbox, asyncio.timeout(HANG_SECONDS):
        log.is_defective = True
        for _ in range(3):
            with pytest.raises(Unavailable, match="disk is gone"):
                await mailbox.receive_messages(TOPIC)
        await mailbox.send_message(message())
        log.fails = "before"
        with pytest.raises(Unavailable, match="disk is full"):
            await mailbox.send_message(message())
        with pytest.raises(Unavailable, match="disk is gone"):  # when the state is loaded again
            await mailbox.send_message(message())
        log.is_defective = False
        assert [each.attempt for each in await mailbox.receive_messages(TOPIC)] == [1]


@pytest.mark.parametrize("failure", ["before", "after"])
async def test_after_a_failed_append_the_mailbox_is_what_its_log_says(failure: str) -> None:
    log = FailingLog(MAILBOX)
    async with Place(lambda: log).open() as mailbox:
        first = await mailbox.send_message(message(b"1", idem_key="1"))
        log.fails = failure
        with pytest.raises(Unavailable, match=r"disk is full|connection was lost"):
            await mailbox.send_message(message(b"2", idem_key="2"))

        again = await mailbox.send_message(
            message(b"2", idem_key="2")
        )  # the sender tries again, as it should
        assert again.duplicate == (failure == "after")
        received = await mailbox.receive_messages(TOPIC)
        assert [each.payload for each in received] == [b"1", b"2"]
        assert received[0].message_id == first.message_id
        assert take_snapshot(mailbox.engine.mailbox) == take_snapshot(folded_whole(log))


async def test_a_failed_receive_promises_nothing_and_loses_nothing() -> None:
    log = FailingLog(MAILBOX)
    async with Place(lambda: log).open() as mailbox:
        await mailbox.send_message(message())
        log.fails = "before"
        with pytest.raises(Unavailable):
            await mailbox.receive_messages(TOPIC)
        received = await receive_one(mailbox)
        assert (received.attempt, received.payload) == (1, b"hello")


async def test_an_append_with_an_event_that_exists_is_decided_anew_only_once() -> None:
    class Refusing(MemoryEventLog):
        appends = 0

        def append(self, commits: Sequence[Commit]) -> None:
            self.appends += 1
            if self.appends > 1:  # the first is that of the owner
                raise DuplicateRecord("The event exists.")
            super().append(commits)

    log = Refusing(MAILBOX)
    async with Place(lambda: log).open() as mailbox, asyncio.timeout(HANG_SECONDS):
        with pytest.raises(DuplicateRecord):
            await mailbox.send_message(message())
        assert log.appends == 3


async def test_an_owner_that_was_taken_over_writes_no_more_and_says_why() -> None:
    log = MemoryEventLog(MAILBOX)
    place = Place(lambda: log)
    async with place.open() as old:
        await old.send_message(message(b"1"))
        async with place.open() as new:
            with pytest.raises(Fenced, match="taken over by epoch 2 while this process held epoch 1"):
                await old.send_message(message(b"2"))
            with pytest.raises(Fenced):
                await old.receive_messages(TOPIC)
            assert [each.payload for each in await new.receive_messages(TOPIC)] == [b"1"]


class RacedLog(MemoryEventLog):
    """A log to which somebody else appends just before the next append."""

    late: Sequence[Commit] = ()

    def append(self, commits: Sequence[Commit]) -> None:
        late, self.late = self.late, ()
        super().append(late)
        super().append(commits)


async def test_a_new_owner_reads_again_when_the_old_ones_last_batch_lands_first() -> None:
    log, ahead = RacedLog(MAILBOX), MemoryEventLog(MAILBOX)
    async with Place(lambda: log).open() as mailbox:
        await mailbox.send_message(message(b"1"))
        ahead.append(as_appended(log.commits()))
    async with Place(lambda: ahead).open() as mailbox:
        await mailbox.send_message(message(b"2"))
    log.late = as_appended(ahead.commits(after=3))
    async with Place(lambda: log).open() as mailbox:
        assert [each.payload for each in await mailbox.receive_messages(TOPIC)] == [b"1", b"2"]
        assert mailbox.engine.mailbox.epoch == 3


async def test_opening_gives_up_when_somebody_else_keeps_appending() -> None:
    class Contended(MemoryEventLog):
        def append(self, commits: Sequence[Commit]) -> None:
            raise WrongPosition(self.mailbox, commits[0].first - 1, commits[0].first)

    with pytest.raises(WrongPosition, match="open the mailbox again"):
        await MailboxEngine(Contended(MAILBOX), ManualClock()).open("test")


async def test_an_event_that_cannot_be_encoded_fails_its_own_command_only() -> None:
    class Slow(MemoryEventLog):
        may_append = Event()

        def append(self, commits: Sequence[Commit]) -> None:
            assert self.may_append.wait(HANG_SECONDS)
            super().append(commits)

    log = Slow(MAILBOX)
    log.may_append.set()
    engine = MailboxEngine(log, ManualClock())
    await engine.open("process 1")
    log.may_append.clear()
    earlier = asyncio.create_task(engine.submit([SetPolicy(TOPIC, TopicPolicy())]))
    await until(lambda: bool(engine.mailbox.settings.topics))
    poison = asyncio.create_task(
        engine.submit([SetPolicy("\ud800", TopicPolicy()), SetPolicy("invoices", TopicPolicy())])
    )
    await until(lambda: len(engine.mailbox.settings.topics) > 1)
    log.may_append.set()
    async with asyncio.timeout(HANG_SECONDS):
        assert await earlier == [1]
        failed, accepted = await poison
        await engine.close()
    assert isinstance(failed, InternalError)
    assert accepted == 1
    assert [event.topic for _, event in log.replay() if isinstance(event, TopicPolicySet)] == [
        "orders",
        "invoices",
    ]


async def test_a_snapshot_whose_commit_was_not_appended_replaces_none() -> None:
    log, clock = FailingLog(MAILBOX), ManualClock()
    engine = MailboxEngine(log, clock)
    await engine.open("process 1")
    await engine.submit([SetPolicy(TOPIC, TopicPolicy())])
    clock.advance(10_000)
    assert await Retention(engine).remove_before(engine.now()) == 3
    log.fails = "before"
    failed = engine.submit([SetPolicy("invoices", TopicPolicy())])
    results = await asyncio.gather(failed, engine.take_snapshot(whole=True), return_exceptions=True)
    assert [type(result) for result in results] == [Unavailable, Unavailable]
    assert await engine.submit([SetPolicy("invoices", TopicPolicy())]) == [1]
    await engine.close()
    assert set(fold(log).settings.topics) == {TOPIC, "invoices"}
