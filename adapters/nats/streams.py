"""Streams and consumers of JetStream, and the application of their definitions.

The JSON API of JetStream preserves fields without a definition.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from postroom.adapters.nats.definitions import (
    ConsumerDefinition,
    ConsumerStatus,
    Definition,
    Difference,
    StreamDefinition,
    StreamStatus,
    compare,
    with_defaults,
)
from postroom.domain.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:  # settings of every command are read with this module, and the client of NATS is an extra
    from nats.aio.client import Client

MAX_DELIVER = "postroom.max_deliver"
"""Key of a consumer's metadata: attempts after which the worker dead-letters a message."""

_API = "$JS.API"
_TIMEOUT_SECONDS = 5.0
_NS = 1_000_000
_STREAM_NOT_FOUND, _CONSUMER_NOT_FOUND = 10059, 10014
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


class _RefusedError(Exception):
    def __init__(self, code: int, number: int, reason: str) -> None:
        super().__init__(f"{reason} (NATS error {number})")
        self.code = code
        self.number = number


class JetStreamStreams:
    """Streams and consumers of a NATS server or cluster, queried, created and updated; nothing is deleted.

    Raises: Unavailable when the server can't be reached or can't answer.
    """

    def __init__(self, client: "Client") -> None:
        self._client = client

    async def find_stream(self, name: str) -> StreamDefinition | None:
        """Return the configuration of a stream, or None if it doesn't exist."""
        config = await self._stream_config(name)
        if config is None:
            return None
        fields = _from_config(_STREAM_KEYS, config)
        return msgspec.convert({"name": name, "subjects": (), **fields}, StreamDefinition)

    async def find_consumer(self, stream: str, durable: str) -> ConsumerDefinition | None:
        """Return the configuration of a consumer, or None if it doesn't exist."""
        config = await self._consumer_config(stream, durable)
        if config is None:
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
        config = await self._stream_config(definition.name) or {}
        config |= _to_config(_STREAM_KEYS, definition)
        await self._change(f"Stream {definition.name}", f"STREAM.UPDATE.{definition.name}", config)

    async def create_consumer(self, definition: ConsumerDefinition) -> None:
        """Create a consumer; raise `InvalidRequest` if the server refuses."""
        await self._put_consumer(definition, {"durable_name": definition.durable}, "create")

    async def update_consumer(self, definition: ConsumerDefinition) -> None:
        """Update the fields that a definition sets; raise `InvalidRequest` if the server refuses."""
        config = await self._consumer_config(definition.stream, definition.durable) or {}
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

    async def _stream_config(self, name: str) -> dict[str, Any] | None:
        return await self._config(f"STREAM.INFO.{name}", _STREAM_NOT_FOUND)

    async def _consumer_config(self, stream: str, durable: str) -> dict[str, Any] | None:
        return await self._config(f"CONSUMER.INFO.{stream}.{durable}", _STREAM_NOT_FOUND, _CONSUMER_NOT_FOUND)

    async def _config(self, where: str, *absent: int) -> dict[str, Any] | None:
        try:
            answer = await self._ask(where, None)
        except _RefusedError as refused:
            if refused.number in absent:
                return None
            raise Unavailable(f"NATS could not answer {where}: {refused}; try again.") from refused
        config: dict[str, Any] = answer["config"]
        return config

    async def _pages(self, where: str, key: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        while True:
            try:
                page = await self._ask(where, {"offset": len(items)})
            except _RefusedError as refused:
                raise Unavailable(f"NATS could not answer {where}: {refused}; try again.") from refused
            items += page.get(key) or []
            if len(items) >= page["total"] or not page.get(key):
                return items

    async def _change(self, what: str, where: str, request: Mapping[str, Any]) -> None:
        try:
            await self._ask(where, request)
        except _RefusedError as refused:
            if refused.code >= 500 and refused.number not in _NOT_ENOUGH_SERVERS:
                raise Unavailable(f"{what} could not be changed: {refused}; try again.") from refused
            hint = (
                "set fewer with --replicas or [streams] replicas"
                if refused.number in _NOT_ENOUGH_SERVERS
                else "correct its definition"
            )
            raise InvalidRequest(f"{what} is refused by NATS: {refused}; {hint}.") from refused

    async def _ask(self, where: str, request: Mapping[str, Any] | None) -> dict[str, Any]:
        from nats.errors import Error as NatsError

        body = b"" if request is None else msgspec.json.encode(request)
        try:
            message = await self._client.request(f"{_API}.{where}", body, timeout=_TIMEOUT_SECONDS)
        except (NatsError, OSError, TimeoutError) as error:
            raise Unavailable(
                f"JetStream did not reply to {where}: {str(error) or type(error).__name__}; check that the "
                "server runs with JetStream on and that its cluster has a leader."
            ) from error
        answer: dict[str, Any] = msgspec.json.decode(message.data)
        if error_ := answer.get("error"):
            raise _RefusedError(
                error_.get("code", 500),
                error_.get("err_code", 0),
                error_.get("description", "no reason given"),
            )
        return answer


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


class Plan(msgspec.Struct, frozen=True):
    """Definitions from which a server differs, in the order of application."""

    steps: Sequence[tuple[Definition, Sequence[Difference]]]

    @property
    def differences(self) -> Sequence[Difference]:
        """Return all differences, streams first."""
        return [difference for _, differences in self.steps for difference in differences]


async def make_plan(server: JetStreamStreams, definitions: Sequence[Definition]) -> Plan:
    """Compare a server with definitions, without changing it.

    Raises: InvalidRequest for a consumer whose stream doesn't exist and is not defined.
    """
    streams = [each for each in definitions if isinstance(each, StreamDefinition)]
    consumers = [each for each in definitions if isinstance(each, ConsumerDefinition)]
    steps: list[tuple[Definition, Sequence[Difference]]] = [
        (stream, compare(stream, await server.find_stream(stream.name))) for stream in streams
    ]
    defined = {stream.name for stream in streams}
    for consumer in consumers:
        if consumer.stream not in defined and await server.find_stream(consumer.stream) is None:
            raise InvalidRequest(
                f"Consumer {consumer.durable} reads stream {consumer.stream}, which neither exists nor is "
                f"defined; add [streams.{consumer.stream}] or correct its name."
            )
        steps.append(
            (consumer, compare(consumer, await server.find_consumer(consumer.stream, consumer.durable)))
        )
    return Plan([(definition, differences) for definition, differences in steps if differences])


async def apply_plan(server: JetStreamStreams, plan: Plan) -> None:
    """Create missing streams and consumers and update different ones, streams first.

    Raises: InvalidRequest if NATS does not support one of the changes, in which case nothing is changed, or
        if the server refuses a step; earlier steps remain applied then, and it is safe to apply again.
    """
    refusals = [f"{each.kind} {each.name}: {each.refusal}" for each in plan.differences if each.refusal]
    if refusals:
        raise InvalidRequest(f"Nothing was changed. {'. '.join(refusals)}.")
    for definition, differences in plan.steps:
        is_new = differences[0].action == "create"
        target = with_defaults(definition) if is_new else definition
        if isinstance(target, StreamDefinition):
            await (server.create_stream(target) if is_new else server.update_stream(target))
        else:
            await (server.create_consumer(target) if is_new else server.update_consumer(target))
