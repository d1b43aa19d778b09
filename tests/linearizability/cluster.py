"""A cluster of processes that are killed, paused and cut off, and the check of what they promised."""

import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec

from postroom.adapters.compose.queries import read_mailbox
from postroom.adapters.postgres.migrate import migrate
from tests.linearizability.checker import check_each
from tests.linearizability.clients import Clients
from tests.linearizability.history import read_histories
from tests.linearizability.models import lease_model, message_model
from tests.linearizability.node import LEASE, Settings
from tests.linearizability.outcomes import message_histories, read_outcome
from tests.support.servers.nats_cluster import NatsCluster
from tests.support.servers.postgres import PostgresServer, postgres_folder
from tests.support.servers.process import LOOPBACK, ServerProcess, free_port, listens
from tests.support.waiting import wait_until

STORES = ("memory", "sqlite", "postgres", "jetstream")
MAILBOXES = ("orders@p", "parcels@p")
RUNNERS, ADMINS = 3, 2
FAULT_SECONDS = 1.5
PAUSE_SECONDS = (LEASE.ttl_ms + LEASE.grace_period_ms) / 1_000 + 1.5
"""Beyond the end of a lease."""
STREAM = "POSTROOM_LEASES"
_RULES = "table inet faults {{\n chain output {{\n type filter hook output priority 0;\n {rules}\n }}\n}}\n"


class Figures(NamedTuple):
    """What a run was."""

    operations: int
    answers: int
    epochs: int
    faults: Counter[str]

    def __str__(self) -> str:
        faults = ", ".join(f"{count} times {name}" for name, count in sorted(self.faults.items()))
        return (
            f"{self.operations:,} operations are linearizable, {self.answers:,} sends and acks answered, "
            f"{self.epochs} epochs; {faults or 'no faults'}"
        )


class Node:
    """A process of the cluster."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self._folder = folder
        self._starts = 0
        self._port = int(settings.listen.rpartition(":")[2])
        self._process: ServerProcess | None = None

    def start(self) -> None:
        self._starts += 1
        settings = self.settings
        if settings.journal:  # a process that was killed may have left half a line
            settings = msgspec.structs.replace(settings, journal=f"{settings.journal}-{self._starts}.journal")
        command = [sys.executable, "-m", "tests.linearizability.node", msgspec.json.encode(settings).decode()]
        self._process = ServerProcess(settings.name, command, self._folder / f"{settings.name}.log")
        self._process.start(lambda: listens(self._port))

    @property
    def process(self) -> ServerProcess:
        assert self._process is not None
        return self._process

    def restart(self) -> None:
        self.process.kill()
        self.start()


class Cluster:
    """Admins and runners over one lease store.

    Arguments:
        store: one of `STORES`; the memory of one admin, which is never killed.
        is_cut_off: whether the network of this process is its own, so that parts of it can be cut off.
        size, seed: see `run`.
    """

    def __init__(
        self, store: str, folder: Path, opened: ExitStack, *, is_cut_off: bool, size: int, seed: int
    ) -> None:
        self.random = Random(f"{store} {seed}")
        self.nats: NatsCluster | None = None
        self.store = str(folder / "messages.db")
        self._has_network = is_cut_off
        monitoring: tuple[str, ...] = ()
        leases = {"memory": "memory:", "sqlite": str(folder / "leases.db")}.get(store, "")
        if store == "postgres":
            server = opened.enter_context(PostgresServer(opened.enter_context(postgres_folder())))
            leases = self.store = server.create_database()
            for set_ in ("store", "leases"):
                migrate(leases, set_)
        elif store == "jetstream":
            self.nats = opened.enter_context(NatsCluster(folder / "nats"))
            leases, monitoring = self.nats.url, tuple(self.nats.monitoring.split(","))
        host = "0.0.0.0" if is_cut_off else LOOPBACK
        self.admins = [
            Node(
                Settings(
                    name=f"admin-{number}",
                    listen=f"{host}:{free_port()}",
                    leases=leases,
                    monitoring=monitoring,
                ),
                folder,
            )
            for number in range(1 if store == "memory" else min(ADMINS, size))
        ]
        self.runners = [
            Node(
                Settings(
                    name=f"runner-{number}",
                    listen=f"{LOOPBACK}:{free_port()}",
                    admins=tuple(self._admin_address(number, each) for each in self.admins),
                    store=self.store,
                    mailboxes=MAILBOXES,
                    journal=str(folder / f"runner-{number}"),
                ),
                folder,
            )
            for number in range(min(RUNNERS, size))
        ]
        self.faults: Counter[str] = Counter()
        self._can_kill_admins = store != "memory"

    def start(self) -> None:
        for node in (*self.admins, *self.runners):
            node.start()

    def stop(self) -> None:
        for node in (*self.runners, *self.admins):
            node.process.stop()

    def fail(self) -> None:
        """Let one thing fail, and heal it."""
        choices: list[Callable[[], None]] = [self.kill_runner, self.pause_runner, self.pause_admin]
        if self._can_kill_admins:
            choices.append(self.kill_admin)
        if self.nats is not None:
            choices += [self.kill_leader, self.pause_leader]
        if self._has_network:
            choices += [self.cut_off_runner, self.cut_off_admin]
            if self.nats is not None:
                choices.append(self.cut_off_leader)
        choice = self.random.choice(choices)
        self.faults[choice.__name__.replace("_", " ")] += 1
        choice()

    def kill_runner(self) -> None:
        self.random.choice(self.runners).restart()

    def pause_runner(self) -> None:
        self._pause(self.random.choice(self.runners))

    def kill_admin(self) -> None:
        self.random.choice(self.admins).restart()

    def pause_admin(self) -> None:
        self._pause(self.random.choice(self.admins))

    def kill_leader(self) -> None:
        assert self.nats is not None
        self.nats.leader(STREAM).kill()
        time.sleep(FAULT_SECONDS)
        self.nats.heal()

    def pause_leader(self) -> None:
        assert self.nats is not None
        self.nats.leader(STREAM).pause()
        time.sleep(PAUSE_SECONDS)
        self.nats.heal()

    def cut_off_runner(self) -> None:
        """Drop the packets between a runner and all admins."""
        network = f"{_network(self.random.randrange(len(self.runners)))}.0/24"
        with dropped(f"ip daddr {network}", f"ip saddr {network}"):
            time.sleep(PAUSE_SECONDS)

    def cut_off_admin(self) -> None:
        """Drop the packets between an admin and all runners."""
        port = self.random.choice(self.admins).settings.listen.rpartition(":")[2]
        with dropped(f"tcp dport {port}", f"tcp sport {port}"):
            time.sleep(PAUSE_SECONDS)

    def cut_off_leader(self) -> None:
        """Drop the packets of the connections of the stream's leader until another server leads it."""
        assert self.nats is not None
        nats, leader = self.nats, self.nats.leader(STREAM)
        ports = ", ".join(map(str, sorted(_ports(leader.pid))))
        with dropped(f"tcp dport {{ {ports} }}", f"tcp sport {{ {ports} }}"):
            wait_until(lambda: nats.leader(STREAM) is not leader)
            time.sleep(FAULT_SECONDS)
        nats.wait_until_ready()

    def _pause(self, node: Node) -> None:
        node.process.pause()
        try:
            time.sleep(PAUSE_SECONDS)
        finally:
            node.process.resume()

    def _admin_address(self, runner: int, admin: Node) -> str:
        """Return the address of an admin for one runner: of its own, so that it can be cut off."""
        port = admin.settings.listen.rpartition(":")[2]
        return f"{_network(runner)}.1:{port}" if self._has_network else f"{LOOPBACK}:{port}"


