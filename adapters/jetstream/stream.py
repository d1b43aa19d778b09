"""The definition of the lease stream: created if it is missing, checked if it exists."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from blake3 import blake3
from eventsourcing.persistence import Notification, StoredEvent

from postroom.adapters.jetstream.definitions import (
    CLUSTER_REPLICAS,
    check_leader,
    check_stream,
    find_or_create,
    replica_count,
    servers_of,
    until,
)
from postroom.adapters.jetstream.settings import MIN_EVENTS_PER_AGGREGATE, LeaseStreamSettings
from postroom.adapters.nats.api import JetStreamApi
from postroom.adapters.nats.client import SupervisedClient
from postroom.domain.errors import BrokenLog, InvalidRequest

MIN_API_LEVEL = 2
"""Of NATS 2.12, the first with atomic batches."""


class StreamServers(NamedTuple):
    """Servers that have a replica of the stream, by name, and how many events it keeps of an aggregate."""

    names: frozenset[str]
    events_per_aggregate: int


def hints_subject(stream: str) -> str:
    """Return the subject at which the stream's leader announces stored messages."""
    return f"{stream}_HINTS.*"


async def ensure_stream(client: SupervisedClient, settings: LeaseStreamSettings) -> StreamServers:
    """Create the stream unless it exists, and check that it keeps acknowledged messages.

    Raises:
        InvalidRequest: the stream could lose events, or the server is too old or refuses to create it.
        Unavailable: no server answered; a cluster may not have a leader yet.
    """

    async def find() -> StreamServers:
        info = await find_or_create(JetStreamApi(client), settings.stream, partial(_config, client, settings))
        return _check(settings, info)

    return await until(settings.timeout_ms / 1_000, find)


def _config(client: SupervisedClient, settings: LeaseStreamSettings, level: int) -> dict[str, Any]:
    if level < MIN_API_LEVEL:
        raise InvalidRequest(
            "The lease store needs NATS 2.12 or newer, with atomic batches; upgrade the servers."
        )
    name = settings.stream
    return {
        "name": name,
        "description": "Leases of Postroom; do not publish here",
        "subjects": [f"{name}.*"],
        "retention": "limits",
        "storage": "file",
        "num_replicas": replica_count(client, settings),
        "discard": "new",
        # The stream removes an aggregate's oldest events by itself, so that nobody needs the right to delete.
        "max_msgs_per_subject": settings.events_per_aggregate,
        "deny_delete": True,
        "deny_purge": True,
        "allow_atomic": True,
        "allow_direct": True,
        "republish": {"src": f"{name}.*", "dest": f"{name}_HINTS.{{{{wildcard(1)}}}}", "headers_only": True},
    }


def _check(settings: LeaseStreamSettings, info: Mapping[str, Any]) -> StreamServers:
    config, name = info["config"], settings.stream
    events = config.get("max_msgs_per_subject", -1)
    demands = {
        "deny_delete must be on": config.get("deny_delete") is True,
        "deny_purge must be on": config.get("deny_purge") is True,
        "allow_atomic must be on": config.get("allow_atomic") is True,
        "max_bytes must be unlimited": (config.get("max_bytes") or 0) <= 0,
        f"max_msgs_per_subject must be at least {MIN_EVENTS_PER_AGGREGATE}": events <= 0
        or events >= MIN_EVENTS_PER_AGGREGATE,
    }
    is_clustered = bool((info.get("cluster") or {}).get("name"))
    check_stream(
        name,
        info,
        subject=f"{name}.*",
        replicas=settings.replicas or (CLUSTER_REPLICAS if is_clustered else 1),
        content="leases",
        demands=demands,
    )
    check_leader(name, info)
    return StreamServers(servers_of(info), events)


_DIGEST_BYTES = 16
_FORMAT = 1


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    format: int
    save: bytes
    index: int
    version: int
    topic: str
    state: bytes


class StreamMessage(NamedTuple):
    """An event as the stream has it.

    Arguments:
        sequence: in the stream.
        save: id of the save that wrote the event.
        place: of the event in its save, from 0.
    """

    sequence: int
    save: UUID
    place: int
    event: StoredEvent

    @property
    def notification(self) -> Notification:
        """Return the event with its sequence as the notification id."""
        event = self.event
        return Notification(
            event.originator_id, event.originator_version, event.topic, event.state, self.sequence
        )


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Body).decode


def subject_of(stream: str, originator: UUID) -> str:
    """Return the subject of an aggregate's events."""
    return f"{stream}.{originator.hex}"


def encode(subject: str, save: UUID, index: int, event: StoredEvent) -> bytes:
    """Return the payload of an event: a digest of subject and body, and the body."""
    body = _encode(
        _Body(_FORMAT, save.bytes, index, event.originator_version, event.topic, bytes(event.state))
    )
    return _digest(subject, body) + body


def decode(subject: str, sequence: int, payload: bytes) -> StreamMessage:
    """Return the event of a message.

    Raises: BrokenLog for a message that is not an event of this stream, or was altered.
    """
    body = payload[_DIGEST_BYTES:]
    if payload[:_DIGEST_BYTES] != _digest(subject, body):
        raise _broken_log(subject, sequence, "does not match its digest")
    try:
        fields = _decode(body)
        originator = UUID(hex=subject.rpartition(".")[2])
        save = UUID(bytes=fields.save)
    except (msgspec.DecodeError, ValueError) as error:
        raise _broken_log(subject, sequence, f"can't be decoded ({error})") from error
    if fields.format != _FORMAT:
        raise _broken_log(subject, sequence, f"has the unknown format {fields.format}")
    event = StoredEvent(originator, fields.version, fields.topic, fields.state)
    return StreamMessage(sequence, save, fields.index, event)


def _digest(subject: str, body: bytes) -> bytes:
    return blake3(subject.encode() + b"\0" + body).digest(_DIGEST_BYTES)


def _broken_log(subject: str, sequence: int, problem: str) -> BrokenLog:
    return BrokenLog(
        f"Message {sequence} of the lease stream, at subject {subject}, {problem}; it was altered, or "
        "published by another program. Restore the stream from a backup, or use another stream.",
        sequence,
    )
