"""Queues and timers answer as a list of all messages would, whatever is added and removed."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.domain.mailbox import queues
from postroom.domain.mailbox.queues import Shard, Timers
from postroom.domain.message import READY, Message

AT = 1_000


def _message(position: int, sent_at: int, due: int) -> Message:
    stream = position.to_bytes(16, "big")
    return Message(stream, 1, READY, "orders", 0, position, 1, sent_at, sent_at + AT, due)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(1, 6), st.sampled_from([0, 0, 0, 3])),
        st.tuples(st.just("deliver"), st.integers(1, 6), st.just(0)),
        st.tuples(st.just("remove"), st.integers(0, 40), st.just(0)),
        st.tuples(st.just("return"), st.integers(0, 40), st.sampled_from([0, 0, 4])),
        st.tuples(st.just("step aside"), st.integers(0, 40), st.just(0)),
        st.tuples(st.just("restore"), st.just(0), st.just(0)),
        st.tuples(st.just("pass"), st.integers(1, 5), st.just(0)),
    ),
    max_size=60,
)


@given(steps)
def test_a_shard_delivers_the_messages_that_are_due_in_the_order_in_which_they_were_sent(
    steps: list[tuple[str, int, int]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queues, "MAX_STALE", 2)
        shard, now, position = Shard(), AT, 0
        waiting: dict[int, Message] = {}
        away: list[Message] = []
        for step, number, delay in steps:
            chosen = [*waiting.values()][number % len(waiting)] if waiting else None
            if step == "send":
                new = [_message(position + each, now, now + delay) for each in range(1, number + 1)]
                position += number
                waiting |= {each.position: each for each in new}
                if delay:
                    for each in new:
                        shard.enqueue(each, now)
                else:
                    shard.enqueue_new(new, now)
            elif step == "deliver":
                taken = list(islice(shard.ready(now), number))
                shard.dequeue_all(taken)
                shard.in_flight += len(taken)
                away += taken
                for each in taken:
                    del waiting[each.position]
            elif step == "remove" and chosen is not None:
                shard.dequeue(waiting.pop(chosen.position))
            elif step == "return" and away:
                returned = away.pop(number % len(away))
                returned.version += 2
                returned.due = now + delay
                shard.in_flight -= 1
                shard.enqueue(returned, now)
                waiting[returned.position] = returned
            elif step == "step aside" and chosen is not None:  # as for an earlier message of its ordered key
                shard.dequeue(chosen)
                shard.enqueue(chosen, now)
            elif step == "restore":
                in_flight = shard.in_flight
                shard = Shard()
                shard.restore([waiting[each] for each in sorted(waiting)], now)
                shard.in_flight = in_flight
            elif step == "pass":
                now += number
            assert shard.size == len(waiting) + len(away)
            due = [waiting[each] for each in sorted(waiting) if waiting[each].due <= now]
            assert list(shard.ready(now)) == due
            assert shard.next_due() == min(
                (each.due for each in waiting.values() if each.due > now), default=None
            )


settings_of_timers = st.lists(
    st.tuples(st.integers(0, 12), st.one_of(st.none(), st.integers(0, 30)), st.integers(0, 9)), max_size=200
)


@given(settings_of_timers)
def test_timers_fire_in_time_and_once_however_they_are_set_and_swept(
    settings: list[tuple[int, int | None, int]],
) -> None:
    timers = Timers(lambda message: message.due if message.status == READY else None)
    messages = [_message(each, 0, -1) for each in range(13)]
    current: dict[int, int] = {}
    for number, time, sweep in settings:
        message = messages[number]
        if time is None:
            message.due = -1
            current.pop(number, None)
        else:
            message.due = current[number] = time
            timers.set(time, message)
        timers.sweep(sweep)
        assert timers.next() == min(current.values(), default=None)
        for now in (0, 10, 30):
            due = {number for number, time in current.items() if time <= now}
            assert {message.position for message in timers.due(now, 100)} == due
            assert len(timers.due(now, 1)) == min(1, len(due))


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=9), max_size=20), st.integers(0, 9))
def test_two_passes_of_a_sweep_leave_one_entry_for_each_timer(batches: list[list[int]], sweep: int) -> None:
    timers = Timers(lambda message: message.due)
    messages: list[Message] = []
    for times in batches:
        some = [_message(len(messages) + n, 0, time) for n, time in enumerate(times)]
        messages += some
        timers.set_all(times, some)
        timers.set_all(times, some)  # again, as after a delivery that was released
        timers.sweep(sweep)
    timers.sweep(10_000)
    timers.sweep(10_000)
    timers.sweep(10_000)
    assert len(timers) == len(messages)
    fired = timers.due(30, 1_000)
    assert sorted(message.position for message in fired) == list(range(len(messages)))
