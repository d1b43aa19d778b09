"""Routes to the runners of mailboxes, and the table of them (RFC-049 Routing Coordination)."""

from collections.abc import Iterable, Mapping

import msgspec

from postroom.domain.lease.lease import Lease


class Route(msgspec.Struct, frozen=True):
    """Where the owner of a mailbox is.

    Arguments:
        address: gRPC address of the runner, `host:port` or `unix:/path`.
        position: of the event that made the route in the log of leases; a greater one is newer.
        epoch: of the lease.
    """

    mailbox: str
    proxy: str
    runner: str
    address: str
    partition: int
    position: int
    epoch: int


class RoutingTable:
    """The routes of all mailboxes, whose updates may arrive late, repeatedly and in any order.

    Attributes:
        position: in the log of leases, up to which the table is complete; 0 before it ever was. An update
            alone does not raise it, since one before it may have been lost.
    """

    def __init__(self) -> None:
        self.position = 0
        self._routes: dict[str, Route] = {}
        self._removals: dict[str, int] = {}

    def update(self, route: Route) -> bool:
        """Add a route or replace an older one; return whether the table changed.

        A newer position of the same lease, such as that of a renewal, changes nothing.
        """
        if route.position <= max(self.position, self._removals.get(route.mailbox, 0)):
            return False
        current = self._routes.get(route.mailbox)
        if current is not None and (
            route.position <= current.position
            or msgspec.structs.replace(current, position=route.position) == route
        ):
            return False
        self._routes[route.mailbox] = route
        return True

    def remove(self, mailbox: str, position: int) -> bool:
        """Remove the route of a mailbox unless it is newer than `position`; return whether there was one."""
        current = self._routes.get(mailbox)
        if current is not None and current.position > position:
            return False
        if position > self.position:  # an update from before the removal may still arrive
            self._removals[mailbox] = max(position, self._removals.get(mailbox, 0))
        return self._routes.pop(mailbox, None) is not None

    def replace_all(self, position: int, routes: Iterable[Route]) -> bool:
        """Replace the whole table by that of `position`, except for newer updates and removals.

        Returns: whether it was replaced; a table older than the current one is ignored.
        """
        if position < self.position:
            return False
        newer = {mailbox: route for mailbox, route in self._routes.items() if route.position > position}
        self._removals = {mailbox: at for mailbox, at in self._removals.items() if at > position}
        self._routes = {
            route.mailbox: route for route in routes if route.mailbox not in self._removals
        } | newer
        self.position = position
        return True

    def find_unconfirmed(self) -> dict[str, int]:
        """Return the positions of updates and removals after that of the table, by mailbox."""
        updates = {name: route.position for name, route in self._routes.items()}
        return {name: at for name, at in (self._removals | updates).items() if at > self.position}

    def discard(self, changes: Mapping[str, int], last: int) -> int:
        """Discard changes that are later than the end of the log, and expect the whole table again.

        Arguments:
            changes: positions by mailbox.
            last: position of the end of the log after these changes had been made.

        Returns: the number of changes that were discarded.
        """
        unknown = {name: at for name, at in changes.items() if at > last}
        for name, at in unknown.items():
            if name in self._routes and self._routes[name].position == at:
                del self._routes[name]
            if self._removals.get(name) == at:
                del self._removals[name]
        if unknown:
            self.position = 0
        return len(unknown)

    def complete(self, position: int) -> None:
        """Note that the table contains all changes up to `position`, as in a fold of the log in order."""
        if position > self.position:
            self.position = position
            self._removals = {mailbox: at for mailbox, at in self._removals.items() if at > position}

    def get(self, mailbox: str) -> Route | None:
        """Return the route of a mailbox, or None."""
        return self._routes.get(mailbox)

    def routes(self, namespace: str | None = None) -> list[Route]:
        """Return the routes by mailbox, of all namespaces or of one."""
        routes = sorted(self._routes.values(), key=lambda route: route.mailbox)
        if namespace is None:
            return routes
        return [route for route in routes if route.mailbox.partition("@")[0] == namespace]


def route_of(lease: Lease, position: int) -> Route:
    """Return the route to the holder of a lease, of which an event is at `position` of the log."""
    return Route(
        lease.mailbox, lease.proxy, lease.runner, lease.address, lease.partition, position, lease.epoch
    )
