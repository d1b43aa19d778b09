"""Policies of topics and limits of mailboxes."""

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from postroom.domain.arguments import check_int, check_text, check_type
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import MAX_PRIORITY

SECOND_MS = 1_000
DAY_MS = 24 * 60 * 60 * SECOND_MS

MIN_VISIBILITY_MS = 250
MAX_VISIBILITY_MS = 30 * DAY_MS
MAX_DURATION_MS = 36_500 * DAY_MS
"""Maximum retention, TTL, delay and replay window: a century, so that log time in µs stays below 2^53."""
MAX_COUNT = 1_000_000_000
"""Maximum of counts in policies and limits, unless stated otherwise."""
MAX_SHARDS = 65_536
MAX_WEIGHT = 1_000
MAX_WEIGHTS = 100
"""Maximum number of keys with a weight in a policy."""
MAX_KEY_BATCH = 100
"""Messages of an ordered key that return together when one of them fails, at most."""
MAX_FRAME_BYTES = 256 << 20
ARCHIVE_ROOM_BYTES = 64 << 10
"""Room for the headers of a message in an archive, beside a payload of `frame_bytes`.

Archives take the messages of brokers, whose default limits, such as 1 MiB, are for the payload.
"""
DEFAULT_MAX_MESSAGES = 32
DEFAULT_MAX_BYTES = 512 << 10
SATURATED_RETRY_MS = 1_000

PolicyValue = int | bool | Mapping[str, int]
"""Value of a field of a topic policy."""

Bounds = tuple[int, int]
_COUNT: Bounds = (1, MAX_COUNT)
_LIMIT: Bounds = (0, MAX_COUNT)
_DURATION: Bounds = (1, MAX_DURATION_MS)


class TopicPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a topic: shards, visibility, retries and retention (svc-mailbox I-5, P-9, C-12).

    Arguments, all durations in ms:
        shards: number of FIFO queues of the topic (svc-mailbox P-1).
        shard_capacity: maximum number of unsettled messages in a shard: ready, delayed and in flight.
        visibility_ms: visibility timeout, unless RECV sets another.
        max_attempts: deliveries before a message is dead-lettered (svc-mailbox C-4).
        backoff_base_ms, backoff_max_ms: bounds of the exponential backoff of NACK (svc-mailbox P-7).
        replay_window_ms: `T_replay`, how long an idempotency key is remembered (svc-mailbox I-13).
        replay_capacity: maximum number of remembered idempotency keys; none is evicted within the window.
        ready_retention_ms: age at which an undelivered message is dead-lettered (svc-mailbox P-9).
        in_flight_retention_visibilities: maximum duration of a delivery with EXTEND, in visibility timeouts.
        dead_retention_ms, dead_capacity: maximum age and number of dead letters; the oldest expire first.
        priorities: whether shards deliver by priority instead of first in, first out (ADR 0048).
        priority_aging_ms: time for which a message must be ready to count as one priority higher.
        ordered_keys: whether a message with a sticky key is delivered only after the earlier ones of its key
            are settled, whatever fails (ADR 0115).
        dead_letters_hold_keys: whether a dead letter holds the messages of its ordered key, until it is
            redriven or removed.
        key_batch: messages of an ordered key, one after the other, that a receive may get (ADR 0115).
        fair_keys: whether sticky keys are served in turn; messages without a key share a turn (ADR 0117).
        key_weights: how many messages each of some keys may have in its turn; the others have one.
        max_in_flight, max_in_flight_per_key: messages in flight of the topic, and of each sticky key; 0 for
            no limit.
        rate, rate_per_key: deliveries in each `rate_period_ms`, of the topic and of each sticky key; 0 for no
            limit.
        shared_limits: whether topics share `max_in_flight` and `rate`: all that get this field from the same
            section and have the same values of both (ADR 0117).
        rate_period_ms: the period of `rate` and `rate_per_key`.
        rate_burst: deliveries that each of these rates allows at once after a pause; 0 for as many as in a
            period.
        subscriptions_only: whether messages go to subscriptions only, and are archived in the topic itself
            instead of waiting there (ADR 0119).
    """

    shards: int = 8
    shard_capacity: int = 4_096
    visibility_ms: int = 30_000
    max_attempts: int = 5
    backoff_base_ms: int = 200
    backoff_max_ms: int = 60_000
    replay_window_ms: int = 300_000
    replay_capacity: int = 1_000_000
    ready_retention_ms: int = 7 * DAY_MS
    in_flight_retention_visibilities: int = 10
    dead_retention_ms: int = 14 * DAY_MS
    dead_capacity: int = 100_000
    priorities: bool = False
    priority_aging_ms: int = 600_000
    ordered_keys: bool = False
    dead_letters_hold_keys: bool = False
    key_batch: int = 1
    fair_keys: bool = False
    key_weights: Mapping[str, int] = {}
    max_in_flight: int = 0
    max_in_flight_per_key: int = 0
    rate: int = 0
    rate_per_key: int = 0
    rate_period_ms: int = SECOND_MS
    rate_burst: int = 0
    shared_limits: bool = False
    subscriptions_only: bool = False

    def validate(self) -> "TopicPolicy":
        """Return this policy.

        Raises: InvalidRequest naming the first field of a wrong type or out of bounds.
        """
        _check_fields("Topic policy", self, _POLICY_BOUNDS)
        if self.replay_window_ms < 2 * self.visibility_ms:
            raise InvalidRequest(
                "Topic policy replay_window_ms must be at least twice visibility_ms "
                f"({2 * self.visibility_ms}); it was {self.replay_window_ms}."
            )
        if self.backoff_max_ms < self.backoff_base_ms:
            raise InvalidRequest("Topic policy backoff_max_ms must not be below backoff_base_ms.")
        for name in _FLAGS:
            check_type(f"Topic policy {name}", getattr(self, name), bool)
        if self.dead_letters_hold_keys and not self.ordered_keys:
            raise InvalidRequest("Topic policy dead_letters_hold_keys needs ordered_keys.")
        if self.key_batch > 1 and not self.ordered_keys:
            raise InvalidRequest("Topic policy key_batch needs ordered_keys.")
        if self.key_weights != {}:
            _check_weights(self.key_weights)
        for name in ("max_in_flight_per_key", "rate_per_key", "key_weights"):
            if getattr(self, name) and not self.fair_keys:
                raise InvalidRequest(f"Topic policy {name} needs fair_keys.")
        if self.priorities and self.priority_aging_ms * MAX_PRIORITY >= self.ready_retention_ms:
            raise InvalidRequest(
                "Topic policy priority_aging_ms must be below a tenth of ready_retention_ms "
                f"({self.ready_retention_ms / MAX_PRIORITY:.0f}), so that no message expires behind more "
                f"urgent ones; it was {self.priority_aging_ms}."
            )
        return self


class MailboxLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of a mailbox and its commands (svc-mailbox I-5, I-6).

    Arguments:
        in_flight_ceiling: messages in flight in all topics.
        topics: topics with messages or idempotency keys.
        frame_bytes: largest message, envelope included (`max_frame`, 1 MiB).
        result_bytes: largest result of an ack, as it is stored: encryption adds 33 bytes.
        traceback_bytes: largest traceback that a dead letter keeps, before encryption; the middle of longer
            ones is left out. 0 keeps none.
        max_messages: largest `max_messages` of one RECV.
        history_retention_ms: how long the records of settled and archived messages are retained
            (RFC-037 `max_age_days`).
        max_store_bytes: size of the store above which the oldest settled and archived messages are removed
            early (RFC-037 `max_size_gb`); None for no limit.
    """

    in_flight_ceiling: int = 8_192
    topics: int = 10_000
    frame_bytes: int = 1 << 20
    max_messages: int = 256
    history_retention_ms: int = 90 * DAY_MS
    max_store_bytes: int | None = None
    result_bytes: int = 64 << 10
    traceback_bytes: int = 16 << 10

    def validate(self) -> "MailboxLimits":
        """Return these limits.

        Raises: InvalidRequest naming the first field of a wrong type or out of bounds.
        """
        _check_fields("Mailbox limit", self, _LIMIT_BOUNDS)
        if self.max_store_bytes is not None:
            check_int("Mailbox limit max_store_bytes", self.max_store_bytes, 1)
        return self


