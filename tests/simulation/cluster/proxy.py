"""A proxy: it keeps the table of routes by pushes, and repairs it by registering."""

from typing import Any

from postroom.domain.lease.routing import Route, RoutingTable
from tests.simulation.cluster.world import MS, Process, World

INTERVAL = 250 * MS


class Proxy(Process):
    """A process that knows the routes.

    Attributes:
        table: the routes as far as it was told.
    """

    def __init__(self, world: World, name: str, rate: int, admins: list[Any]) -> None:
        super().__init__(world, name, rate)
        self.table = RoutingTable()
        self._admins = admins
        self._newest: dict[str, int] = {}
        self._admin = 0
        self._is_answered = True

    def started(self) -> None:
        """Begin without a route."""
        self.table = RoutingTable()
        self._newest = {}
        self._is_answered = True
        self._register()

    def update(self, route: Route) -> None:
        """Take a route that an admin pushed."""
        self._newest[route.mailbox] = max(self._newest.get(route.mailbox, 0), route.position)
        self.table.update(route)
        self._check(route.mailbox)

    def remove(self, mailbox: str, position: int) -> None:
        """Take a removal that an admin pushed."""
        self._newest[mailbox] = max(self._newest.get(mailbox, 0), position + 1)
        self.table.remove(mailbox, position)
        self._check(mailbox)

    def registered(self, position: int, routes: list[Route] | None) -> None:
        """Take the whole table of an admin."""
        self._is_answered = True
        if routes is not None:
            self.table.replace_all(position, routes)
        for mailbox in self._newest:
            self._check(mailbox)
        for route in routes or ():
            self._newest[route.mailbox] = max(self._newest.get(route.mailbox, 0), route.position)

    def _register(self) -> None:
        if not self._is_answered:
            self._admin = self.world.random.randrange(len(self._admins))
        self._is_answered = False
        admin = self._admins[self._admin]
        self.world.network.send(self.name, admin, admin.register_proxy, self, self.table.position)
        self.after(INTERVAL, self._register)

    def _check(self, mailbox: str) -> None:
        route = self.table.get(mailbox)
        newest = self._newest[mailbox]
        self.world.require(
            route is None or route.position >= newest,
            "routes never go back in position",
            self.name,
            route,
            f"it was told of position {newest}",
        )
