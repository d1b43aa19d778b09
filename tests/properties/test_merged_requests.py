"""Requests that are decided together have the effect of the same requests one by one, in the same order."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, given, settings, target
from hypothesis import strategies as st
from hypothesis.errors import FlakyFailure

from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.mailbox import codec, command_enricher, group_decider, groups
from postroom.application.mailbox.command_enricher import CACHE_BYTES
from postroom.application.mailbox.command_queue import arrange
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.mailbox.groups import Request
from postroom.application.messages import MessageDelivery
from postroom.application.ports.event_log import Answer, Head
from postroom.domain.commit import EventColumns, by_column
from postroom.domain.errors import PostroomError
from postroom.domain.mailbox import batch
from postroom.domain.mailbox.commands import Ack, Command, Nack, Pause, Receive, Resume, Send
from postroom.domain.message import ACKED, Message, Receipt, new_messages, receive_all
from postroom.domain.policy import MailboxLimits, TopicPolicy
from postroom.domain.settings import SettingsChanges
from tests.properties.test_batches import send, sends, state_of
from tests.support.clocks import ManualClock

LIMITS = MailboxLimits(frame_bytes=40, in_flight_ceiling=4)
POLICY = TopicPolicy(
    shards=1, shard_capacity=8, replay_capacity=6, replay_window_ms=500, visibility_ms=250, max_attempts=3
)
POLICIES = (
    POLICY,
    TopicPolicy(priorities=True, visibility_ms=250),
    TopicPolicy(shards=2, visibility_ms=250),
    TopicPolicy(ordered_keys=True, visibility_ms=250),
    TopicPolicy(fair_keys=True, visibility_ms=250),
    TopicPolicy(fair_keys=True, key_weights={"x": 2}, visibility_ms=250),
    TopicPolicy(max_in_flight=3, visibility_ms=250),
)


@dataclass(frozen=True)
class Settle:
    """Acks or nacks of some of the latest deliveries; 0 is the very latest."""

    which: tuple[int, ...]
    is_ack: bool = True


@pytest.fixture(scope="module", autouse=True)
def messages_are_intact() -> Iterator[None]:
    """Generated messages have no hashes, by which those that are read from the log are verified."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command_enricher, "is_intact", lambda record: True)
        yield


CACHES = (CACHE_BYTES, 1)
"""Sizes of the cache of messages: the second keeps one, and the others are read from the log."""
RequestStep = tuple[Send, ...] | Receive | Settle | Pause | Resume
SOME_SENDS = st.lists(sends(st.integers(0, 5)), min_size=1, max_size=3).map(tuple)
RECEIVES = st.builds(
    Receive,
    st.sampled_from([("orders",)] * 6 + [("mail",), ("orders", "mail")]),
    st.sampled_from((1, 1, 1, 2, 3, 0)),
    st.sampled_from((1_000_000, 2)),
    st.sampled_from([None] * 9 + [300, 1]),
    st.sampled_from((None, "a", "b")),
)
REQUESTS: st.SearchStrategy[RequestStep] = st.one_of(
    SOME_SENDS,
    SOME_SENDS,
    RECEIVES,
    RECEIVES,
    st.lists(st.integers(0, 9), min_size=1, max_size=2).map(lambda which: Settle(tuple(which))),
    st.lists(st.integers(0, 9), min_size=1, max_size=2).map(lambda which: Settle(tuple(which))),
    st.builds(Settle, st.tuples(st.integers(0, 9)), st.sampled_from((True, True, False))),
    st.sampled_from((Pause("orders"), Resume("orders"))),
)
GROUPS = st.lists(
    st.tuples(st.sampled_from((1, 1, 300, 600)), st.lists(REQUESTS, min_size=2, max_size=12)),
    min_size=3,
    max_size=12,
)


class _World:
    """A mailbox that decides its requests together, or one by one."""

    def __init__(self, policy: TopicPolicy, *, is_merging: bool, cache_bytes: int) -> None:
        self.clock = ManualClock()
        self.log = MemoryEventLog("acme@one")
        self.engine = MailboxEngine(self.log, self.clock, is_merging=is_merging, cache_bytes=cache_bytes)
        self._settings = SettingsChanges.of(LIMITS, policy)

    async def open(self) -> None:
        await self.engine.open("owner", settings=self._settings)

    async def decide(self, requests: Sequence[Sequence[Command]]) -> list[list[Answer] | PostroomError]:
        """Decide the requests as one group, and return the answers to each, or its error."""
        loop = asyncio.get_running_loop()
        answers: list[asyncio.Future[list[Answer]]] = [loop.create_future() for _ in requests]
        for commands, future in zip(requests, answers, strict=True):
            assert self.engine.start(commands, future)
        await asyncio.wait(answers, timeout=30)
        return [_outcome(each) for each in answers]

    def head(self) -> Head | None:
        return self.log.head()

    def state(self) -> object:
        return state_of(self.engine.state.mailbox, self.engine.now())


