"""What fails in a cluster: processes and servers that are killed, paused, cut off, or lose their disk."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from postroom.adapters.compose.queries import read_mailbox
from postroom.adapters.system.clock import SystemClock
from postroom.domain.errors import PostroomError
from postroom.domain.mailbox.events import OwnershipTaken
from postroom.domain.names import mailbox_stream
from tests.linearizability.network import cut_off, dropped, remote_ports
from tests.linearizability.node import LEASE
from tests.support.servers.nats_cluster import ClusterServer, NatsCluster

if TYPE_CHECKING:
    from tests.linearizability.cluster import Cluster, Node

FAULT_SECONDS = 1.5
PAUSE_SECONDS = (LEASE.ttl_ms + LEASE.grace_period_ms) / 1_000 + 1.5
"""Beyond the end of a lease."""
WRITE_SECONDS = 0.2
"""Until a client has sent something, and its write is on its way to the server."""
LOGS, LEASES = "MESSAGES", "POSTROOM_LEASES"
"""The streams of the logs and of the leases, whose leaders fail."""
OF_RUNNERS = ("kill_runner", "pause_runner", "pause_admin")
OF_NETWORK = ("cut_off_runner", "cut_off_admin")
OF_CLIENTS = ("kill_clients", "pause_clients")
OF_SERVERS = (
    *("kill_leader", "kill_follower", "pause_leader", "pause_follower"),
    *("lose_quorum", "pause_quorum", "lose_host", "write_late"),
)
OF_NETWORK_OF_SERVERS = ("cut_off_leader", "cut_off_follower", "cut_off_owner", "cut_off_clients")


class Fault(NamedTuple):
    """A fault that happened.

    Arguments:
        name: of the method of `Faults`.
        uptime, at: when it began: time since the machine started, in µs, and its monotonic clock, in ns.
        mailbox: the mailbox that lost its owner by it; empty if none did, or might not have.
    """

    name: str
    uptime: int
    at: int
    mailbox: str


class Faults:
    """What may fail in a cluster; each method lets one thing fail, and heals it.

    Arguments:
        has_network: whether the network of this process is its own, so that parts of it can be cut off.
    """

    def __init__(self, cluster: "Cluster", random: Random, *, has_network: bool) -> None:
        self._cluster = cluster
        self._random = random
        self._clock = SystemClock()
        self._name = ""
        self.done: list[Fault] = []
        names = [*OF_RUNNERS, *OF_CLIENTS]
        if cluster.can_kill_admins:
            names.append("kill_admin")
        if cluster.nats is not None:
            names += OF_SERVERS
        if has_network:
            names += OF_NETWORK
            if cluster.nats is not None:
                names += OF_NETWORK_OF_SERVERS
        self.names = tuple(names)

    def fail(self, name: str = "") -> None:
        """Let one thing fail, and heal it.

        Arguments:
            name: of a method; empty chooses one by chance.
        """
        self._name = name or self._random.choice(self.names)
        getattr(self, self._name)()

    def _begin(self, mailbox: str = "") -> None:
        self.done.append(Fault(self._name, self._clock.uptime(), time.monotonic_ns(), mailbox))

    # -- runners, admins and clients ---

    def kill_runner(self) -> None:
        """Kill an owner, and start it again when another one has its mailbox."""
        self._kill_owner()

    def pause_runner(self) -> None:
        """Pause an owner until another one may have its mailbox."""
        mailbox, owner = self._owner()
        with self._paused(owner):
            self._begin(mailbox)
            time.sleep(PAUSE_SECONDS)

    def kill_admin(self) -> None:
        self._begin()
        self._random.choice(self._cluster.admins).restart()

    def pause_admin(self) -> None:
        with self._paused(self._random.choice(self._cluster.admins)):
            self._begin()
            time.sleep(PAUSE_SECONDS)

    def kill_clients(self) -> None:
        self._begin()
        self._cluster.clients.restart()

    def pause_clients(self) -> None:
        with self._paused(self._cluster.clients):
            self._begin()
            time.sleep(PAUSE_SECONDS)

    def cut_off_runner(self) -> None:
        """Drop the packets between an owner and all admins."""
        mailbox, owner = self._owner()
        network = f"{network_of(self._cluster.runners.index(owner))}.0/24"
        with dropped(f"ip daddr {network}", f"ip saddr {network}"):
            self._begin(mailbox)
            time.sleep(PAUSE_SECONDS)

    def cut_off_admin(self) -> None:
        """Drop the packets between an admin and all runners."""
        port = self._random.choice(self._cluster.admins).port
        with dropped(f"tcp dport {port}", f"tcp sport {port}"):
            self._begin()
            time.sleep(PAUSE_SECONDS)

    # -- servers of the store ---

    def kill_leader(self) -> None:
        self._kill(self._leader_of(self._random.choice((LOGS, LEASES))))

    def kill_follower(self) -> None:
        self._kill(self._follower())

    def pause_leader(self) -> None:
        self._pause(self._leader_of(self._random.choice((LOGS, LEASES))))

    def pause_follower(self) -> None:
        self._pause(self._follower())

    def lose_quorum(self) -> None:
        """Kill the leader and another server."""
        self._kill(self._leader(), self._follower())

    def pause_quorum(self) -> None:
        """Pause the leader and another server: nobody knows what became of the writes meanwhile."""
        self._pause(self._leader(), self._follower())

    def lose_host(self) -> None:
        """Kill an owner and the leader of its log at once, and delete the disk of that server.

        A new server with an empty disk takes its place.
        """
        leader = self._leader()
        self._kill_owner(leader)
        self._nats.replace_disk(leader, LOGS)

    def write_late(self) -> None:
        """Have writes of a paused owner arrive after a take-over, and wake it then.

        They wait at a server that is paused, too: the one that the owner is connected to, but not the leader.
        """
        mailbox, owner = self._owner()
        ports = remote_ports(owner.process.pid)
        server = next(each for each in self._nats.servers if each.port in ports)
        while self._leader() is server:
            self._nats.step_down(LOGS)
        epoch = self._cluster.epoch(mailbox)
        server.pause()
        time.sleep(WRITE_SECONDS)
        with self._paused(owner):
            self._begin(mailbox)
            try:
                self._cluster.wait_until(lambda: self._cluster.epoch(mailbox) > epoch)
            finally:
                self._nats.heal()

    def cut_off_leader(self) -> None:
        """Drop all packets of the leader until another server leads."""
        leader = self._leader()
        with cut_off(leader.pid, leader.group):
            self._begin()
            self._cluster.wait_until(lambda: self._nats.leader(LOGS) is not leader)
            time.sleep(FAULT_SECONDS)
        self._nats.wait_until_ready()

    def cut_off_follower(self) -> None:
        """Drop all packets of a server that does not lead."""
        follower = self._follower()
        with cut_off(follower.pid, follower.group):
            self._begin()
            time.sleep(PAUSE_SECONDS)
        self._nats.wait_until_ready()

    def cut_off_owner(self) -> None:
        """Drop the packets between an owner, which its lease stays with, and the servers of the store."""
        _, owner = self._owner()
        ports = [server.port for server in self._nats.servers]
        with cut_off(owner.process.pid, owner.settings.group, ports):
            self._begin()
            time.sleep(PAUSE_SECONDS)

    def cut_off_clients(self) -> None:
        clients = self._cluster.clients
        with cut_off(clients.process.pid, clients.settings.group):
            self._begin()
            time.sleep(FAULT_SECONDS)

    # -- what they have in common ---

    @property
    def _nats(self) -> NatsCluster:
        assert self._cluster.nats is not None
        return self._cluster.nats

    def _leader(self) -> ClusterServer:
        return self._leader_of(LOGS)

    def _leader_of(self, stream: str) -> ClusterServer:
        return self._nats.leader(stream)

    def _follower(self) -> ClusterServer:
        leader = self._leader()
        return self._random.choice([each for each in self._nats.servers if each is not leader])

    def _kill(self, *servers: ClusterServer) -> None:
        self._begin()
        for server in servers:
            server.kill()
        time.sleep(FAULT_SECONDS)
        self._nats.heal()

    def _pause(self, *servers: ClusterServer) -> None:
        self._begin()
        for server in servers:
            server.pause()
        time.sleep(PAUSE_SECONDS)
        self._nats.heal()

    def _owner(self) -> "tuple[str, Node]":
        """Return a mailbox and the runner that owns it."""
        mailbox = self._random.choice(self._cluster.mailboxes)
        name = self._cluster.owner(mailbox)
        return mailbox, next(each for each in self._cluster.runners if each.settings.name == name)

    def _kill_owner(self, *servers: ClusterServer) -> None:
        """Kill an owner, and servers; start the owner again when another one has its mailbox."""
        mailbox, owner = self._owner()
        epoch = self._cluster.epoch(mailbox)
        self._begin(mailbox)
        for server in servers:
            server.kill()
        owner.process.kill()
        self._cluster.wait_until(lambda: self._cluster.epoch(mailbox) > epoch)
        owner.start()

    @contextmanager
    def _paused(self, node: "Node") -> Iterator[None]:
        node.process.pause()
        try:
            yield
        finally:
            node.process.resume()


def network_of(runner: int) -> str:
    """Return the beginning of the addresses at which a runner reaches the admins."""
    return f"127.0.{10 + runner}"


def last_take_over(store: str, mailbox: str) -> OwnershipTaken | None:
    """Return the newest record of an owner in a log; None while it can't be read."""
    try:
        with read_mailbox(store, mailbox) as reader:
            for record in reversed(reader.log.read_stream(mailbox_stream(mailbox))):
                if isinstance(record.event, OwnershipTaken):
                    return record.event
    except PostroomError:
        pass
    return None
