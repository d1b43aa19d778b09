"""Streams and consumers of JetStream.

The JSON API of JetStream preserves fields without a definition.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from postroom.adapters.nats.api import STREAM_NOT_FOUND, ApiError, JetStreamApi
from postroom.adapters.nats.client import SupervisedClient
from postroom.adapters.nats.definitions import (
    ConsumerDefinition,
    ConsumerStatus,
    StreamDefinition,
    StreamStatus,
)
from postroom.domain.errors import InvalidRequest, Unavailable

MAX_DELIVER = "postroom.max_deliver"
"""Key of a consumer's metadata: attempts after which the worker dead-letters a message."""

_NS = 1_000_000
_CONSUMER_NOT_FOUND = 10014
_STREAM_KEYS = {
    "subjects": "subjects",
    "retention": "retention",
    "storage": "storage",
    "replicas": "num_replicas",
    "discard": "discard",
    "compression": "compression",
    "max_age_ms": "max_age",
    "max_bytes": "max_bytes",
    "max_msgs": "max_msgs",
    "max_msg_size": "max_msg_size",
    "duplicate_window_ms": "duplicate_window",
}
_CONSUMER_KEYS = {
    "ack_policy": "ack_policy",
    "deliver_policy": "deliver_policy",
    "ack_wait_ms": "ack_wait",
    "max_ack_pending": "max_ack_pending",
}