def _outcome(answers: "asyncio.Future[list[Answer]]") -> list[Answer] | PostroomError:
    error = answers.exception()
    assert error is None or isinstance(error, PostroomError)
    return answers.result() if error is None else error


def _shown(answer: Any) -> object:
    return (type(answer), str(answer)) if isinstance(answer, PostroomError) else answer


async def compare(
    groups: Sequence[tuple[int, Sequence[RequestStep]]], policy: TopicPolicy, cache_bytes: int = CACHE_BYTES
) -> int:
    """Compare a mailbox that merges requests with one that does not; return how many runs it merged."""
    merging = _World(policy, is_merging=True, cache_bytes=cache_bytes)
    other = _World(policy, is_merging=False, cache_bytes=CACHE_BYTES)
    await merging.open()
    await other.open()
    receipts: list[Receipt] = []
    merged, ids = 0, count()
    for wait_ms, steps in groups:
        for world in (merging, other):
            world.clock.advance(wait_ms)
        requests = [commands for step in steps if (commands := _commands(step, receipts, ids))]
        if not requests:
            continue
        places = list(arrange([Request(each, asyncio.Future(), 0.0) for each in requests]))
        order = [place for run in places for place in run]
        merged += sum(len(run) > 1 for run in places)
        assert sorted(order) == list(range(len(requests)))
        together = await merging.decide(requests)
        one_by_one = await other.decide([requests[place] for place in order])
        for place, answers in zip(order, one_by_one, strict=True):
            assert _all_shown(together[place]) == _all_shown(answers)
        assert merging.head() == other.head()
        assert merging.state() == other.state()
        for each in together:
            if isinstance(each, list):
                deliveries = [item for answer in each if isinstance(answer, list) for item in answer]
                receipts += [item.receipt for item in deliveries if isinstance(item, MessageDelivery)]
    await merging.engine.close()
    await other.engine.close()
    return merged


def _all_shown(answers: list[Answer] | PostroomError) -> object:
    return [_shown(each) for each in answers] if isinstance(answers, list) else _shown(answers)


def _commands(step: RequestStep, receipts: Sequence[Receipt], ids: Iterator[int]) -> Sequence[Command]:
    """Return the commands of a step; ids that senders chose may repeat, others are new."""
    match step:
        case Settle(which, is_ack):
            latest = receipts[::-1]
            some = [latest[index] for index in which if index < len(latest)]
            return [Ack(each) if is_ack else Nack(each, 0.5) for each in some]
        case Receive() | Pause() | Resume():
            return [step]
        case _:
            return [
                msgspec.structs.replace(each, existing_hash=None)
                if each.has_external_id
                else msgspec.structs.replace(each, message=b"new".ljust(8) + next(ids).to_bytes(8))
                for each in step
            ]


@given(GROUPS, st.sampled_from(POLICIES), st.sampled_from(CACHES))
def test_requests_decided_together_have_the_effect_of_the_same_requests_one_by_one(
    groups: list[tuple[int, list[RequestStep]]], policy: TopicPolicy, cache_bytes: int
) -> None:
    target(asyncio.run(compare(groups, policy, cache_bytes)))


def test_a_key_that_got_more_than_its_weight_at_once_goes_on_with_the_turn_that_this_began() -> None:
    policy = TopicPolicy(fair_keys=True, key_weights={"x": 2}, visibility_ms=250)

    def sent(*keys: str) -> RequestStep:
        return tuple(send(0, "orders", b"a", None, key, 0, None) for key in keys)

    def received(count: int) -> RequestStep:
        return Receive(("orders",), count, 1_000_000)

    asyncio.run(
        compare([(1, [sent("x", "x", "x"), received(3)]), (1, [sent("y"), sent("x"), received(1)])], policy)
    )


Defect = Callable[[pytest.MonkeyPatch], None]


def receives_that_ignore_their_bytes(patch: pytest.MonkeyPatch) -> None:
    decide = batch.decide_receives

    def generous(commands: Sequence[Receive], *others: Any) -> Any:
        return decide([Receive(each.topics, each.max_messages, 1 << 40) for each in commands], *others)

    patch.setattr(group_decider, "decide_receives", generous)


def receives_above_the_ceiling(patch: pytest.MonkeyPatch) -> None:
    decide = batch.decide_receives

    def unlimited(commands: Sequence[Receive], mailbox: Any, now: int) -> Any:
        in_flight, mailbox.in_flight = mailbox.in_flight, 0
        try:
            return decide(commands, mailbox, now)
        finally:
            mailbox.in_flight = in_flight

    patch.setattr(group_decider, "decide_receives", unlimited)


def answers_of_others(patch: pytest.MonkeyPatch) -> None:
    execute = group_decider.GroupDecider._execute_together

    async def swapped(self: Any, *arguments: Any) -> Any:
        answers = await execute(self, *arguments)
        return answers and answers[::-1]

    patch.setattr(group_decider.GroupDecider, "_execute_together", swapped)


