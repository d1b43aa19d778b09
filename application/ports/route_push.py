"""Port: pushing changes of routes to proxies (RFC-049 Routing Table Distribution)."""

from typing import NamedTuple, Protocol

from postroom.domain.lease.routing import Route


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

    async def push(self, address: str, change: RouteChange) -> None:
        """Tell the proxy at an address of a change.

        Raises: PostroomError, or TimeoutError, when it is unknown whether the proxy has it.
        """

    async def forget(self, address: str) -> None:
        """Close the connection to a proxy that is gone."""
