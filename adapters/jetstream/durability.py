"""Whether NATS servers sync every write before they acknowledge it, which clients can't see (ADR 0059)."""

import urllib.request
from collections.abc import Collection, Iterable
from typing import Any
from urllib.error import URLError

import msgspec

from postroom.application.telemetry import logger
from postroom.domain.errors import InvalidRequest, Unavailable

_SECONDS = 3.0
_MAX_BYTES = 1 << 20


def verify_sync(
    servers: Collection[str],
    monitoring: Iterable[str],
    *,
    assume_sync_always: bool,
    content: str = "leases",
) -> None:
    """Return if servers sync every write, by their monitoring or else by the operator's statement.

    While the monitoring of some does not answer, it is enough that most servers are verified.

    Arguments:
        servers: names of those that have a replica of the stream.
        monitoring: HTTP addresses of the monitoring of all servers.
        content: of the stream, for messages.

    Raises:
        InvalidRequest: a server does not sync every write, or nothing is known about one.
        Unavailable: the monitoring of too many servers does not answer.
    """
    addresses = list(monitoring)
    if not addresses:
        if not assume_sync_always:
            raise InvalidRequest(
                "It can't be verified that the NATS servers sync every write before they acknowledge it; if "
                f"they don't, a power failure loses {content}. Name the monitoring address of each server, "
                "or state that each has sync_interval: always."
            )
        logger().warning(f"{content}.sync_assumed", servers=sorted(servers))
        return
    unknown = set(servers)
    failures: list[Unavailable] = []
    for address in addresses:
        try:
            name, is_synced = _sync_of(address)
        except Unavailable as error:
            failures.append(error)
            continue
        if not is_synced:
            raise InvalidRequest(
                f"NATS server {name} acknowledges writes that a power failure can lose; set sync_interval: "
                "always in the section jetstream of its configuration, and restart it."
            )
        unknown.discard(name)
    if failures and 2 * len(unknown) >= len(servers):
        raise failures[0]
    for failure in failures:
        logger().warning(f"{content}.sync_not_verified", error=str(failure))
    if len(unknown) > len(failures):
        raise InvalidRequest(
            f"Nothing is known about how NATS server {', '.join(sorted(unknown))} syncs writes; name the "
            "monitoring address of each server that has a replica of the stream."
        )


def _sync_of(address: str) -> tuple[str, bool]:
    url = f"{address.rstrip('/')}/varz"
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
            values: dict[str, Any] = msgspec.json.decode(answer.read(_MAX_BYTES), type=dict[str, Any])
        config = values["jetstream"]["config"]
        return str(values["server_name"]), config.get("sync_always") is True
    except (URLError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unavailable(
            f"The monitoring of a NATS server at {address} can't be read: "
            f"{str(error) or type(error).__name__}; check the address, and that the server runs with "
            "JetStream and http_port."
        ) from error
