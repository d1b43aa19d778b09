"""Finding and creating streams, through the JSON API of JetStream."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from nats.aio.client import Client
from nats.errors import Error as NatsError

from postroom.adapters.jetstream.settings import LeaseStreamSettings, LogStreamSettings
from postroom.domain.errors import InvalidRequest, Unavailable

T = TypeVar("T")

CLUSTER_REPLICAS = 3
_API = "$JS.API"
_REQUEST_SECONDS = 5.0
_PAUSE_SECONDS = 0.1
_STREAM_NOT_FOUND, _NAME_IN_USE = 10059, 10058


async def until(seconds: float, attempt: Callable[[], Awaitable[T]]) -> T:
    """Return the result of an attempt, which is repeated while it raises Unavailable; then raise that."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        try:
            return await attempt()
        except Unavailable:
            if loop.time() + _PAUSE_SECONDS >= deadline:
                raise
            await asyncio.sleep(_PAUSE_SECONDS)


async def find_stream(client: Client, name: str) -> Mapping[str, Any] | None:
    """Return what JetStream reports about a stream, or None.

    Raises: Unavailable when no server answers.
    """
    info = await ask(client, f"STREAM.INFO.{name}", None)
    return None if _error_number(info) == _STREAM_NOT_FOUND else _checked(name, info)


async def find_or_create(
    client: Client, name: str, config: Callable[[int], Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Return what JetStream reports about a stream; create it if it is missing.

    Arguments:
        config: returns the configuration of a new stream on servers of an API level.

    Raises: InvalidRequest when it can't be created so, Unavailable when no server answers.
    """
    info = await find_stream(client, name)
    if info is not None:
        return info
    level = int((await ask(client, "INFO", None)).get("api", {}).get("level", 0))
    created = await ask(client, f"STREAM.CREATE.{name}", config(level))
    if _error_number(created) == _NAME_IN_USE:  # another process created it meanwhile
        created = await ask(client, f"STREAM.INFO.{name}", None)
    return _checked(name, created)


def _checked(name: str, info: Mapping[str, Any]) -> Mapping[str, Any]:
    error = info.get("error")
    if error is None:
        return info
    reason = f"{error.get('description', 'no reason given')} (NATS error {error.get('err_code', 0)})"
    if error.get("code", 500) >= 500:
        raise Unavailable(
            f"Stream {name} can't be used: {reason}; check that the cluster has all its servers."
        )
    raise InvalidRequest(f"Stream {name} can't be created: {reason}; correct the settings.")


def servers_of(info: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the servers that have a replica of a stream."""
    cluster = info.get("cluster") or {}
    replicas = (each["name"] for each in cluster.get("replicas") or [])
    return frozenset(filter(None, [cluster.get("leader"), *replicas]))


def replica_count(client: Client, settings: LeaseStreamSettings | LogStreamSettings) -> int:
    """Return the number of replicas of a new stream."""
    # nats-py has no accessor of what the server said about its cluster.
    is_clustered = bool(client._server_info.get("cluster"))
    return settings.replicas or (CLUSTER_REPLICAS if is_clustered else 1)


async def ask(client: Client, where: str, request: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return JetStream's answer to a request of its API; raise Unavailable without one."""
    body = b"" if request is None else msgspec.json.encode(request)
    try:
        reply = await client.request(f"{_API}.{where}", body, timeout=_REQUEST_SECONDS)
    except (NatsError, OSError, TimeoutError) as error:
        raise Unavailable(
            f"JetStream did not reply to {where}: {str(error) or type(error).__name__}; check that the "
            "servers run with JetStream on and that their cluster has a leader."
        ) from error
    answer: dict[str, Any] = msgspec.json.decode(reply.data)
    return answer


def _error_number(answer: Mapping[str, Any]) -> int:
    number: int = (answer.get("error") or {}).get("err_code", 0)
    return number
