"""An admin: it decides on leases by the product's rules, follows their log, and pushes routes."""

from collections.abc import Callable
from typing import Any

from postroom.application.leases.lease_table import LeaseTable
from postroom.application.leases.leases import LoggedEvent
from postroom.domain.errors import LeaseHeld, LeaseLost
from postroom.domain.lease.lease import (
    ExpireLease,
    Lease,
    LeaseCommand,
    decide,
    evolve,
)
from postroom.domain.lease.routing import Route
from tests.simulation.cluster.storage import UNKNOWN, WRITTEN, LeaseLog
from tests.simulation.cluster.world import MS, Process, World

POLL = 100 * MS
MAX_TRIES = 4
NOBODY_KNOWS = ""
"""The reason of an answer without a lease that is no refusal."""

Reply = Callable[[Lease | None, str], None]


class Admin(Process):
    """A process of the control plane.

    Attributes:
        table: its fold of the log as far as it followed.
    """

    def __init__(self, world: World, name: str, rate: int, log: LeaseLog) -> None:
        super().__init__(world, name, rate)
        self.table = LeaseTable(self.uptime)
        self._log = log

    def started(self) -> None:
        """Follow the log from its start: an admin keeps nothing else on a disk."""
        self.table = LeaseTable(self.uptime)
        self._proxies: dict[str, Any] = {}
        self._expiring: set[str] = set()
        self._tick()

    # -- what runners and proxies ask for ---

    def handle(self, runner: Any, command: LeaseCommand, sent: Any) -> None:
        """Decide on a command of a runner, and answer with its lease or the reason why it has none."""

        def reply(lease: Lease | None, reason: str) -> None:
            if reason:
                self._log.promises.check_refused(command, self._log.leases.get(command.mailbox))
            self.world.network.send(self.name, runner, runner.answered, command.mailbox, sent, lease, reason)

        self._decide(command, reply, 1)

    def register_proxy(self, proxy: Any, position: int) -> None:
        """Push routes to a proxy from now on, and answer with the whole table unless it has it."""
        self._proxies[proxy.name] = proxy
        self._follow()
        table = self.table.routes
        routes = None if position == table.position else table.routes()
        self.world.network.send(self.name, proxy, proxy.registered, table.position, routes)

    # -- leases ---

    def _decide(self, command: LeaseCommand, reply: Reply, tried: int) -> None:
        """Decide and write, and again after a conflict or in doubt; `tried` counts the writes."""
        lease = self._log.leases.get(command.mailbox)
        is_expired = lease is not None and self.table.is_expired(lease)
        try:
            events = decide(command, lease, self.wall(), is_expired=is_expired)
        except (LeaseHeld, LeaseLost) as error:
            reply(None, str(error))
            return
        if not events:
            reply(lease, "")
            return

        def written(outcome: str) -> None:
            if outcome == WRITTEN or (outcome == UNKNOWN and self._log.has(events[0])):
                reply(evolve(lease, events[-1]), "")
            elif tried < MAX_TRIES:
                self._decide(command, reply, tried + 1)
            else:
                reply(None, NOBODY_KNOWS)

        version = 0 if lease is None else lease.version
        self._log.write(command.mailbox, version, events, self.bound(written))

    def _tick(self) -> None:
        self._follow()
        for lease in self.table.expired_leases():
            if lease.mailbox not in self._expiring:
                self._expiring.add(lease.mailbox)
                self._decide(ExpireLease(lease.mailbox, lease.version), self._expired(lease.mailbox), 1)
        self.after(POLL, self._tick)

    def _expired(self, mailbox: str) -> Reply:
        return lambda lease, reason: self._expiring.discard(mailbox)

    def _follow(self) -> None:
        position = self.table.position
        events = self._log.events[position:]
        for change in self.table.apply([LoggedEvent(position + n, each) for n, each in enumerate(events, 1)]):
            if isinstance(change, Route):
                self._push("update", change)
            else:
                self._push("remove", change.mailbox, change.position)

    def _push(self, method: str, *args: Any) -> None:
        for proxy in self._proxies.values():
            self.world.network.send(self.name, proxy, getattr(proxy, method), *args)
