"""The rows of the three read models: their columns and what they mean, in Spark, reference and tables."""

from enum import StrEnum

HEADER_COLUMNS = (
    "timestamp",
    "content_type",
    "schema_url",
    "schema_version",
    "encryption",
    "correlation_id",
    "principal",
    "namespace",
    "trace_id",
    "span_id",
    "custom_headers",
)
"""RFC-037's headers that a row takes over from the log as they are."""


class Standing(StrEnum):
    """Say where a message stands at the cut; `delayed` is ready, but not before its `due`."""

    READY = "ready"
    DELAYED = "delayed"
    IN_FLIGHT = "in_flight"
    ACKED = "acked"
    DEAD = "dead"
    EXPIRED = "expired"
    ARCHIVED = "archived"


STANDING_AFTER = {
    "MessageReceived": Standing.IN_FLIGHT,
    "MessageVisibilityExtended": Standing.IN_FLIGHT,
    "MessageAcked": Standing.ACKED,
    "MessageRequeued": Standing.READY,
    "MessageDeadLettered": Standing.DEAD,
    "MessageRedriven": Standing.READY,
    "MessageExpired": Standing.EXPIRED,
}
"""Where a message stands after an event that is not `MessageSent`."""

MAILBOX_COLUMNS = (
    "id",
    "message_id",
    "timestamp",
    "topic",
    *HEADER_COLUMNS[1:],
    "created_at",
    "mailbox",
    "position",
    "shard",
    "status",
    "attempts",
    "redriven",
    "changed_at",
    "envelope_blob",
)
"""The `mailbox` table of RFC-037 and what became of the message.

    id: the log's place of its `MessageSent`: unique, and the same after every rebuild.
    timestamp: ms; created_at, changed_at: log time in µs of its first and its last event.
    status: a `Standing`. attempts: deliveries since it was sent or last redriven. redriven: how often it was.
"""

BACKLOG_COLUMNS = ("mailbox", "topic", "shard", "ready", "in_flight", "delayed", "dead", "oldest_at")
"""Unsettled messages by shard; oldest_at is the log time (µs) of the oldest that is not dead."""

DEAD_LETTER_COLUMNS = (
    "id",
    "mailbox",
    "topic",
    "shard",
    "message_id",
    "reason",
    "attempt",
    "last_error",
    "fingerprint",
    "first_seen",
    "last_seen",
    "redriven",
    "redriven_at",
)
"""Messages that are dead at the cut: sent first_seen, dead since last_seen, put back redriven_at (µs)."""
