"""Settings of the lease store on JetStream, importable without its client."""

import re
from urllib.parse import urlsplit

import msgspec

from postroom.adapters.nats.settings import NatsSettings
from postroom.domain.arguments import check_int, check_type
from postroom.domain.errors import InvalidRequest

DEFAULT_STREAM = "POSTROOM_LEASES"
MIN_EVENTS_PER_AGGREGATE = EVENTS_PER_AGGREGATE = 2
"""Events of an aggregate that the stream keeps: the last one, which is enough for a fold, and the one before
it, with which a write is compared whose outcome is unknown."""
TIMEOUT_MS = 5_000
MAX_REPLICAS = 5
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class LeaseStreamSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The stream of leases, and how its durability is known.

    Arguments:
        nats: address of the servers, and access to them.
        stream: name of the stream, which is created if it is missing.
        replicas: of the stream; None is 3 in a cluster, and 1 on a server that is alone.
        monitoring: HTTP addresses of the monitoring of all servers; it is checked there that they sync every
            write before they acknowledge it.
        assume_sync_always: the operator's statement that they do, where their monitoring can't be reached.
        events_per_aggregate: how many events the stream keeps of each aggregate, if it is created.
        timeout_ms: after which a call fails.

    Raises: InvalidRequest for a value of another type or out of bounds.
    """

    nats: NatsSettings
    stream: str = DEFAULT_STREAM
    replicas: int | None = None
    monitoring: tuple[str, ...] = ()
    assume_sync_always: bool = False
    events_per_aggregate: int = EVENTS_PER_AGGREGATE
    timeout_ms: int = TIMEOUT_MS

    def __post_init__(self) -> None:
        check_type("nats", self.nats, NatsSettings)
        if _NAME.fullmatch(check_type("stream", self.stream, str)) is None:
            raise InvalidRequest(
                f"{self.stream!r} is not a name of a stream; use 1 to 64 letters, digits, '_' and '-'."
            )
        if self.replicas is not None:
            check_int("replicas", self.replicas, 1, MAX_REPLICAS)
        check_type("assume_sync_always", self.assume_sync_always, bool)
        check_int("events_per_aggregate", self.events_per_aggregate, MIN_EVENTS_PER_AGGREGATE)
        check_int("timeout_ms", self.timeout_ms, 1)
        for url in check_type("monitoring", self.monitoring, tuple):
            if not _is_http(check_type("monitoring", url, str)):
                raise InvalidRequest(
                    f"{url!r} is not the address of a NATS server's monitoring; write http://host:8222."
                )


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)
