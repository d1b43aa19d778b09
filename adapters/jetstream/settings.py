"""Settings of the streams on JetStream, importable without its client: of leases, and of a store's logs."""

import re
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

import msgspec

from postroom.adapters.nats.settings import NatsSettings
from postroom.application.ingest.broker_access import NatsAccess, without_secrets
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
        _check_stream(self)
        check_type("assume_sync_always", self.assume_sync_always, bool)
        check_int("events_per_aggregate", self.events_per_aggregate, MIN_EVENTS_PER_AGGREGATE)
        check_int("timeout_ms", self.timeout_ms, 1)


DEFAULT_PORT = 4222
_ACCESS = tuple(name for name in NatsAccess.__struct_fields__ if name != "tls_first")
_OPTIONS = ("replicas", "monitoring", "sync", *_ACCESS)


class LogStreamSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The stream of a store's logs; arguments as of `LeaseStreamSettings`.

    Another stream, whose name ends with `_STATE`, has what is not appended: owners, snapshots and the index.

    Raises: InvalidRequest for a value of another type or out of bounds.
    """

    nats: NatsSettings
    stream: str
    replicas: int | None = None
    monitoring: tuple[str, ...] = ()
    assume_sync_always: bool = False

    def __post_init__(self) -> None:
        _check_stream(self)

    @property
    def state_stream(self) -> str:
        """Return the name of the stream with what is not appended."""
        return f"{self.stream}_STATE"

    @property
    def where(self) -> str:
        """Return the address without secrets and options, for messages."""
        hosts = (url.partition("://")[2] for url in self.nats.shown_url.split(","))
        return f"nats://{','.join(hosts)}/{self.stream}"


def parse_store_url(url: str) -> LogStreamSettings:
    """Return the settings in the address of a store, `nats://HOST,HOST,HOST/NAME?OPTION=VALUE`.

    The options are `replicas`; `monitoring`, addresses separated by commas; `sync=always`, the operator's
    statement; and the access to NATS, such as `credentials` and `ca`.

    Raises: InvalidRequest for a malformed address or an unknown option.
    """
    shown = without_secrets(url)
    try:
        parts = urlsplit(url.replace(",nats://", ","))
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        urls = [_server(parts, host) for host in parts.netloc.rpartition("@")[2].split(",")]
    except ValueError:
        raise _malformed(shown) from None
    name = parts.path.removeprefix("/")
    if not name or parts.fragment:
        raise _malformed(shown)
    if unknown := sorted(set(options) - set(_OPTIONS)):
        raise InvalidRequest(
            f"The store {shown} has the unknown option {unknown[0]}; known are {', '.join(_OPTIONS)}."
        )
    if options.get("sync", "always") != "always":
        raise InvalidRequest(f"The option sync of the store {shown} can only be always; leave it out.")
    replicas = options.get("replicas")
    if replicas is not None and not replicas.isdecimal():
        raise InvalidRequest(f"The option replicas of the store {shown} must be a number.")
    access: dict[str, Any] = {name: options[name] for name in _ACCESS if name in options}
    return LogStreamSettings(
        nats=NatsSettings(",".join(urls), **access),
        stream=name,
        replicas=None if replicas is None else int(replicas),
        monitoring=tuple(filter(None, options.get("monitoring", "").split(","))),
        assume_sync_always="sync" in options,
    )


def _server(parts: SplitResult, host: str) -> str:
    """Return the URL of one of the servers; raise ValueError for a malformed one."""
    user, at, _ = parts.netloc.rpartition("@")
    server = urlsplit(f"nats://{host}")
    if not server.hostname:
        raise ValueError(host)
    name = f"[{server.hostname}]" if ":" in server.hostname else server.hostname
    return f"nats://{user}{at}{name}:{server.port or DEFAULT_PORT}"


def _malformed(shown: str) -> InvalidRequest:
    return InvalidRequest(
        f"{shown!r} is not the address of a store; expected nats://HOST:PORT,HOST:PORT/NAME."
    )


def _check_stream(settings: LeaseStreamSettings | LogStreamSettings) -> None:
    """Check what the settings of streams have in common; raise InvalidRequest."""
    if _NAME.fullmatch(check_type("stream", settings.stream, str)) is None:
        raise InvalidRequest(
            f"{settings.stream!r} is not a name of a stream; use 1 to 64 letters, digits, '_' and '-'."
        )
    if settings.replicas is not None:
        check_int("replicas", settings.replicas, 1, MAX_REPLICAS)
    for url in check_type("monitoring", settings.monitoring, tuple):
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