class JetStreamStreams:
    """Streams and consumers of a NATS server or cluster, queried, created and updated; nothing is deleted.

    Raises: Unavailable when the server can't be reached or can't answer.
    """

    def __init__(self, client: SupervisedClient) -> None:
        self._api = JetStreamApi(client)

    async def find_stream(self, name: str) -> StreamDefinition | None:
        """Return the configuration of a stream, or None if it doesn't exist."""
        config = await self._stream_config(name)
        if not config:
            return None
        fields = _from_config(_STREAM_KEYS, config)
        return msgspec.convert({"name": name, "subjects": (), **fields}, StreamDefinition)

    async def find_consumer(self, stream: str, durable: str) -> ConsumerDefinition | None:
        """Return the configuration of a consumer, or None if it doesn't exist."""
        config = await self._consumer_config(stream, durable)
        if not config:
            return None
        server_limit = _limit(config.get("max_deliver"))
        attempts = config.get("metadata", {}).get(MAX_DELIVER, "")
        subjects = config.get("filter_subjects") or [config.get("filter_subject", "")]
        return ConsumerDefinition(
            stream=stream,
            durable=durable,
            filter_subjects=tuple(filter(None, subjects)),
            max_deliver=int(attempts) if attempts.isdecimal() else server_limit,
            server_max_deliver=server_limit,
            **_from_config(_CONSUMER_KEYS, config),
        )

    async def create_stream(self, definition: StreamDefinition) -> None:
        """Create a stream; raise `InvalidRequest` if the server refuses."""
        config = {"name": definition.name} | _to_config(_STREAM_KEYS, definition)
        await self._change(f"Stream {definition.name}", f"STREAM.CREATE.{definition.name}", config)

    async def update_stream(self, definition: StreamDefinition) -> None:
        """Update the fields that a definition sets; raise `InvalidRequest` if the server refuses."""
        config = await self._stream_config(definition.name)
        config |= _to_config(_STREAM_KEYS, definition)
        await self._change(f"Stream {definition.name}", f"STREAM.UPDATE.{definition.name}", config)

    async def create_consumer(self, definition: ConsumerDefinition) -> None:
        """Create a consumer; raise `InvalidRequest` if the server refuses."""
        await self._put_consumer(definition, {"durable_name": definition.durable}, "create")

    async def update_consumer(self, definition: ConsumerDefinition) -> None:
        """Update the fields that a definition sets; raise `InvalidRequest` if the server refuses."""
        config = await self._consumer_config(definition.stream, definition.durable)
        await self._put_consumer(definition, config, "update")

    async def list_streams(self) -> Sequence[StreamStatus]:
        """Return all streams with their consumers, by name."""
        return [
            StreamStatus(
                each["config"]["name"],
                each["config"].get("subjects", []),
                each["state"]["messages"],
                each["state"]["bytes"],
                each["state"]["last_seq"],
                await self._list_consumers(each["config"]["name"]),
            )
            for each in await self._pages("STREAM.LIST", "streams")
        ]

    async def _list_consumers(self, stream: str) -> list[ConsumerStatus]:
        return [
            ConsumerStatus(
                each["name"], each["num_pending"], each["num_ack_pending"], each["num_redelivered"]
            )
            for each in await self._pages(f"CONSUMER.LIST.{stream}", "consumers")
        ]

    async def _put_consumer(
        self, definition: ConsumerDefinition, config: dict[str, Any], action: str
    ) -> None:
        metadata = config.get("metadata", {})
        attempts = definition.max_deliver or metadata.get(MAX_DELIVER) or _limit(config.get("max_deliver"))
        if attempts:  # the worker enforces the limit from now on
            config["metadata"] = metadata | {MAX_DELIVER: str(attempts)}
        config |= _to_config(_CONSUMER_KEYS, definition) | {
            "max_deliver": definition.server_max_deliver or -1
        }
        if definition.filter_subjects is not None:
            config.pop("filter_subject", None)
            config["filter_subjects"] = definition.filter_subjects
            if len(definition.filter_subjects) <= 1:
                config["filter_subjects"] = []
                config["filter_subject"] = "".join(definition.filter_subjects)
        request = {"stream_name": definition.stream, "config": config, "action": action}
        where = f"CONSUMER.DURABLE.CREATE.{definition.stream}.{definition.durable}"
        await self._change(f"Consumer {definition.durable} of stream {definition.stream}", where, request)

    async def _stream_config(self, name: str) -> dict[str, Any]:
        """Return the configuration of a stream; empty if it doesn't exist."""
        config: dict[str, Any] = (await self._api.find_stream(name)).get("config", {})
        return config

    async def _consumer_config(self, stream: str, durable: str) -> dict[str, Any]:
        """Return the configuration of a consumer; empty if it doesn't exist."""
        where = f"CONSUMER.INFO.{stream}.{durable}"
        answer = await self._api.find(where, absent=[STREAM_NOT_FOUND, _CONSUMER_NOT_FOUND])
        config: dict[str, Any] = answer.get("config", {})
        return config

    async def _pages(self, where: str, key: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        while True:
            page = await self._api.find(where, {"offset": len(items)})
            items += page.get(key) or []
            if len(items) >= page["total"] or not page.get(key):
                return items

    async def _change(self, what: str, where: str, request: Mapping[str, Any]) -> None:
        try:
            await self._api.ask(where, request)
        except ApiError as refused:
            if not refused.is_final and refused.number not in _NOT_ENOUGH_SERVERS:
                raise Unavailable(f"{what} could not be changed: {refused}; try again.") from refused
            hint = (
                "set fewer with --replicas or [streams] replicas"
                if refused.number in _NOT_ENOUGH_SERVERS
                else "correct its definition"
            )
            raise InvalidRequest(f"{what} is refused by NATS: {refused}; {hint}.") from refused


_NOT_ENOUGH_SERVERS = (10074, 10005)  # more replicas than servers: alone, or in a cluster


def _from_config(keys: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a configuration of NATS to the fields of a definition."""
    fields: dict[str, Any] = {}
    for field, key in keys.items():
        value = config.get(key)
        if field.endswith("_ms"):
            value = (value or 0) // _NS
        if isinstance(value, list):
            value = tuple(value)
        fields[field] = _limit(value) if isinstance(value, int) else value
    return fields


def _to_config(keys: Mapping[str, str], definition: msgspec.Struct) -> dict[str, Any]:
    """Convert the fields that a definition sets to a configuration of NATS."""
    values = {field: getattr(definition, field) for field in keys}
    return {
        keys[field]: value * _NS if field.endswith("_ms") else value
        for field, value in values.items()
        if value is not None
    }


def _limit(value: int | None) -> int | None:
    """Return a limit, or None if it is 0 or -1, which mean unlimited in NATS."""
    return value if value is not None and value > 0 else None
