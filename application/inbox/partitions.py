"""Lanes and partitions of ordered workers."""

from hashlib import blake2b
from uuid import UUID

from postroom.application.inbox.request import Unreadable, read_cloud_event
from postroom.application.outbox.message import AGGREGATE_ID, AGGREGATE_TYPE
from postroom.application.ports.source import SourceMessage

PARTITIONS = 64
"""Number of partitions of a consumer; it can't change, as the queue stores each message's partition."""


def aggregate_key(message: SourceMessage) -> str | None:
    """Return a message's aggregate, or the source and partition key of a CloudEvent, or None."""
    headers = message.headers
    if AGGREGATE_ID in headers:
        return f"aggregate {headers.get(AGGREGATE_TYPE, '')}/{headers[AGGREGATE_ID]}"
    try:
        event = read_cloud_event(message)
    except Unreadable:
        return None
    key = event.attributes.get("partitionkey") if event is not None else None
    return None if event is None or not key else f"source {event.attributes['source']} {key}"


def lane_of(message: SourceMessage, message_id: UUID) -> int:
    """Return the hash of a message's lane: of the aggregate, or else of the message id."""
    key = aggregate_key(message) or f"id {message_id}"
    digest = blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def partition_of(lane: int) -> int:
    """Return the partition of a lane."""
    return lane % PARTITIONS


def share(workers: int) -> int:
    """Return the maximum number of partitions of each worker."""
    return -(-PARTITIONS // max(workers, 1))
