"""What the machine may choose from: small sets of values that meet at the limits."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

import msgspec
from hypothesis import strategies as st

from postroom.domain.message import ON_CONFLICT, NackAction, OnConflict
from postroom.domain.policy import MailboxLimits, TopicPolicy
from tests.simulation.operations import (
    Ack,
    Cancel,
    Extend,
    Nack,
    Operation,
    Receive,
    Reschedule,
    Send,
    SetPolicy,
)

TOPICS = ("orders", "news")
SHARDS = {
    2: {"orders": 0, "news": 1, "a": 1, "b": 1, "c": 0, "d": 1},
    3: {"orders": 1, "news": 1, "a": 0, "b": 1, "c": 0, "d": 1},
}
"""By number of shards, where each topic and sticky key goes: the hash may never change."""

SECOND = 1_000
DAY_MS = 24 * 60 * 60 * SECOND

POLICY = TopicPolicy(
    shards=2,
    shard_capacity=5,
    visibility_ms=1_000,
    max_attempts=3,
    backoff_base_ms=100,
    backoff_max_ms=400,
    replay_window_ms=4_000,
    replay_capacity=3,
    ready_retention_ms=20_000,
    in_flight_retention_visibilities=4,
    dead_retention_ms=30_000,
    dead_capacity=2,
    priority_aging_ms=1_000,
)
LIMITS = MailboxLimits(in_flight_ceiling=4, max_messages=6)

# Small sets of values that fall on, just before and just after the limits above, so that examples meet there.
topics = st.sampled_from(TOPICS)
durations_ms = st.sampled_from(
    [1, 100, 250, 499, 500, 500, 999, 1_000, 1_000, 1_001, 2_000, 3_999, 4_000, 20_000, 30_000, 300_000]
)
visibilities_ms = st.sampled_from([1, 250, 500, 1_000, 1_000, 3_000])
skews_ms = st.sampled_from([-120_000, -3_000, -1_000, 0, 0, 500, 1_000, 3_000, 3_900, 120_000])
wild_skews_ms = st.one_of(skews_ms, st.sampled_from([-400 * DAY_MS, 8 * DAY_MS, 365 * DAY_MS]))
payloads = st.sampled_from([b"x", b"xx", b"yyyyyyyy"])
policies = st.fixed_dictionaries(
    {"priorities": st.booleans()},
    optional={
        "shards": st.sampled_from([2, 3]),
        "shard_capacity": st.sampled_from([3, 5, 8]),
        "max_attempts": st.sampled_from([1, 3]),
        "replay_window_ms": st.sampled_from([2_500, 4_000, 8_000]),
        "replay_capacity": st.sampled_from([1, 3, 5]),
        "dead_capacity": st.sampled_from([1, 2, 4]),
        "priority_aging_ms": st.sampled_from([100, 500, 1_999]),
    },
)
UNORDERED = {"ordered_keys": False, "dead_letters_hold_keys": False, "key_batch": 1}
ORDERED = {"ordered_keys": True, "dead_letters_hold_keys": False, "key_batch": 1}
HOLDING = {"ordered_keys": True, "dead_letters_hold_keys": True, "key_batch": 1}
BATCHES = [each | {"key_batch": most} for each in (ORDERED, HOLDING) for most in (2, 3)]
keys = st.sampled_from(["k1", "k2", "k3", "k4"])
priorities = st.sampled_from([5, 5, 5, 4, 0, 10])
sticky_keys = st.sampled_from([None, None, "a", "c"])
fair_sticky_keys = st.sampled_from([None, "a", "a", "b", "c", "d"])
limits = st.fixed_dictionaries(
    {"fair_keys": st.just(True)},
    optional={
        "max_in_flight": st.sampled_from([1, 2, 3]),
        "max_in_flight_per_key": st.sampled_from([1, 2]),
        "rate": st.sampled_from([1, 3]),
        "rate_per_key": st.sampled_from([1, 2]),
        "rate_period_ms": st.sampled_from([500, 1_000, 3_000]),
        "rate_burst": st.sampled_from([1, 2, 5]),
        "key_weights": st.sampled_from([{}, {"a": 3}, {"a": 2, "b": 3}]),
    },
)
own_ids = st.sampled_from([str(UUID(int=n)) for n in (1, 2)])


class Choices:
    """Make operations, each message with an id and each receiver with a name of its own."""

    def __init__(self, policy: TopicPolicy = POLICY, *, unique: bool = False) -> None:
        self._policy = policy
        self._unique = unique
        self._names = 0
        self.with_key: list[Send] = []

    def send(self, data: st.DataObject, topic: str, key: str | None = None) -> Operation:
        send = Send(
            self._new_id(),
            topic,
            data.draw(payloads, "payload"),
            key,
            data.draw(fair_sticky_keys if self._policy.fair_keys else sticky_keys, "sticky key"),
            data.draw(st.sampled_from([0, 0, 0, 0, 500, 5_000]), "deliver after, ms"),
            data.draw(st.sampled_from([0, 0, 0, 0, 0, 1, 3, 60]), "ttl, s"),
            priority=data.draw(priorities, "priority"),
        )
        if self._unique and key is None:
            unique_key = data.draw(st.sampled_from([None, "u", "u", "v"]), "unique key")
            conflict: OnConflict = data.draw(st.sampled_from(ON_CONFLICT), "on conflict")
            send = replace(send, unique_key=unique_key, on_conflict=conflict if unique_key else "keep")
        if key is not None:
            self.with_key.append(send)
        return send

    def repeat(self, data: st.DataObject) -> Operation:
        """Send one of the latest messages with a key again, as a sender does that got no answer."""
        send = data.draw(st.sampled_from(self.with_key[-3:]), "again")
        return replace(send, id=self._new_id())

    def bulk(self, topic: str, sticky_key: str | None, count: int) -> list[Operation]:
        return [
            Send(self._new_id(), topic, b"bulk", sticky_key=sticky_key, priority=(5, 5, 0, 10)[number % 4])
            for number in range(count)
        ]

    def receive(self, data: st.DataObject, topic: str) -> Operation:
        self._names += 1
        return Receive(
            topic,
            data.draw(st.sampled_from([1, 2, 6, 6, 7]), "max messages"),
            data.draw(st.sampled_from([1, 3, 1_000, 1_000]), "max bytes"),
            data.draw(visibilities_ms, "visibility, ms"),
            f"consumer {self._names}",
        )

    def settlement(self, data: st.DataObject, deliveries: int, latest: int | None = None) -> Operation:
        """End or extend any delivery, or one of the `latest`."""
        oldest = 0 if latest is None else max(0, deliveries - latest)
        number = data.draw(st.integers(oldest, deliveries - 1), "delivery")
        kind = data.draw(st.sampled_from(["ack", "nack", "extend"]), "settlement")
        if kind == "ack":
            return Ack(number)
        if kind == "extend":
            return Extend(number, data.draw(visibilities_ms, "visibility, ms"))
        reason = data.draw(st.sampled_from([None, "it broke"]), "reason")
        action: NackAction = data.draw(st.sampled_from(["retry", "retry", "reject", "release"]), "action")
        delays = [None] if action == "reject" else [None, 0, 1_000]
        return Nack(number, reason, data.draw(st.sampled_from(delays), "delay, ms"), action=action)

    def change(self, data: st.DataObject, ids: Sequence[str]) -> Operation:
        """Cancel or reschedule a message, or one that does not exist."""
        id_ = data.draw(st.sampled_from([*ids[-8:], self._new_id()]), "message")
        if data.draw(st.booleans(), "cancel"):
            return Cancel(id_)
        return Reschedule(id_, data.draw(st.sampled_from([0, 0, 500, 2_000, 30_000]), "deliver after, ms"))

    def policy(self, data: st.DataObject, topic: str) -> Operation:
        changes: dict[str, Any] = data.draw(policies, "policy")
        if self._policy.ordered_keys:
            orders = [HOLDING, HOLDING, ORDERED, UNORDERED, *BATCHES]
            changes |= data.draw(st.sampled_from(orders), "order of keys")
        if self._policy.fair_keys:
            changes |= data.draw(limits, "limits")
            changes |= data.draw(st.sampled_from([UNORDERED, ORDERED, *BATCHES]), "order of keys")
        return SetPolicy(topic, msgspec.structs.replace(self._policy, **changes))

    def group(
        self, data: st.DataObject, topic: str, deliveries: int, *, may_set_policy: bool = True
    ) -> list[Operation]:
        """Make a few operations of several callers."""
        kinds = ["send", "send with a key", "receive"]
        kinds += ["settle"] * 3 if deliveries else []
        kinds += ["set policy"] if may_set_policy else []
        operations = []
        for kind in data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=5), "commands"):
            if kind == "send":
                operations.append(self.send(data, topic))
            elif kind == "send with a key":
                operations.append(self.send(data, topic, data.draw(keys, "key")))
            elif kind == "receive":
                operations.append(self.receive(data, topic))
            elif kind == "settle":
                operations.append(self.settlement(data, deliveries))
            else:
                operations.append(self.policy(data, topic))
        return operations

    def _new_id(self) -> str:
        self._names += 1
        return str(UUID(int=1_000 + self._names))
