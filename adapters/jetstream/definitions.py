"""Streams of Postroom, which are created if they are missing, and checked if they exist."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from nats.aio.client import Client

from postroom.adapters.jetstream.settings import LeaseStreamSettings, LogStreamSettings
from postroom.adapters.nats.api import ApiError, JetStreamApi
from postroom.domain.errors import InvalidRequest, Unavailable

T = TypeVar("T")

CLUSTER_REPLICAS = 3
_PAUSE_SECONDS = 0.1
_NAME_IN_USE = 10058


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


async def find_or_create(
    api: JetStreamApi, name: str, config: Callable[[int], Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Return what JetStream reports about a stream; create it if it is missing.

    Arguments:
        config: returns the configuration of a new stream on servers of an API level.

    Raises: InvalidRequest when it can't be created so, Unavailable when no server answers.
    """
    info = await api.find_stream(name)
    if info:
        return info
    level = int((await api.find("INFO")).get("api", {}).get("level", 0))
    try:
        return await api.ask(f"STREAM.CREATE.{name}", config(level))
    except ApiError as refused:
        if refused.number == _NAME_IN_USE and (info := await api.find_stream(name)):
            return info  # another process created it meanwhile
        if refused.is_final:
            raise InvalidRequest(
                f"Stream {name} can't be created: {refused}; correct the settings."
            ) from refused
        raise Unavailable(
            f"Stream {name} can't be created: {refused}; check that the cluster has all its servers."
        ) from refused


def check_stream(
    name: str,
    info: Mapping[str, Any],
    *,
    subject: str,
    replicas: int,
    content: str,
    demands: Mapping[str, bool],
) -> None:
    """Check that an existing stream does not lose what was acknowledged.

    Arguments:
        subject: the one that it stores.
        replicas: how many it must have at least.
        content: for what it is used, for the error.
        demands: whether further demands are met, each as text.

    Raises: InvalidRequest when it could lose something.
    """
    config = info["config"]
    checked = {
        f"subjects must be {subject}": config.get("subjects") == [subject],
        "retention must be limits": config.get("retention") == "limits",
        "storage must be file": config.get("storage") == "file",
        "persist_mode must be default": config.get("persist_mode", "default") in ("", "default"),
        "allow_direct must be on": config.get("allow_direct") is True,
        "allow_rollup_hdrs must be off": not config.get("allow_rollup_hdrs"),
        "allow_msg_ttl must be off": not config.get("allow_msg_ttl"),
        "max_age must be unlimited": (config.get("max_age") or 0) <= 0,
        "max_msgs must be unlimited": (config.get("max_msgs") or 0) <= 0,
        "it must not be a mirror, have sources or transform subjects": not (
            config.get("mirror") or config.get("sources") or config.get("subject_transform")
        ),
        "it must not be sealed": not config.get("sealed"),
        f"num_replicas must be at least {replicas}": config.get("num_replicas", 1) >= replicas,
        **demands,
    }
    problems = [demand for demand, is_met in checked.items() if not is_met]
    if problems:
        raise InvalidRequest(
            f"Stream {name} exists, but can't hold {content}: {'; '.join(problems)}. Change it with nats "
            "stream edit, or name another one."
        )


def check_leader(name: str, info: Mapping[str, Any]) -> None:
    """Raise Unavailable when a stream has no leader."""
    if not (info.get("cluster") or {}).get("leader"):
        raise Unavailable(f"Stream {name} has no leader; check that most of its servers run.")


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
