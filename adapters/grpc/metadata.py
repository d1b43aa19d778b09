"""Metadata that Postroom adds to gRPC calls; other implementations ignore it."""

from collections.abc import Iterable, Mapping
from urllib.parse import quote, unquote

from postroom.domain.arguments import MAX_INT
from postroom.domain.errors import InvalidRequest

MAILBOX_KEY = "postroom-mailbox"
"""Of a call of `postroom.v1`: the mailbox; without it, the only one of the server."""
FORWARDED_KEY = "postroom-forwarded"
"""Of a call that a proxy forwarded: `1`."""
EPOCH_KEY = "postroom-epoch"
"""Of heartbeats and releases, and of the answers to acquisitions and heartbeats: the epoch of the lease."""
ACQUISITION_KEY = "postroom-acquisition"
"""Of an acquisition: a UUID of the attempt."""
LOG_EPOCH_KEY = "postroom-log-epoch"
"""Of an acquisition: the epoch of the last record of the mailbox's log."""
POSITION_KEY = "postroom-position"
"""Of a route that is pushed: the position of the lease event that made it."""
PUSH_KEY = "postroom-push-key"
"""Of a route that is pushed: the key that the proxy gave the admin at which it is registered."""
TTL_KEY = "postroom-ttl-ms"
"""Of the answers to acquisitions and heartbeats: the TTL that was granted."""
INTERVAL_KEY = "postroom-heartbeat-interval-ms"
"""Of the answers to acquisitions and heartbeats: the interval at which to renew the lease."""
MEMBERS_KEY = "postroom-members"
"""Of a call of `postroom.v1` by a client of a namespace: how many mailboxes of the namespace it knows."""
RUNNER_KEY = "postroom-runner"
"""Of the answer to an acquisition that was refused: the runner that has the lease."""

_SAFE = "".join(map(chr, range(0x21, 0x7F))).replace("%", "")
MAX_DIGITS = 19


def write_text(text: str) -> str:
    """Return text as a value of metadata, which has visible ASCII characters only: others are %-encoded."""
    return quote(text, safe=_SAFE)


def read_text(value: str) -> str:
    """Return the text of a value that `write_text` wrote."""
    return unquote(value, errors="replace")


def read_metadata(pairs: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """Return the textual metadata of a call by key; of several values of a key, the last one."""
    return {key: value for key, value in pairs or () if type(value) is str}


def read_number(metadata: Mapping[str, str], key: str) -> int | None:
    """Return a number of the metadata; None if it has none.

    Raises: InvalidRequest unless it is a decimal number from 0 to 2^63 - 1.
    """
    value = metadata.get(key)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= MAX_DIGITS and int(value) <= MAX_INT):
        raise InvalidRequest(f"The metadata {key} must be a number from 0 to {MAX_INT}.")
    return int(value)
