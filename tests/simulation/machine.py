"""The state machine: commands, time, faults and crashes in any order, the real mailbox against the model."""

import asyncio
from collections import Counter
from contextlib import suppress
from typing import Any
from uuid import UUID

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.mailbox.stored_snapshots import fold
from postroom.application.queries.mailbox_past import StateAt
from postroom.application.queries.measure_mailbox import GetBacklog, MeasureMailbox
from postroom.application.queries.message_lists import ListDeadLetters
from postroom.application.queries.verify import VerifyLog
from postroom.domain.errors import PostroomError, Rejected, Unavailable
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.message import MessageRequeued, Status
from postroom.domain.settings import SettingsChanges
from tests.simulation.choices import (
    LIMITS,
    POLICY,
    SHARDS,
    TOPICS,
    Choices,
    durations_ms,
    keys,
    own_ids,
    skews_ms,
    topics,
    wild_skews_ms,
)
from tests.simulation.decisions import Decisions
from tests.simulation.model import Model
from tests.simulation.model_state import DEAD, EXPIRY_GRACE, IN_FLIGHT, READY, UNKNOWN
from tests.simulation.operations import (
    Ack,
    Operation,
    Pause,
    Purge,
    Receipts,
    Receive,
    Redrive,
    Resume,
    Room,
    Send,
)
from tests.simulation.view import view
from tests.simulation.world import MS, Disk, LogHandle, SimulatedLoop, WithoutSnapshots
from tests.support.clocks import SimulatedClock

MAILBOX = "simulated@test"
STATES = {Status.READY: READY, Status.IN_FLIGHT: IN_FLIGHT, Status.DEAD: DEAD}


