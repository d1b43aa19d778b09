"""A harness that can't go red proves nothing: each defect put into the real code must be found."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from postroom.application.mailbox import command_enricher, group_decider, log_writer, stored_snapshots
from postroom.application.mailbox.codec import decode_runs
from postroom.domain import message, message_decider
from postroom.domain.commit import Commit
from postroom.domain.errors import BrokenLog, Unavailable
from postroom.domain.mailbox import decide, evolve, send_decisions, snapshot, state, topic
from postroom.domain.mailbox.commands import Cancel, Receive
from postroom.domain.mailbox.ownership import anchor
from postroom.domain.mailbox.queues import PriorityShard, Shard
from postroom.domain.mailbox.replay import ReplayWindow
from postroom.domain.message import (
    Deliveries,
    Message,
    MessageAcked,
    MessageEvent,
    MessageRequeued,
    MessageRescheduled,
    MessageVisibilityExtended,
)
from tests.simulation import world
from tests.simulation.defects_of_keys import DEFECTS_OF_KEYS
from tests.simulation.defects_of_subscriptions import DEFECTS_OF_SUBSCRIPTIONS
from tests.simulation.machine import MailboxMachine
from tests.simulation.subscriptions import SubscriptionsMachine

Patch = pytest.MonkeyPatch
Defect = Callable[[Patch], None]
DEFECTS: list[Defect] = [*DEFECTS_OF_KEYS, *DEFECTS_OF_SUBSCRIPTIONS]
# What a defect puts in need not take every kind of event or command.
MAILBOX_FOLD: dict[Any, Any] = evolve._EVOLVE
MESSAGE_FOLD: dict[Any, Any] = message_decider._EVOLVE
DECIDERS: dict[Any, Any] = decide._DECIDE


# Seeds with which a few examples show what takes hundreds with others; without them, it only takes longer.
SEEDS = {
    "a_cancelled_message_that_stays_in_flight": 2,
    "a_dead_letter_that_does_not_hold_its_key": 3,
    "a_release_that_counts_an_attempt": 4,
    "a_rescheduled_message_that_is_due_when_it_was": 0,
    "a_rescheduled_message_whose_retention_goes_on": 0,
    "a_snapshot_that_forgets_pauses": 0,
    "an_ordered_key_that_never_goes_on": 3,
    "an_ordered_key_with_two_messages_in_flight": 2,
    "a_key_that_is_forgotten_early": 1,
    "a_late_ack_that_is_refused": 8,
    "a_message_that_comes_again_after_its_ack": 0,
    "a_priority_that_never_ages": 0,
    "a_redelivery_that_starts_to_age_anew": 9,
    "a_replay_table_without_bounds": 2,
    "a_window_that_a_jump_of_the_clock_shortens": 3,
    "attempts_without_end": 2,
    "an_extension_that_a_reboot_forgets": 2,
    "an_in_flight_ceiling_that_is_ignored": 1,
    "priorities_that_are_ignored": 21,
}


def defect(put_in: Defect) -> Defect:
    DEFECTS.append(put_in)
    return put_in


@pytest.mark.extended
@pytest.mark.parametrize("put_in", DEFECTS, ids=lambda put_in: put_in.__name__)
def test_the_simulation_finds(put_in: Defect, monkeypatch: Patch) -> None:
    put_in(monkeypatch)
    machine: Any = DEFECTS_OF_KEYS.get(put_in, MailboxMachine)
    if put_in in DEFECTS_OF_SUBSCRIPTIONS:
        machine = SubscriptionsMachine
    if put_in.__name__ in SEEDS:

        class SeededMachine(machine): ...  # type: ignore[misc] # it is one of a few classes

        machine = seed(SEEDS[put_in.__name__])(SeededMachine)
    # A defect may also void the state of the mailbox, or leave a log that can't be read.
    with pytest.raises((AssertionError, Unavailable, BrokenLog)):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=2_000,
                stateful_step_count=40,
                phases=[Phase.generate],
                derandomize=True,
                database=None,
                report_multiple_bugs=False,
                print_blob=False,
            ),
        )


@defect
def a_repeat_that_is_sent_again(patch: Patch) -> None:
    patch.setattr(ReplayWindow, "admit", lambda self, *args, **limits: True)


@defect
def a_key_that_is_forgotten_early(patch: Patch) -> None:
    find = ReplayWindow.find
    patch.setattr(ReplayWindow, "find", lambda self, key, since: find(self, key, since + 1_000_000))


@defect
def a_key_that_is_remembered_for_ever(patch: Patch) -> None:
    patch.setattr(ReplayWindow, "find", lambda self, key, since: self.since(0).get(key))


@defect
def a_replay_table_without_bounds(patch: Patch) -> None:
    admit = ReplayWindow.admit
    patch.setattr(
        ReplayWindow,
        "admit",
        lambda self, *args, capacity, **limits: admit(self, *args, capacity=99, **limits),
    )


@defect
def deliveries_that_never_time_out(patch: Patch) -> None:
    patch.setattr(state.Mailbox, "needs_sweep", lambda self, now: False)
    patch.setattr(state.Mailbox, "next_timer", lambda self: None)


@defect
def messages_that_outlive_their_ttl(patch: Patch) -> None:
    def lasting(command: Any, shard: int, due: int, expires_at: int, now: int) -> Any:
        return sent(command, shard, due, expires_at + 60_000_000, now)

    sent = send_decisions.sent
    patch.setattr(send_decisions, "sent", lasting)


@defect
def an_append_that_is_dropped(patch: Patch) -> None:
    append = world.Disk.append
    patch.setattr(world.Disk, "append", lambda self, commits: append(self, commits) if self.end < 9 else None)


def damaged_by(patch: Patch, damage: Callable[[Commit, list[Any]], Commit]) -> None:
    """Have `damage` change each commit of several events, whose runs it is given."""
    append = world.Disk.append

    def damaged(commit: Commit) -> Commit:
        return damage(commit, decode_runs(commit)) if commit.event_count > 1 else commit

    patch.setattr(world.Disk, "append", lambda self, commits: append(self, list(map(damaged, commits))))


@defect
def a_commit_that_is_torn(patch: Patch) -> None:
    damaged_by(patch, lambda commit, runs: commit._replace(events=commit.events[: len(commit.events) // 2]))


@defect
def an_event_that_is_dropped_from_a_commit(patch: Patch) -> None:
    damaged_by(patch, lambda commit, runs: commit._replace(events=msgspec.msgpack.encode(runs[1:])))


@defect
def a_commit_that_ends_early(patch: Patch) -> None:
    damaged_by(patch, lambda commit, runs: commit._replace(last=commit.last - 1))


@defect
def a_commit_whose_events_have_changed_places(patch: Patch) -> None:
    damaged_by(patch, lambda commit, runs: commit._replace(events=msgspec.msgpack.encode(runs[::-1])))


@defect
def an_answer_before_the_append(patch: Patch) -> None:
    commit = log_writer.Committer.commit

    def answer_first(self: log_writer.Committer, group: Any, commits: Any) -> None:
        self._answer(group)
        commit(self, group._replace(requests=[], answers=[]), commits)

    patch.setattr(log_writer.Committer, "commit", answer_first)


@defect
def a_message_that_comes_again_after_its_ack(patch: Patch) -> None:
    def stay_in_flight(mailbox: Any, event: MessageAcked) -> None:
        mailbox.messages[event.stream].version = event.version

    patch.setitem(MAILBOX_FOLD, MessageAcked, stay_in_flight)


@defect
def a_stale_receipt_that_is_obeyed(patch: Patch) -> None:
    patch.setattr(message_decider, "_require_current", lambda message, receipt: None)


def folded_by(
    patch: Patch, kind: type[MessageEvent], change: Callable[[Message, Any], None], *, also: bool = True
) -> None:
    """Have `change` alter a message by each event of a kind, after the fold does, or in its place."""

    def fold(message: Message, deliveries: Deliveries, event: Any, epoch: int) -> None:
        if also:
            folded(message, deliveries, event, epoch)
        change(message, event)

    folded = MESSAGE_FOLD[kind]
    patch.setitem(MESSAGE_FOLD, kind, fold)


@defect
def a_late_ack_that_is_refused(patch: Patch) -> None:
    folded_by(patch, MessageRequeued, lambda message, event: setattr(message, "delivery", 0))


@defect
def attempts_that_start_anew(patch: Patch) -> None:
    folded_by(patch, MessageRequeued, lambda message, event: setattr(message, "attempt", 0))


@defect
def attempts_without_end(patch: Patch) -> None:
    def patient(message: Any, policy: Any, now: int) -> Any:
        return MessageRequeued(
            message.stream, message.version + 1, now, message.attempt, now, "visibility_expired", None
        )

    patch.setattr(decide, "time_out", patient)


@defect
def shards_without_bounds(patch: Patch) -> None:
    patch.setattr(Shard, "size", property(lambda self: 0))


def _replace_deliverable(patch: Patch, deliverable: Callable[..., Any]) -> None:
    """Have every receive deliver what a function returns; `test_merged_requests` has the others."""
    patch.setattr(decide, "deliverable", deliverable)
    patch.setattr(command_enricher, "deliverable", deliverable)
    patch.setattr(group_decider, "decide_receives", lambda commands, mailbox, now: None)


@defect
def an_in_flight_ceiling_that_is_ignored(patch: Patch) -> None:
    deliverable = decide.deliverable

    def greedy(command: Any, mailbox: Any, now: int) -> Any:
        in_flight, mailbox.in_flight = mailbox.in_flight, 0
        try:
            return deliverable(command, mailbox, now)
        finally:
            mailbox.in_flight = in_flight

    _replace_deliverable(patch, greedy)


@defect
def dead_letters_without_bounds(patch: Patch) -> None:
    patch.setattr(
        state.Mailbox, "over_capacity", property(lambda self: set(), lambda self, value: None), raising=False
    )


@defect
def last_in_first_out(patch: Patch) -> None:
    ready = Shard.ready
    patch.setattr(Shard, "ready", lambda self, now: iter(list(ready(self, now))[::-1]))


def reordered_by(patch: Patch, key: Callable[[Any, Any], Any]) -> None:
    """Have shards with priorities deliver in the order of `key(shard, message)`."""
    ready = PriorityShard.ready
    patch.setattr(
        PriorityShard, "ready", lambda self, now: iter(sorted(ready(self, now), key=lambda m: key(self, m)))
    )


@defect
def priorities_that_are_ignored(patch: Patch) -> None:
    reordered_by(patch, lambda shard, m: m.position)


@defect
def a_priority_that_never_ages(patch: Patch) -> None:
    reordered_by(patch, lambda shard, m: (-m.priority, m.ready_at, m.position))


@defect
def last_in_first_out_among_equals(patch: Patch) -> None:
    reordered_by(patch, lambda shard, m: (shard.rank(m)[0], -m.position))


@defect
def a_redelivery_that_starts_to_age_anew(patch: Patch) -> None:
    folded_by(patch, MessageRequeued, lambda message, event: setattr(message, "ready_at", event.due))


@defect
def a_policy_that_leaves_the_old_order(patch: Patch) -> None:
    patch.setattr(topic.Topic, "_reorder", lambda self, messages, now: None)


@defect
def a_redelivery_that_goes_to_the_end_of_the_line(patch: Patch) -> None:
    ready = Shard.ready
    patch.setattr(
        Shard,
        "ready",
        lambda self, now: iter(sorted(ready(self, now), key=lambda m: (m.version, m.position))),
    )


@defect
def a_delay_that_is_ignored(patch: Patch) -> None:
    def hasty(command: Any, shard: int, due: int, expires_at: int, now: int) -> Any:
        return sent(command, shard, now, expires_at, now)

    sent = send_decisions.sent
    patch.setattr(send_decisions, "sent", hasty)


@defect
def a_message_that_reappears_early_after_a_reboot(patch: Patch) -> None:
    patch.setattr(
        log_writer, "anchor", lambda mailbox, **now: anchor(mailbox, **now)._replace(continues=True)
    )


@defect
def an_extension_that_a_reboot_forgets(patch: Patch) -> None:
    def brief(message: Message, event: MessageVisibilityExtended) -> None:
        message.due = event.due

    folded_by(patch, MessageVisibilityExtended, brief, also=False)


@defect
def an_extension_that_does_nothing(patch: Patch) -> None:
    patch.setattr(decide, "extend", lambda *args: [])


@defect
def a_snapshot_without_the_dead_letters(patch: Patch) -> None:
    restore = snapshot._restore_messages
    patch.setattr(
        snapshot,
        "_restore_messages",
        lambda mailbox, some: restore(
            mailbox, {stream: each for stream, each in some.items() if each.status != message.DEAD}
        ),
    )


@defect
def a_snapshot_without_the_keys(patch: Patch) -> None:
    patch.setattr(ReplayWindow, "entries", lambda self, keys, since: {})


@defect
def a_rejection_that_leaves_a_trace(patch: Patch) -> None:
    def receive(command: Any, mailbox: Any, now: int) -> Any:
        mailbox.in_flight += command.max_messages > mailbox.limits.max_messages
        return decided(command, mailbox, now)

    decided = DECIDERS[Receive]
    patch.setitem(DECIDERS, Receive, receive)


@defect
def a_window_that_a_jump_of_the_clock_shortens(patch: Patch) -> None:
    patch.setattr(ReplayWindow, "restart", lambda self, at: None)


@defect
def a_snapshot_that_forgets_pauses(patch: Patch) -> None:
    def forget(parts: Any, *names: Any) -> Any:
        mailbox = restore(parts, *names)
        if mailbox is not None:
            mailbox.paused_topics.clear()
        return mailbox

    restore = snapshot.restore_snapshot
    patch.setattr(stored_snapshots, "restore_snapshot", forget)


@defect
def a_paused_topic_that_is_delivered(patch: Patch) -> None:
    deliverable = decide.deliverable
    _replace_deliverable(patch, lambda command, mailbox, now: deliverable(command, mailbox, now, ()))


@defect
def a_release_that_counts_an_attempt(patch: Patch) -> None:
    def counting(message: Message, deliveries: Deliveries, event: MessageRequeued, epoch: int) -> None:
        attempt = message.attempt
        requeued(message, deliveries, event, epoch)
        message.attempt = attempt

    requeued = MESSAGE_FOLD[MessageRequeued]
    patch.setitem(MESSAGE_FOLD, MessageRequeued, counting)


@defect
def a_rejection_that_is_retried(patch: Patch) -> None:
    def retried(*args: Any, action: Any, **options: Any) -> Any:
        return nack(*args, action="retry" if action == "reject" else action, **options)

    nack = message_decider.nack
    patch.setattr(decide, "nack", retried)


@defect
def a_cancelled_message_that_stays_in_flight(patch: Patch) -> None:
    def stay(command: Any, mailbox: Any, now: int) -> Any:
        found = mailbox.messages.get(command.message)
        return (
            [] if found is not None and found.status == message.IN_FLIGHT else cancel(command, mailbox, now)
        )

    cancel = DECIDERS[Cancel]
    patch.setitem(DECIDERS, Cancel, stay)


@defect
def a_rescheduled_message_that_is_due_when_it_was(patch: Patch) -> None:
    def kept(message: Message, event: MessageRescheduled) -> None:
        message.expires_at = event.expires_at

    folded_by(patch, MessageRescheduled, kept, also=False)


@defect
def a_rescheduled_message_whose_retention_goes_on(patch: Patch) -> None:
    def kept(message: Message, event: MessageRescheduled) -> None:
        message.due = event.due

    folded_by(patch, MessageRescheduled, kept, also=False)
