"""Port: pushing changes of routes to proxies (RFC-049 Routing Table Distribution)."""

import re
from typing import NamedTuple, Protocol

from postroom.domain.errors import InvalidRequest
from postroom.domain.lease.routing import Route

_PUSH_KEY = re.compile(r"[A-Za-z0-9_-]{0,64}")


def check_push_key(key: object) -> str:
    """Return the key of a proxy; raise InvalidRequest unless it has up to 64 letters, digits, `_` or `-`."""
    if not isinstance(key, str) or not _PUSH_KEY.fullmatch(key):
        raise InvalidRequest("push_key must have up to 64 letters, digits, _ or -.")
    return key


class RouteChange(NamedTuple):
    """A change of the route of a mailbox.

    Arguments:
        position: of the lease event that made it; proxies ignore a change that is older than what they have.
        route: None if the mailbox has none any more.
    """

    mailbox: str
    position: int
    route: Route | None


class RoutePush(Protocol):
    """Calls of the proxies' routing tables."""

    async def push(self, address: str, change: RouteChange, key: str) -> None:
        """Tell the proxy at an address of a change.

        Arguments:
            key: that the proxy named when it registered, by which it knows its admins.

        Raises: PostroomError, or TimeoutError, when it is unknown whether the proxy has it.
        """

    async def forget(self, address: str) -> None:
        """Close the connection to a proxy that is gone."""