def a_ready_message_of_a_stopped_topic(patch: pytest.MonkeyPatch) -> None:
    decide = batch.decide_receives

    def ignoring(commands: Sequence[Receive], mailbox: Any, now: int) -> Any:
        stopped, mailbox.stopped_topics = mailbox.stopped_topics, frozenset()
        try:
            return decide(commands, mailbox, now)
        finally:
            mailbox.stopped_topics = stopped

    patch.setattr(group_decider, "decide_receives", ignoring)


def sends_that_ignore_capacity(patch: pytest.MonkeyPatch) -> None:
    decide = batch._DECIDE[Send]

    def ignoring(commands: Any, mailbox: Any, now: int) -> Any:
        topic = mailbox.topics.get(commands[0].topic)
        if topic is None:
            return None
        policy = topic.policy
        topic.policy = TopicPolicy()
        try:
            return decide(commands, mailbox, now)
        finally:
            topic.policy = policy

    patch.setitem(batch._DECIDE, Send, ignoring)


def acks_that_count_twice(patch: pytest.MonkeyPatch) -> None:
    decide = batch._DECIDE[Ack]

    def repeating(commands: Sequence[Ack], mailbox: Any, now: int) -> Any:
        distinct = list(dict.fromkeys(commands))
        events = decide(distinct, mailbox, now)
        return events and [*events, *list(events)[: len(commands) - len(distinct)]]

    patch.setitem(batch._DECIDE, Ack, repeating)


def acks_of_another_attempt(patch: pytest.MonkeyPatch) -> None:
    decide = batch._DECIDE[Ack]

    def altered(*arguments: Any) -> Any:
        events: Any = decide(*arguments)
        if events is None:
            return None
        *fields, attempts, results, types = events.columns
        return EventColumns(events.type, (*fields, [each + 1 for each in attempts], results, types))

    patch.setitem(batch._DECIDE, Ack, altered)


def deliveries_that_are_not_hidden(patch: pytest.MonkeyPatch) -> None:

    def forgetful(messages: Sequence[Message], *others: Any) -> None:
        receive_all(messages, *others)
        for each in messages:
            assert each.deliveries is not None
            each.deliveries.hidden = 0

    patch.setattr(batch, "receive_all", forgetful)


def acked_messages_that_keep_their_place(patch: pytest.MonkeyPatch) -> None:
    by_shard = batch._by_shard

    def first_only(messages: Sequence[Message], mailbox: Any) -> Any:
        return by_shard(messages[:1] if messages[0].status == ACKED else messages, mailbox)

    patch.setattr(batch, "_by_shard", first_only)


def messages_that_are_queued_backwards(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batch, "new_messages", lambda *arguments: new_messages(*arguments)[::-1])


def columns_that_are_encoded_backwards(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(codec, "by_column", lambda parts: by_column(list(parts)[::-1]))


def events_without_the_distance_to_the_one_before(patch: pytest.MonkeyPatch) -> None:
    add_all = groups.GroupEvents.add_all

    def near(self: Any, events: EventColumns, *others: Any) -> None:
        add_all(self, events, *others)
        self.commits[-1].distances[-len(events) :] = [1] * len(events)

    patch.setattr(groups.GroupEvents, "add_all", near)


def contents_of_other_messages(patch: pytest.MonkeyPatch) -> None:
    put_all = command_enricher.EnvelopeCache.put_all

    def swapped(self: Any, first: int, messages: Sequence[Any]) -> None:
        put_all(self, first, messages[::-1])

    patch.setattr(command_enricher.EnvelopeCache, "put_all", swapped)


def contents_from_the_log_of_other_messages(patch: pytest.MonkeyPatch) -> None:
    load = command_enricher.CommandEnricher._load

    async def swapped(*arguments: Any) -> dict[bytes, Any]:
        loaded = await load(*arguments)
        return dict(zip(loaded, list(loaded.values())[::-1], strict=True))

    patch.setattr(command_enricher.CommandEnricher, "_load", swapped)


@pytest.mark.parametrize(
    "defect",
    [
        receives_that_ignore_their_bytes,
        receives_above_the_ceiling,
        answers_of_others,
        a_ready_message_of_a_stopped_topic,
        sends_that_ignore_capacity,
        acks_that_count_twice,
        acks_of_another_attempt,
        deliveries_that_are_not_hidden,
        acked_messages_that_keep_their_place,
        messages_that_are_queued_backwards,
        columns_that_are_encoded_backwards,
        events_without_the_distance_to_the_one_before,
        contents_of_other_messages,
        contents_from_the_log_of_other_messages,
    ],
)
def test_the_comparison_finds(defect: Defect, monkeypatch: pytest.MonkeyPatch) -> None:
    defect(monkeypatch)

    @settings(max_examples=500, database=None, derandomize=True, phases=(Phase.generate,))
    @given(GROUPS, st.sampled_from((POLICY,)))
    def search(groups: list[tuple[int, list[RequestStep]]], policy: TopicPolicy) -> None:
        for cache_bytes in CACHES:
            asyncio.run(compare(groups, policy, cache_bytes))

    with pytest.raises((AssertionError, FlakyFailure)):  # flaky if it depends on which task runs first
        search()
