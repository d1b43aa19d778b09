"""A cluster of processes that are killed, paused and cut off, and the check of what they promised."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise, zip_longest
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec

from postroom.adapters.compose.queries import read_mailbox
from postroom.adapters.postgres.migrate import migrate
from postroom.domain.errors import BrokenLog
from tests.linearizability import clients, node
from tests.linearizability.checker import Model, NotLinearizable, check_each
from tests.linearizability.faults import FAULT_SECONDS, LOGS, Fault, Faults, last_take_over, network_of
from tests.linearizability.history import Operation, read_histories
from tests.linearizability.models import lease_model, message_model
from tests.linearizability.outcomes import message_histories, read_outcome
from tests.support.servers.nats_cluster import WITH_SYSTEM, NatsCluster
from tests.support.servers.postgres import PostgresServer, postgres_folder
from tests.support.servers.process import LOOPBACK, ServerProcess, free_port, listens
from tests.support.waiting import SECONDS, wait_until

STORES = ("memory", "sqlite", "postgres", "jetstream")
MAILBOXES = ("orders@p", "parcels@p")
RUNNERS, ADMINS = 3, 2
SERVER_GROUPS, RUNNER_GROUP, CLIENT_GROUP = (40_001, 40_002, 40_003), 40_011, 40_021
"""By which a packet filter tells the processes; these groups need not exist."""
ANSWERS = 10
"""From the clients of each mailbox, after which a cluster is taken to work."""
DEFECT_SECONDS = 60.0
"""Longest wait for a cluster with a defect, which may have broken a log for good."""
PROMISES = ("lost", "delivered after ack", "doubled", "two owners", "not linearizable", "broken log")


class Figures(NamedTuple):
    """What a run was.

    Arguments:
        problems: what contradicts a promise, by its name; see `PROMISES`.
        take_overs: seconds from a fault by which a mailbox lost its owner to the first record of the next
            one, by the name of the fault.
        pauses: longest seconds between two answers of a mailbox from a fault to the next one, by the name of
            the fault.
    """

    operations: int
    answers: int
    epochs: int
    faults: Counter[str]
    problems: Mapping[str, Sequence[str]]
    take_overs: Mapping[str, Sequence[float]]
    pauses: Mapping[str, Sequence[float]]

    def __str__(self) -> str:
        faults = ", ".join(f"{count} times {_words(name)}" for name, count in sorted(self.faults.items()))
        return (
            f"{self.operations:,} operations are linearizable, {self.answers:,} sends and acks answered, "
            f"{self.epochs} epochs; {faults or 'no faults'}"
        )


class Node:
    """A process of the cluster.

    Arguments:
        settings: of the module that it runs; they say which start of it this is.
        port: which it listens on; 0 for a process without one.
    """

    def __init__(self, settings: node.Settings | clients.Settings, folder: Path, port: int = 0) -> None:
        self.settings = settings
        self.port = port
        self._folder = folder
        self._process: ServerProcess | None = None

    def start(self) -> None:
        name, module = self.settings.name, type(self.settings).__module__
        command = [sys.executable, "-m", module, msgspec.json.encode(self.settings).decode()]
        self._process = ServerProcess(name, command, self._folder / f"{name}.log")
        self._process.start(lambda: not self.port or listens(self.port))
        self.settings = msgspec.structs.replace(self.settings, start=self.settings.start + 1)

    @property
    def process(self) -> ServerProcess:
        assert self._process is not None
        return self._process

    def restart(self) -> None:
        self.process.kill()
        self.start()

    def stop(self) -> None:
        self.process.stop()


class Cluster:
    """Admins and runners over one lease store, and clients.

    Arguments:
        store: one of `STORES`; the memory of one admin, which is never killed. In `postgres` and `jetstream`
            there are the leases and the messages; otherwise the messages are in a file.
        is_cut_off, size, defect: see `run` and `drill`.
    """

    def __init__(
        self, store: str, folder: Path, opened: ExitStack, *, is_cut_off: bool, size: int, defect: str
    ) -> None:
        self.nats: NatsCluster | None = None
        self.store = str(folder / "messages.db")
        self.mailboxes = MAILBOXES
        self.can_kill_admins = store != "memory"
        self._folder = folder
        self._has_network = is_cut_off
        self._patience = DEFECT_SECONDS if defect else SECONDS
        monitoring: tuple[str, ...] = ()
        leases = {"memory": "memory:", "sqlite": str(folder / "leases.db")}.get(store, "")
        if store == "postgres":
            server = opened.enter_context(PostgresServer(opened.enter_context(postgres_folder())))
            leases = self.store = server.create_database()
            for set_ in ("store", "leases"):
                migrate(leases, set_)
        elif store == "jetstream":
            groups = SERVER_GROUPS if is_cut_off else ()
            servers = NatsCluster(folder / "nats", groups=groups, **WITH_SYSTEM)
            self.nats = opened.enter_context(servers)
            leases, monitoring = self.nats.url, tuple(self.nats.monitoring.split(","))
            self.store = self.nats.store(LOGS)
        host = "0.0.0.0" if is_cut_off else LOOPBACK
        self.admins = []
        for number in range(1 if store == "memory" else min(ADMINS, size)):
            port = free_port()
            admin = node.Settings(
                name=f"admin-{number}", listen=f"{host}:{port}", leases=leases, monitoring=monitoring
            )
            self.admins.append(Node(admin, folder, port))
        self.runners = [self._runner(number, monitoring, defect) for number in range(min(RUNNERS, size))]
        self.clients = Node(
            clients.Settings(
                name="clients",
                runners=tuple(f"{LOOPBACK}:{each.port}" for each in self.runners),
                mailboxes=MAILBOXES,
                folder=str(folder),
                group=CLIENT_GROUP if is_cut_off else 0,
            ),
            folder,
        )

    def _runner(self, number: int, monitoring: tuple[str, ...], defect: str) -> Node:
        port = free_port()
        settings = node.Settings(
            name=f"runner-{number}",
            listen=f"{LOOPBACK}:{port}",
            admins=tuple(self._admin_address(number, each) for each in self.admins),
            store=self.store,
            monitoring=monitoring,
            mailboxes=MAILBOXES,
            journal=str(self._folder / f"runner-{number}"),
            group=RUNNER_GROUP + number if self._has_network else 0,
            defect=defect,
        )
        return Node(settings, self._folder, port)

    def _admin_address(self, runner: int, admin: Node) -> str:
        """Return the address of an admin for one runner: of its own, so that it can be cut off."""
        return f"{network_of(runner)}.1:{admin.port}" if self._has_network else f"{LOOPBACK}:{admin.port}"

    def start(self, opened: ExitStack) -> None:
        for each in (*self.admins, *self.runners, self.clients):
            each.start()
            opened.callback(each.stop)

    def owner(self, mailbox: str) -> str:
        """Return the name of the runner that owns a mailbox by its log, once there is one."""
        owners: list[str] = []

        def is_found() -> bool:
            taken = last_take_over(self.store, mailbox)
            owners.extend([] if taken is None else [taken.owner.removeprefix("runner ")])
            return bool(owners)

        self.wait_until(is_found)
        return owners[0]

    def epoch(self, mailbox: str) -> int:
        """Return the epoch of a log; 0 while it can't be read."""
        taken = last_take_over(self.store, mailbox)
        return 0 if taken is None else taken.epoch

    def wait_until(self, is_true: Callable[[], object]) -> None:
        """Return once a condition holds; raise TimeoutError when it does not for long."""
        wait_until(is_true, self._patience)

    def wait_for_answers(self) -> None:
        """Return when the clients of each mailbox got some more answers."""
        before = self._answers()
        self.wait_until(
            lambda: all(count >= before[mailbox] + ANSWERS for mailbox, count in self._answers().items())
        )

    def _answers(self) -> dict[str, int]:
        """Return how many answers the clients of each mailbox noted."""
        return {
            mailbox: sum(
                path.read_bytes().count(b'["answer"') for path in self._folder.glob(f"*-{mailbox}.journal")
            )
            for mailbox in self.mailboxes
        }


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
        faults: names of methods of `Faults`, or how many to choose by chance.
        size: number of runners, and limit of that of admins.
        seed: of the faults that are chosen by chance.

    Raises: AssertionError when a promise was broken.
    """
    figures = drill(store, folder, faults=faults, is_cut_off=is_cut_off, size=size, seed=seed)
    assert not figures.problems, figures.problems
    return figures


def drill(
    store: str,
    folder: Path,
    *,
    faults: Sequence[str] | int,
    is_cut_off: bool = False,
    size: int = RUNNERS,
    seed: int = 0,
    defect: str = "",
) -> Figures:
    """Do as `run`, and return what was found, also if a promise was broken.

    Arguments:
        defect: name of a defect that is put into the runners; see `defects`.
    """
    with ExitStack() as opened:
        cluster = Cluster(store, folder, opened, is_cut_off=is_cut_off, size=size, defect=defect)
        failing = Faults(cluster, Random(f"{store} {seed}"), has_network=is_cut_off)
        cluster.start(opened)
        try:
            cluster.wait_for_answers()
            for fault in [""] * faults if isinstance(faults, int) else faults:
                failing.fail(fault)
                time.sleep(FAULT_SECONDS)
                cluster.wait_for_answers()
        except TimeoutError:
            if not defect:  # which may have broken the log for good
                raise
        for each in (cluster.clients, *cluster.runners):
            each.stop()
        return check(cluster.store, folder, failing.done)


def check(store: str, folder: Path, faults: Sequence[Fault]) -> Figures:
    """Check all histories, and return what was found."""
    problems: dict[str, list[str]] = {}
    leases = {
        mailbox: [each for each in history if each.kind != "own" or each.output]
        for mailbox, history in read_histories(folder.glob("runner-*.journal")).items()
    }
    operations = _check_each(lease_model, leases, problems)
    answers = epochs = 0
    take_overs: dict[str, list[float]] = {}
    pauses: dict[str, list[float]] = {}
    for mailbox in MAILBOXES:
        journals = list(folder.glob(f"*-{mailbox}.journal"))
        try:
            with read_mailbox(store, mailbox) as reader:
                reader.verify_log()
                outcome = read_outcome(reader.log.read())
        except BrokenLog as error:
            problems.setdefault("broken log", []).append(str(error))
            continue
        for name, found in (
            ("doubled", outcome.doubled),
            ("two owners", outcome.overlaps),
            ("delivered after ack", outcome.late),
        ):
            if found:
                problems.setdefault(name, []).extend(found)
        messages = message_histories(journals, outcome.statuses)
        operations += _check_each(message_model, messages, problems)
        _find_lost(messages, problems)
        answered = [each for history in messages.values() for each in history if each.kind in ("send", "ack")]
        answered = [each for each in answered if each.output is True]
        answers += len(answered)
        epochs += outcome.epochs
        ends = sorted(each.end for each in answered if each.end is not None)
        for fault, following in zip_longest(faults, faults[1:]):
            taken = [each.uptime for each in outcome.take_overs if each.uptime > fault.uptime]
            if fault.mailbox == mailbox and taken:
                take_overs.setdefault(fault.name, []).append((taken[0] - fault.uptime) / 1e6)
            until = ends[-1] if following is None else following.at
            around = [fault.at, *(end for end in ends if fault.at < end <= until)]
            longest = max((later - earlier for earlier, later in pairwise(around)), default=0)
            pauses.setdefault(fault.name, []).append(longest / 1e9)
    counted = Counter(fault.name for fault in faults)
    return Figures(operations, answers, epochs, counted, problems, take_overs, pauses)


def _check_each(
    model: Callable[[str], Model], histories: dict[str, list[Operation]], problems: dict[str, list[str]]
) -> int:
    try:
        return check_each(model, histories)
    except NotLinearizable as error:
        problems.setdefault("not linearizable", []).append(str(error))
        return 0


def _find_lost(messages: Mapping[str, Sequence[Operation]], problems: dict[str, list[str]]) -> None:
    """Note messages that were sent or acked by an answer and are not so in the log."""
    for payload, history in messages.items():
        answered = {each.kind for each in history if each.output is True}
        (status,) = (each.output for each in history if each.kind == "find")
        if ("send" in answered and status == "absent") or ("ack" in answered and status != "acked"):
            problems.setdefault("lost", []).append(payload)


def _words(name: str) -> str:
    return name.replace("_", " ")
