"""Defects of ordered, unique and fair keys, which a simulation of such a mailbox must find."""

from collections.abc import Callable
from typing import Any

import pytest

from postroom.domain import message
from postroom.domain.mailbox import batch, decide, send_decisions, snapshot, topic
from postroom.domain.mailbox.commands import Ack, Redrive
from postroom.domain.mailbox.key_ring import NO_LIMIT, KeyRing, SharedLimits, TokenBucket
from postroom.domain.mailbox.keyed_shard import KeyedShard
from tests.simulation.machine import (
    FairKeysMachine,
    KeyBatchesMachine,
    MailboxMachine,
    OrderedKeysMachine,
    SharedLimitsMachine,
    UniqueKeysMachine,
    WeightedKeysMachine,
)

Patch = pytest.MonkeyPatch
Defect = Callable[[Patch], None]
DEFECTS_OF_KEYS: dict[Defect, type[MailboxMachine]] = {}
"""The machine that shows each of them."""
DECIDERS: dict[Any, Any] = decide._DECIDE


def defect_of(machine: type[MailboxMachine]) -> Callable[[Defect], Defect]:
    def add(put_in: Defect) -> Defect:
        DEFECTS_OF_KEYS[put_in] = machine
        return put_in

    return add


@defect_of(OrderedKeysMachine)
def an_ordered_key_with_two_messages_in_flight(patch: Patch) -> None:
    patch.setattr(KeyedShard, "_is_blocked", lambda self, key: key in self._held)


@defect_of(OrderedKeysMachine)
def an_ordered_key_that_never_goes_on(patch: Patch) -> None:
    patch.setattr(KeyedShard, "_advance", lambda self, key, now: None)


@defect_of(OrderedKeysMachine)
def a_retry_that_later_messages_of_its_key_pass(patch: Patch) -> None:
    def enqueue(self: KeyedShard, waiting: message.Message, now: int) -> None:
        if waiting.due > now:
            self._queue.enqueue(waiting, now)
            waiting.sticky_key = None
        else:
            put(self, waiting, now)

    put = KeyedShard.enqueue
    patch.setattr(KeyedShard, "enqueue", enqueue)


@defect_of(OrderedKeysMachine)
def a_dead_letter_that_does_not_hold_its_key(patch: Patch) -> None:
    patch.setattr(KeyedShard, "hold", lambda self, message: None)
    patch.setattr(KeyedShard, "unhold", lambda self, message, now: None)


@defect_of(OrderedKeysMachine)
def a_snapshot_that_forgets_which_keys_are_in_flight(patch: Patch) -> None:
    def restore_in_flight(self: KeyedShard, message: message.Message) -> None:
        self.in_flight += 1

    patch.setattr(KeyedShard, "restore_in_flight", restore_in_flight)


@defect_of(KeyBatchesMachine)
def a_batch_that_is_longer_than_the_policy_allows(patch: Patch) -> None:
    followers = KeyedShard.followers
    patch.setattr(KeyedShard, "followers", lambda self, key, count, now: followers(self, key, count + 1, now))


@defect_of(KeyBatchesMachine)
def a_batch_that_goes_on_behind_a_delayed_message(patch: Patch) -> None:
    def with_gaps(self: KeyedShard, key: str, count: int, now: int) -> list[message.Message]:
        return [each for each in self._behind.get(key, ()) if each.due <= now < each.expires_at][:count]

    patch.setattr(KeyedShard, "followers", with_gaps)


@defect_of(KeyBatchesMachine)
def a_batch_of_which_later_messages_stay_in_flight_when_one_fails(patch: Patch) -> None:
    patch.setattr(decide, "_take_back", lambda *_: [])


@defect_of(KeyBatchesMachine)
def an_ack_that_passes_an_earlier_message_of_its_batch(patch: Patch) -> None:
    patch.setattr(topic.Topic, "may_settle", lambda self, acked: True)
    patch.delitem(batch._DECIDE, Ack)  # which decides acks together