UNLIMITED = ("max_in_flight", "max_in_flight_per_key", "rate", "rate_per_key", "rate_burst")
"""Fields of policies of which 0 sets no limit."""
_FLAGS = (
    "priorities",
    "ordered_keys",
    "dead_letters_hold_keys",
    "fair_keys",
    "shared_limits",
    "subscriptions_only",
)
_NUMBERS = (n for n in TopicPolicy.__struct_fields__ if n not in (*_FLAGS, "key_weights"))
_POLICY_BOUNDS = dict.fromkeys(_NUMBERS, _COUNT) | {
    "shards": (1, MAX_SHARDS),
    "key_batch": (1, MAX_KEY_BATCH),
    "visibility_ms": (MIN_VISIBILITY_MS, MAX_VISIBILITY_MS),
    "backoff_base_ms": _DURATION,
    "backoff_max_ms": _DURATION,
    "replay_window_ms": _DURATION,
    "ready_retention_ms": _DURATION,
    "dead_retention_ms": _DURATION,
    "priority_aging_ms": _DURATION,
    "rate_period_ms": _DURATION,
    **dict.fromkeys(UNLIMITED, _LIMIT),
}
_LIMIT_BOUNDS = {
    "in_flight_ceiling": _COUNT,
    "topics": _COUNT,
    "frame_bytes": (1, MAX_FRAME_BYTES),
    "result_bytes": (1, MAX_FRAME_BYTES),
    "traceback_bytes": (0, MAX_FRAME_BYTES),
    "max_messages": _COUNT,
    "history_retention_ms": _DURATION,
}


def _check_fields(kind: str, values: Any, bounds: Mapping[str, Bounds]) -> None:
    for name, (minimum, maximum) in bounds.items():
        check_int(f"{kind} {name}", getattr(values, name), minimum, maximum)


def _check_weights(weights: Any) -> None:
    if len(check_type("Topic policy key_weights", weights, dict)) > MAX_WEIGHTS:
        raise InvalidRequest(
            f"Topic policy key_weights has {len(weights)} keys; use at most {MAX_WEIGHTS}, as others weigh 1."
        )
    for key, weight in weights.items():
        check_text("A key of topic policy key_weights", key)
        check_int(f"The weight of key {key[:80]!r} in topic policy key_weights", weight, 1, MAX_WEIGHT)


def check_visibility(visibility_ms: object) -> int:
    """Return a visibility in ms, or raise `InvalidRequest`."""
    return check_int("visibility_ms", visibility_ms, MIN_VISIBILITY_MS, MAX_VISIBILITY_MS)


class Backoff(Protocol):
    """Bounds of the pauses between attempts; `TopicPolicy` is one implementation."""

    @property
    def backoff_base_ms(self) -> int:
        """Return the base (ms), which is doubled with every attempt."""

    @property
    def backoff_max_ms(self) -> int:
        """Return the longest pause (ms)."""


def backoff_ms(policy: Backoff, attempt: int, jitter: float) -> int:
    """Return the pause after a failure: exponential backoff with full jitter (svc-mailbox P-7).

    Arguments:
        attempt: number of the failed attempt, counted from 1.
        jitter: a uniform random number in [0, 1), drawn by the caller.

    Returns: `jitter * min(backoff_max, base * 2^attempt)` in ms.
    """
    # 2^40 ms is already 34 years: capping the exponent keeps the product a small integer.
    ceiling = min(policy.backoff_max_ms, policy.backoff_base_ms << min(attempt, 40))
    return int(jitter * ceiling)


class OutageBackoff(msgspec.Struct, frozen=True):
    """Bounds of the pauses between attempts, for `postroom.domain.policy.backoff_ms`."""

    backoff_base_ms: int
    backoff_max_ms: int

    def within(self, max_ms: int) -> "OutageBackoff":
        """Return these pauses with none above a maximum, in ms."""
        return OutageBackoff(min(self.backoff_base_ms, max_ms), min(self.backoff_max_ms, max_ms))


MAX_ATTEMPTS = 1_000
"""Maximum number of attempts in a simulation, as each costs a step."""


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """Changes to a topic's policy; None leaves a field unchanged. Durations in ms.

    Arguments:
        max_attempts: deliveries before a message is dead-lettered.
        backoff_base_ms, backoff_max_ms: bounds of the exponential backoff.
        visibility_ms: visibility timeout.

    Raises: InvalidRequest when constructed with a value of a wrong type or out of bounds.
    """

    max_attempts: int | None = None
    backoff_base_ms: int | None = None
    backoff_max_ms: int | None = None
    visibility_ms: int | None = None

    def __post_init__(self) -> None:
        for name, (minimum, maximum) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None:
                check_int(name, value, minimum, maximum)

    def apply(self, policy: TopicPolicy) -> TopicPolicy:
        """Return a policy with these changes."""
        changes = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return msgspec.structs.replace(policy, **changes)


_BOUNDS = {
    "max_attempts": (1, MAX_ATTEMPTS),
    "backoff_base_ms": (1, MAX_DURATION_MS),
    "backoff_max_ms": (1, MAX_DURATION_MS),
    "visibility_ms": (MIN_VISIBILITY_MS, MAX_VISIBILITY_MS),
}
