"""What the model of svc-mailbox knows of messages, idempotency keys and topics; all times are µs."""

from dataclasses import dataclass, field
from typing import Any

MS = 1_000

EXPIRY_GRACE = 300_000 * MS
"""Pause of expiry after log time restarted at the wall clock."""

UNKNOWN = "unknown"
"""The answer to a command that was carried out, but whose caller never heard of it."""

READY, IN_FLIGHT, ACKED, DEAD, GONE = "ready", "in flight", "acked", "dead", "gone"


@dataclass
class Message:
    id: str
    topic: str
    shard: int
    rank: int
    payload: bytes
    key: str | None
    sent_at: int
    expires_at: int
    due: int
    has_ttl: bool
    priority: int
    ready_at: int
    state: str = READY
    attempt: int = 0
    delivery: int | None = None
    received_at: int = 0
    visibility: int = 0
    hidden: int = 0
    hidden_until_true: int = 0
    reason: str | None = None
    last_error: str | None = None
    redriven: int = 0
    sticky_key: str | None = None
    unique_key: str | None = None


@dataclass
class Key:
    message: str
    payload: bytes
    accepted_at: int
    """Log time from which the window counts."""
    protected_until_true: int
    """A repeat before this moment must be recognised, whatever the clocks did."""


@dataclass
class Topic:
    policy: Any
    keys: dict[str, Key] = field(default_factory=dict)
    dead: list[Message] = field(default_factory=list)
    largest: dict[str, int] = field(default_factory=dict)
    shards_in_use: int = 0

    def __post_init__(self) -> None:
        self.allow(self.policy)

    def allow(self, policy: Any) -> None:
        """Remember the largest bounds that ever held: what was let in under them may stay."""
        self.policy = policy
        for bound in ("shard_capacity", "max_attempts", "replay_capacity"):
            self.largest[bound] = max(self.largest.get(bound, 0), getattr(policy, bound))