def _ports(pid: int) -> set[int]:
    """Return the local TCP ports of a process in this network."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            sockets.add(descriptor.readlink().name)
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return {int(each[1].rpartition(":")[2], 16) for each in fields if f"socket:[{each[9]}]" in sockets}


def _network(runner: int) -> str:
    return f"127.0.{10 + runner}"


@contextmanager
def dropped(*matches: str) -> Iterator[None]:
    """Drop the packets that match while the context lasts."""
    _nft(_RULES.format(rules="\n".join(f"{match} drop" for match in matches)))
    try:
        yield
    finally:
        _nft("delete table inet faults")


def _nft(rules: str) -> None:
    subprocess.run([shutil.which("nft") or "nft", "-f", "-"], input=rules, text=True, check=True)


def run(
    store: str,
    folder: Path,
    *,
    faults: Sequence[str] | int,
    is_cut_off: bool = False,
    size: int = RUNNERS,
    seed: int = 0,
) -> Figures:
    """Run a cluster through faults, and check the histories of its leases and messages.

    Arguments:
        faults: names of methods of `Cluster`, or how many to choose by chance.
        size: number of runners, and limit of that of admins.
        seed: of the faults that are chosen by chance.

    Raises: AssertionError when a promise was broken, such as NotLinearizable.
    """
    with ExitStack() as opened:
        cluster = Cluster(store, folder, opened, is_cut_off=is_cut_off, size=size, seed=seed)
        cluster.start()
        opened.callback(cluster.stop)
        addresses = [each.settings.listen for each in cluster.runners]
        with Clients(addresses, MAILBOXES, folder) as clients:
            _wait_for_answers(clients)
            for fault in range(faults) if isinstance(faults, int) else faults:
                if isinstance(fault, str):
                    cluster.faults[fault.replace("_", " ")] += 1
                    getattr(cluster, fault)()
                else:
                    cluster.fail()
                time.sleep(FAULT_SECONDS)
            _wait_for_answers(clients)
        for node in cluster.runners:
            node.process.stop()
        operations, epochs = check(cluster.store, folder)
        return Figures(operations, clients.answers, epochs, cluster.faults)


def _wait_for_answers(clients: Clients) -> None:
    answers = clients.answers
    wait_until(lambda: clients.answers >= answers + 20)


def check(store: str, folder: Path) -> tuple[int, int]:
    """Check all histories; return the number of operations and of epochs."""
    leases = {
        mailbox: [each for each in history if each.kind != "own" or each.output]
        for mailbox, history in read_histories(folder.glob("runner-*.journal")).items()
    }
    operations, epochs = check_each(lease_model, leases), 0
    for mailbox in MAILBOXES:
        with read_mailbox(store, mailbox) as reader:
            reader.verify_log()
            outcome = read_outcome(reader.log.read())
        messages = message_histories(folder.glob(f"*-{mailbox}.journal"), outcome.statuses)
        operations += check_each(message_model, messages)
        epochs += outcome.epochs
    return operations, epochs