@defect_of(UniqueKeysMachine)
def a_snapshot_that_forgets_unique_keys(patch: Patch) -> None:
    def forget(mailbox: Any, messages: Any) -> None:
        restore(mailbox, messages)
        for each in mailbox.topics.values():
            each.unique.clear()

    restore = snapshot._restore_messages
    patch.setattr(snapshot, "_restore_messages", forget)


@defect_of(UniqueKeysMachine)
def a_redrive_that_doubles_a_unique_key(patch: Patch) -> None:
    def doubling(command: Any, mailbox: Any, now: int) -> Any:
        mailbox.topic(command.topic).unique.clear()
        return redrive(command, mailbox, now)

    redrive = DECIDERS[Redrive]
    patch.setitem(DECIDERS, Redrive, doubling)


@defect_of(UniqueKeysMachine)
def a_message_that_is_sent_beside_the_one_that_it_replaces(patch: Patch) -> None:
    def beside(command: Any, holder: Any, mailbox: Any, now: int) -> Any:
        events = resolve(command, holder, mailbox, now)
        return events[:1] if command.on_conflict == "replace" else events

    resolve = send_decisions._resolve_conflict
    patch.setattr(send_decisions, "_resolve_conflict", beside)


@defect_of(FairKeysMachine)
def a_key_that_is_served_again_at_once(patch: Patch) -> None:
    def stay(self: KeyRing, key: Any, now: int) -> None:
        before = [*self._ready]
        end(self, key, now)
        if key in self._ready:
            for other in before:
                if other in self._ready:
                    self._ready.move_to_end(other)

    end = KeyRing.end_turn
    patch.setattr(KeyRing, "end_turn", stay)


@defect_of(WeightedKeysMachine)
def a_key_with_a_weight_whose_turn_does_not_end(patch: Patch) -> None:
    def stay(self: KeyRing, key: Any, now: int) -> None:
        end(self, key, now)
        if key in self._weights and key in self._ready:
            self._ready.move_to_end(key, last=False)

    end = KeyRing.end_turn
    patch.setattr(KeyRing, "end_turn", stay)


@defect_of(FairKeysMachine)
def a_limit_of_a_key_that_is_ignored(patch: Patch) -> None:
    patch.setattr(KeyRing, "allowed", lambda self, key, now: NO_LIMIT)


@defect_of(FairKeysMachine)
def a_key_at_its_limit_that_never_comes_back(patch: Patch) -> None:
    patch.setattr(KeyRing, "_unblock", lambda self, key, now: None)


@defect_of(FairKeysMachine)
def a_limit_of_a_topic_that_is_ignored(patch: Patch) -> None:
    patch.setattr(topic.Topic, "allowed", lambda self, now: NO_LIMIT)


@defect_of(FairKeysMachine)
def a_rate_that_takes_no_tokens(patch: Patch) -> None:
    patch.setattr(TokenBucket, "take", lambda self, rate, count, now: None)


@defect_of(FairKeysMachine)
def a_snapshot_that_forgets_tokens(patch: Patch) -> None:
    def forget(mailbox: Any, head: Any, windows: Any) -> None:
        restore(mailbox, head, windows)
        for each in mailbox.topics.values():
            each.bucket = None
            if each.ring is not None:
                each.ring.buckets.clear()

    restore = snapshot._restore_head
    patch.setattr(snapshot, "_restore_head", forget)


@defect_of(FairKeysMachine)
def a_snapshot_that_forgets_deliveries_of_keys(patch: Patch) -> None:
    patch.setattr(KeyRing, "restore_in_flight", lambda self, key: None)


@defect_of(SharedLimitsMachine)
def topics_that_do_not_share_their_limits(patch: Patch) -> None:
    patch.setattr(topic.Topic, "share", lambda self, shared, now: None)


@defect_of(SharedLimitsMachine)
def shared_limits_that_forget_what_is_in_flight(patch: Patch) -> None:
    add = SharedLimits.add
    patch.setattr(SharedLimits, "add", lambda self, in_flight, *others: add(self, 0, *others))
