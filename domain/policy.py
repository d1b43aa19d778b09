"""Policies: what a topic promises (visibility, retries, retention) and what bounds a mailbox."""

from typing import Protocol

import msgspec

from postroom.domain.errors import InvalidRequest

SECOND_MS = 1_000
DAY_MS = 24 * 60 * 60 * SECOND_MS


class TopicPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Say how a topic shards, retries, remembers and forgets, within bounds (svc-mailbox I-5, P-9, C-12).

    Arguments, all durations in ms:
        shards: number of FIFO queues of the topic (svc-mailbox P-1).
        shard_capacity: messages a shard may hold unsettled, ready, delayed and in flight together.
        visibility_ms: how long a received message stays hidden unless RECV says otherwise.
        max_attempts: deliveries before a message is dead-lettered (svc-mailbox C-4).
        backoff_base_ms, backoff_max_ms: the exponential backoff of NACK (svc-mailbox P-7).
        replay_window_ms: `T_replay`, how long an idempotency key is remembered (svc-mailbox I-13).
        replay_capacity: idempotency keys remembered at once; never evicted inside the window.
        ready_retention_ms: age at which an undelivered message is dead-lettered (svc-mailbox P-9).
        in_flight_retention_visibilities: how many times its visibility one delivery may be held by EXTEND.
        dead_retention_ms, dead_capacity: age and count at which dead letters expire, oldest first.
    """

    shards: int = 8
    shard_capacity: int = 4_096
    visibility_ms: int = 5_000
    max_attempts: int = 5
    backoff_base_ms: int = 200
    backoff_max_ms: int = 60_000
    replay_window_ms: int = 300_000
    replay_capacity: int = 1_000_000
    ready_retention_ms: int = 7 * DAY_MS
    in_flight_retention_visibilities: int = 10
    dead_retention_ms: int = 14 * DAY_MS
    dead_capacity: int = 100_000

    def validate(self) -> "TopicPolicy":
        """Return this policy, or raise `InvalidRequest` naming the first field that is out of bounds."""
        for name in self.__struct_fields__:
            if getattr(self, name) < 1:
                raise InvalidRequest(f"Topic policy {name} must be at least 1; it was {getattr(self, name)}.")
        if self.visibility_ms < MIN_VISIBILITY_MS:
            raise InvalidRequest(
                f"Topic policy visibility_ms must be at least {MIN_VISIBILITY_MS}; it was "
                f"{self.visibility_ms}."
            )
        if self.replay_window_ms < 2 * self.visibility_ms:
            raise InvalidRequest(
                "Topic policy replay_window_ms must be at least twice visibility_ms "
                f"({2 * self.visibility_ms}); "
                f"it was {self.replay_window_ms}."
            )
        if self.backoff_max_ms < self.backoff_base_ms:
            raise InvalidRequest("Topic policy backoff_max_ms must not be below backoff_base_ms.")
        return self


class MailboxLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bound what one mailbox holds and what one command may ask for (svc-mailbox I-5, I-6).

    Arguments:
        in_flight_ceiling: messages in flight over all topics.
        topics: number of topics.
        frame_bytes: largest message, envelope included (`max_frame`, 1 MiB).
        max_messages: largest `max_messages` of one RECV.
        history_retention_ms: how long the records of settled and archived messages are kept (RFC-037
            `max_age_days`).
        max_store_bytes: size of the store from which on the oldest settled and archived messages go before
            their time (RFC-037 `max_size_gb`); None for no bound.
    """

    in_flight_ceiling: int = 8_192
    topics: int = 1_024
    frame_bytes: int = 1 << 20
    max_messages: int = 256
    history_retention_ms: int = 90 * DAY_MS
    max_store_bytes: int | None = None


MIN_VISIBILITY_MS = 250
DEFAULT_MAX_MESSAGES = 32
DEFAULT_MAX_BYTES = 512 << 10
SATURATED_RETRY_MS = 1_000


class Backoff(Protocol):
    """Bound the pauses between attempts, in ms: a topic's policy does, and others of the same two fields."""

    @property
    def backoff_base_ms(self) -> int:
        """Return what the first pause is made of."""

    @property
    def backoff_max_ms(self) -> int:
        """Return the longest pause."""


def backoff_ms(policy: Backoff, attempt: int, jitter: float) -> int:
    """Return how long to wait after a failure: exponential backoff with full jitter (svc-mailbox P-7).

    Arguments:
        attempt: what failed, such as a delivery, counted from 1.
        jitter: a uniform random number in [0, 1), drawn by the caller.

    Returns: `jitter * min(backoff_max, base * 2^attempt)` in ms.
    """
    # 2^40 ms is already 34 years: capping the exponent keeps the product a small integer.
    ceiling = min(policy.backoff_max_ms, policy.backoff_base_ms << min(attempt, 40))
    return int(jitter * ceiling)