class MailboxMachine(RuleBasedStateMachine):
    """Drive one mailbox through its handlers, and compare it with the model after every step."""

    policy = POLICY
    """Default policy of the topics."""
    has_unique_keys = False

    def __init__(self) -> None:
        super().__init__()
        self.clock = SimulatedClock()
        self.loop = SimulatedLoop(self.clock)
        self.disk = Disk(MAILBOX)
        self.model = Model(self.policy, LIMITS, SHARDS)
        self.receipts = Receipts()
        self.choose = Choices(self.policy, unique=self.has_unique_keys)
        self.boot = ""
        self.is_sound = False
        self.folded: tuple[int, list[Mailbox]] = (-1, [])
        self.verified = (-1, 0)
        self.dead_lettered: Counter[str] = Counter()

    @initialize(skew_ms=skews_ms)
    def open_for_the_first_time(self, skew_ms: int) -> None:
        self.clock.skew = skew_ms * MS
        self._open()
        self.model.restart(self.clock.wall(), 0, time_went_on=False)

    # -- commands ---

    @rule(data=st.data(), topic=topics)
    def send(self, data: st.DataObject, topic: str) -> None:
        self._do([self.choose.send(data, topic)])

    @rule(data=st.data(), topic=topics)
    def send_with_a_key(self, data: st.DataObject, topic: str) -> None:
        self._do([self.choose.send(data, topic, data.draw(keys, "key"))])

    @precondition(lambda self: self.choose.with_key)
    @rule(data=st.data())
    def send_again(self, data: st.DataObject) -> None:
        self._do([self.choose.repeat(data)])

    @rule(topic=topics, sticky=st.sampled_from([None, "a"]), count=st.integers(2, 6))
    def send_several(self, topic: str, sticky: str | None, count: int) -> None:
        self._do(self.choose.bulk(topic, sticky, count))

    @rule(topic=topics, id_=own_ids, payload=st.sampled_from([b"own id", b"own id", b"other"]))
    def send_under_an_id_of_the_senders_own(self, topic: str, id_: str, payload: bytes) -> None:
        self._do([Send(id_, topic, payload, has_external_id=True)])

    @rule(data=st.data(), topic=topics)
    def receive(self, data: st.DataObject, topic: str) -> None:
        self._do([self.choose.receive(data, topic)])

    @precondition(lambda self: self.model.delivered)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        self._do([self.choose.settlement(data, len(self.model.delivered))])

    @rule(data=st.data())
    def change_a_message(self, data: st.DataObject) -> None:
        self._do([self.choose.change(data, list(self.model.messages))])

    @rule(data=st.data(), topic=topics)
    def send_and_receive(self, data: st.DataObject, topic: str) -> None:
        self.send(data, topic)
        self.receive(data, topic)

    @precondition(lambda self: self.model.delivered)
    @rule(data=st.data(), ends=st.integers(1, 3))
    def settle_the_latest(self, data: st.DataObject, ends: int) -> None:
        for _ in range(ends):
            self._do([self.choose.settlement(data, len(self.model.delivered), latest=2)])

    @rule(topic=topics, limit=st.sampled_from([1, 10]))
    def redrive(self, topic: str, limit: int) -> None:
        self._do([Redrive(topic, limit)])

    @rule(topic=topics, ready=st.booleans())
    def purge(self, topic: str, ready: bool) -> None:
        self._do([Purge(topic, dead=True, ready=ready)])

    @rule(data=st.data(), topic=topics)
    def set_policy(self, data: st.DataObject, topic: str) -> None:
        self._do([self.choose.policy(data, topic)])

    @rule(data=st.data(), topic=topics, has_snapshot=st.booleans(), down_ms=st.none() | durations_ms)
    def a_topic_is_paused(
        self, data: st.DataObject, topic: str, has_snapshot: bool, down_ms: int | None
    ) -> None:
        """What is sent is received when it is resumed, though the process crashes in between."""
        self._do([Pause(topic)])
        if has_snapshot:
            self.save_a_snapshot(whole=False)
        if down_ms is not None:
            self.crash(down_ms)
        self.send_and_receive(data, topic)
        self.everything_promised_holds()
        self._do([Resume(topic)])

    @rule(data=st.data(), topic=topics, turns=st.integers(0, 6))
    def several_at_once(self, data: st.DataObject, topic: str, turns: int) -> None:
        """Commands of many callers share one append, or come while one is under way."""
        later = self.choose.group(data, topic, len(self.model.delivered), may_set_policy=False)
        self._do(self._group(data, topic), later=later, turns=turns)

    # -- time and faults ---

    @rule(duration_ms=durations_ms)
    def time_passes(self, duration_ms: int) -> None:
        self.clock.true += duration_ms * MS
        self.model.pass_time(self.clock.true)
        self._settle()

    @rule(duration_ms=durations_ms, moment=st.sampled_from(["before", "after"]))
    def time_passes_and_the_disk_fails(self, duration_ms: int, moment: str) -> None:
        self._fail_next_append(moment)
        self.time_passes(duration_ms)
        self.handle.fail_next = None
        self._poke()

    @rule(data=st.data(), topic=topics, moment=st.sampled_from(["before", "after"]), turns=st.integers(0, 6))
    def the_disk_fails(self, data: st.DataObject, topic: str, moment: str, turns: int) -> None:
        """An append fails while another may be under way; only the log knows whether they took effect."""
        operations = self._group(data, topic)
        self._fail_next_append(moment)
        self._do(operations, later=self._sends(), turns=turns, is_carried_out=lambda took_effect: took_effect)
        self.handle.fail_next = None
        self._poke()

    @rule(data=st.data(), topic=topics, turns=st.integers(1, 8))
    def callers_give_up(self, data: st.DataObject, topic: str, turns: int) -> None:
        """A caller that is cancelled gets no answer, but what it asked for happens all the same."""
        self._do(self._group(data, topic), give_up_after=turns, is_carried_out=lambda _: True)

    @rule(data=st.data(), topic=topics, turns=st.integers(0, 9), down_ms=durations_ms)
    def crash_at_work(self, data: st.DataObject, topic: str, turns: int, down_ms: int) -> None:
        """The process dies while commands are under way, and another one opens the same log."""
        operations = self._group(data, topic)
        self._do(
            operations,
            later=self._sends(),
            turns=turns // 2,
            kill_after=turns,
            is_carried_out=lambda took_effect: took_effect,
        )
        self._come_back(down_ms)

    @rule(down_ms=durations_ms)
    def crash(self, down_ms: int) -> None:
        self._kill()
        self._come_back(down_ms)

    @rule(down_ms=durations_ms, skew_ms=skews_ms)
    def reboot(self, down_ms: int, skew_ms: int) -> None:
        """The machine dies: its monotonic clock starts anew, and its wall clock may be two minutes off."""
        self._kill()
        self.clock.reboot()
        self._come_back(down_ms, skew_ms)

    @rule(skew_ms=wild_skews_ms)
    def the_wall_clock_is_set(self, skew_ms: int) -> None:
        self.clock.skew = skew_ms * MS

    @rule(whole=st.booleans())
    def save_a_snapshot(self, whole: bool) -> None:
        with suppress(Unavailable):  # the state may be void
            self.loop.play(self.engine.take_snapshot(whole=whole))

    # -- what must hold after every step ---

    @invariant()
    def everything_promised_holds(self) -> None:
        self.is_sound = False
        self._log_time_is_what_the_clocks_allow()
        self._the_mailbox_is_what_the_model_says()
        self._the_queries_tell_the_same()
        self._the_metrics_tell_the_same()
        self._nothing_exceeds_its_bounds()
        self._folding_the_log_again_gives_the_same_mailbox()
        self._the_log_verifies()
        self.is_sound = True

    def _log_time_is_what_the_clocks_allow(self) -> None:
        assert self.engine.now() == self.model.now

    def _the_mailbox_is_what_the_model_says(self) -> None:
        held = {
            str(UUID(bytes=m.stream)): (
                STATES[m.status],
                m.topic,
                m.shard,
                m.attempt,
                None if m.status == Status.DEAD else m.due,
                m.expires_at,
            )
            for m in self.engine.mailbox.messages.values()
        }
        expected = {
            m.id: (m.state, m.topic, m.shard, m.attempt, None if m.state == DEAD else m.due, m.expires_at)
            for m in self.model.messages.values()
            if m.state in STATES.values()
        }
        assert held == expected, f"they differ in {sorted(set(held.items()) ^ set(expected.items()))}"

    def _the_queries_tell_the_same(self) -> None:
        state_at = StateAt(self.handle, self.engine.now, lambda: self.engine.mailbox)
        dead = ListDeadLetters(state_at, self.handle)()
        assert [(d.message_id, d.reason, d.attempt, d.last_error) for d in dead.items] == [
            (m.id, m.reason, m.attempt, m.last_error) for m in self.model.messages.values() if m.state == DEAD
        ]
        backlog = GetBacklog(state_at)()
        counts = {
            (row.topic, row.shard): (row.ready, row.delayed, row.in_flight, row.dead)
            for row in backlog.shards
        }
        assert counts == self.model.count()

    def _the_metrics_tell_the_same(self) -> None:
        """Compare the gauges and counters of svc-mailbox I-10."""
        measure = MeasureMailbox(lambda: self.engine.mailbox, self.engine.metrics)
        metrics: dict[str, Any] = {each.name: each.samples for each in measure()}
        depth, in_flight, saturation = (
            {(labels["topic"], int(labels["shard"])): value for labels, value in metrics[f"postroom_{name}"]}
            for name in ("queue_depth", "inflight", "saturation")
        )
        counts = self.model.count()
        held = {shard: (row[0] + row[1], row[2]) for shard, row in counts.items() if any(row[:3])}
        assert {shard: (depth[shard], in_flight[shard]) for shard in depth} == held
        for (topic, number), value in saturation.items():
            capacity = self.model.topics[topic].policy.shard_capacity
            assert value == sum(held[topic, number]) / capacity
            assert 0 < value <= self.model.topics[topic].largest["shard_capacity"] / capacity
        dead, dead_lettered = Counter[str](), Counter[str]()
        for (topic, _), row in counts.items():
            dead[topic] += row[3]
        assert {labels["topic"]: value for labels, value in metrics["postroom_dead_letters"]} == +dead
        for labels, value in metrics["postroom_dlq"]:
            dead_lettered[labels["topic"]] += value
        assert dead_lettered >= dead | self.dead_lettered
        self.dead_lettered = dead_lettered

    def _nothing_exceeds_its_bounds(self) -> None:
        assert self.engine.mailbox.in_flight <= LIMITS.in_flight_ceiling
        for name, topic in self.engine.mailbox.topics.items():
            largest = self.model.topics[name].largest
            for number, shard in topic.shards.items():
                assert shard.size == len(self.model.unsettled(name, number)) <= largest["shard_capacity"]
            assert len(topic.dead) <= topic.policy.dead_capacity
            assert len(topic.window) <= largest["replay_capacity"]

    def _folding_the_log_again_gives_the_same_mailbox(self) -> None:
        if self.folded[0] != self.disk.changes:
            logs = WithoutSnapshots(self.disk), self.handle
            self.folded = self.disk.changes, [fold(log) for log in logs]
        now = self.engine.now()
        running = view(self.engine.mailbox, now)
        for mailbox in self.folded[1]:
            assert view(mailbox, now) == running

    def _the_log_verifies(self) -> None:
        if self.verified[0] != self.disk.changes:
            self.verified = self.disk.changes, VerifyLog(self.handle)().last
        assert self.verified[1] == self.engine.mailbox.position

    def teardown(self) -> None:
        """Consume everything: what was accepted must come out, or be dead with a trace."""
        try:
            if self.is_sound:
                self._drain()
        finally:
            if self.boot:
                self._kill()
            self.loop.close()

    # -- how ---

    def _do(
        self,
        operations: list[Operation],
        *,
        later: list[Operation] | None = None,
        turns: int = 0,
        give_up_after: int | None = None,
        kill_after: int | None = None,
        is_carried_out: Any = None,
    ) -> None:
        """Ask for `operations` at once, check the answers, and have the model follow.

        Arguments:
            later, turns: more operations, asked that many turns of the loop later.
            give_up_after, kill_after: cancel the callers, or kill the process, after that many turns.
            is_carried_out: tells whether `operations` that got no answer happened all the same, given whether
                their append took effect. Of what was asked `later`, the log is looked at.
        """
        self.is_sound = False
        end, before = self.disk.end, view(self.engine.mailbox, self.engine.now())

        tasks: list[asyncio.Task[Any]] = []

        async def play() -> list[Any]:
            tasks.extend(asyncio.create_task(self._ask(each)) for each in operations)
            await _turns(turns)
            tasks.extend(asyncio.create_task(self._ask(each)) for each in later or [])
            if give_up_after is not None:
                await _turns(give_up_after)
                for task in tasks:
                    task.cancel()
            if kill_after is not None:
                await _turns(kill_after)
                self.handle.kill()
                await self.engine.close()
            return await asyncio.gather(*tasks, return_exceptions=True)

        self.handle.took_effect.clear()
        answers = self.loop.play(play())
        took_effect = self.handle.took_effect[:1] == [True]
        written = list(self.disk.read(end))
        asked = list(zip(tasks, [*operations, *(later or [])], answers, strict=True))
        for _, operation, answer in sorted(asked, key=lambda each: self.decisions.rank(each[0])):
            if isinstance(answer, Unavailable | asyncio.CancelledError):
                assert is_carried_out is not None, f"{operation} failed: {answer!r}"
                known = operation.look_up(self.model, self.receipts, written)
                if known != UNKNOWN or is_carried_out(took_effect):
                    operation.tell(self.model, known)
            elif isinstance(answer, BaseException) and not isinstance(answer, Rejected):
                raise answer
            else:
                operation.tell(self.model, type(answer).__name__ if isinstance(answer, Rejected) else answer)
            self.model.forget_turns()
        last = {str(UUID(bytes=record.event.stream)): record.event for record in written}
        for id_, event in last.items():
            message = self.model.messages.get(id_)
            is_released = isinstance(event, MessageRequeued) and event.reason == "released"
            if (
                give_up_after is not None
                and is_released
                and message is not None
                and message.state == IN_FLIGHT
            ):
                self.model.release(message)
                self.model.forget_turns()
        if kill_after is None:
            self.model.end_what_ran_out()
        else:  # whether the process still got to it before it died, only the log knows
            left = fold(WithoutSnapshots(self.disk))
            overdue = {
                str(UUID(bytes=m.stream)) for m in left.overdue(self.model.now, len(left.messages) + 1)
            }
            self.model.end_what_ran_out(but=overdue, but_over_capacity=left.over_capacity)
        if kill_after is None and all(isinstance(answer, Rejected) for answer in answers):
            assert (self.disk.end, view(self.engine.mailbox, self.engine.now())) == (end, before)

    async def _ask(self, operation: Operation) -> Any:
        try:
            return await operation.ask(self.room, self.receipts)
        except PostroomError as error:
            return error

    def _settle(self) -> None:
        self.loop.play(asyncio.sleep(0))

    def _fail_next_append(self, moment: str) -> None:
        """Have an append fail, after which the engine loads its log again; so turns of keys begin anew."""
        self.handle.fail_next = moment
        self.model.turns.restart()

    def _poke(self) -> None:
        """Ask for something, so that an engine whose append failed folds its log again."""
        answer = self.loop.play(self._ask(Receive("nobody", 1, 1, 1_000, "poke")))
        assert answer == [] or isinstance(answer, Rejected), f"the mailbox did not recover: {answer!r}"

    def _open(self) -> None:
        self.handle = LogHandle(self.disk)
        self.engine = MailboxEngine(self.handle, self.clock)
        self.decisions = Decisions(self.engine)
        self.room = Room(self.engine, self.clock.wall)
        self.boot = self.clock.boot()
        self.loop.play(self.engine.open("the simulation", settings=SettingsChanges.of(LIMITS, self.policy)))

    def _kill(self) -> None:
        self.handle.kill()
        self.loop.play(self.engine.close())

    def _come_back(self, down_ms: int, skew_ms: int | None = None) -> None:
        head = self.disk.head()
        assert head is not None
        last_at = head.at
        boot = self.boot
        self.clock.true += down_ms * MS
        if skew_ms is not None:
            self.clock.skew = skew_ms * MS
        continued = self.model.now + down_ms * MS
        wall = self.clock.wall()
        time_went_on = boot == self.clock.boot()
        self._open()
        self.model.true = self.clock.true
        self.model.restart(
            continued if time_went_on else max(wall, last_at), last_at, time_went_on=time_went_on
        )

    def _drain(self) -> None:
        for _ in range(8):
            is_empty = True
            for topic in TOPICS:
                receive = Receive(topic, LIMITS.max_messages, 1_000, 1_000, "drain")
                answer = self.loop.play(self._ask(receive))
                receive.tell(self.model, type(answer).__name__ if isinstance(answer, Rejected) else answer)
                is_empty = is_empty and answer == []
                for number, *_ in answer if isinstance(answer, list) else []:
                    self._do([Ack(number)])
            if is_empty and not self._waiting():
                break
            self.time_passes(max(POLICY.ready_retention_ms // 4, EXPIRY_GRACE // MS))
        waiting = self._waiting()
        assert not waiting, f"these messages never came out: {waiting}"

    def _waiting(self) -> list[str]:
        return [m.id for m in self.model.messages.values() if m.state in (READY, IN_FLIGHT)]

    def _sends(self) -> list[Operation]:
        return self.choose.bulk("news", "c", 2)

    def _group(self, data: st.DataObject, topic: str) -> list[Operation]:
        return self.choose.group(data, topic, len(self.model.delivered))


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class OrderedKeysMachine(MailboxMachine):
    """The same of a mailbox whose topics have ordered keys, which dead letters hold."""

    policy = msgspec.structs.replace(POLICY, ordered_keys=True, dead_letters_hold_keys=True)


class KeyBatchesMachine(MailboxMachine):
    """The same of ordered keys of which a receive may get several messages."""

    policy = msgspec.structs.replace(OrderedKeysMachine.policy, key_batch=3)


class UniqueKeysMachine(MailboxMachine):
    """The same with messages that have unique keys."""

    has_unique_keys = True


class FairKeysMachine(MailboxMachine):
    """The same of a mailbox whose topics have fair keys and limits."""

    policy = msgspec.structs.replace(
        POLICY,
        fair_keys=True,
        key_weights={"b": 2},
        max_in_flight=3,
        max_in_flight_per_key=2,
        rate_per_key=3,
    )


class WeightedKeysMachine(MailboxMachine):
    """The machine of fair keys, without limits, which would end most turns early."""

    policy = msgspec.structs.replace(POLICY, fair_keys=True, key_weights={"a": 2})

    @rule(topic=topics, count=st.integers(2, 4))
    def receive_one_by_one(self, topic: str, count: int) -> None:
        """A key has more messages than its turn, and another one waits."""
        self._do([*self.choose.bulk(topic, "a", 3), *self.choose.bulk(topic, None, 1)])
        for number in range(count):
            self._do([Receive(topic, 1, 1_000, 1_000, f"one {number}")])


class SharedLimitsMachine(MailboxMachine):
    """The same of a mailbox whose topics share their limits, unless they have a policy of their own."""

    policy = msgspec.structs.replace(
        POLICY, shared_limits=True, max_in_flight=2, rate=3, rate_period_ms=2_000
    )
