"""Lanes and partitions of ordered workers."""

from hashlib import blake2b
from uuid import UUID

from postroom.application.inbox.request import Unreadable, read_cloud_event
from postroom.application.outbox.message import AGGREGATE_ID, AGGREGATE_TYPE
from postroom.application.ports.source import SourceMessage

PARTITIONS = 64
"""Partitions of a consumer, for ever: the queue stores the number of each message's."""


def aggregate_key(message: SourceMessage) -> str | None:
    """Return the type and id of a message's aggregate, or the partition key of a CloudEvent; else None."""
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
    """Return the hash of a message's lane: of its aggregate, or else of its id."""
    key = aggregate_key(message) or f"id {message_id}"
    digest = blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def partition_of(lane: int) -> int:
    """Return the partition of a lane."""
    return lane % PARTITIONS


def share(workers: int) -> int:
    """Return how many partitions each of some workers may own."""
    return -(-PARTITIONS // max(workers, 1))
