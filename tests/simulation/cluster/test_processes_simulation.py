"""Admins and runners as they are, with their tasks, retries and mailboxes, on virtual time."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from postroom.application.cluster import leased_mailbox
from postroom.application.leases.lease_events import LeaseMapper
from postroom.application.mailbox.engine import MailboxEngine
from postroom.domain.lease.lease import Lease, LeaseChange, LeasePolicy, evolve
from postroom.domain.lease.observation import HeldLease, LeaseObservations
from postroom.domain.lease.routing import RoutingTable
from postroom.domain.names import message_stream
from tests.simulation.cluster.doubtful_store import DoubtfulRecorder
from tests.simulation.cluster.processes import (
    AdminProcess,
    ProcessClock,
    Proxies,
    RunnerProcess,
    SimulatedLeaseStore,
    Wire,
)
from tests.simulation.cluster.promises import Promises
from tests.simulation.cluster.virtual_loop import VirtualLoop
from tests.simulation.cluster.world import UnsafeStep, World
from tests.simulation.world import MS, Disk

SEEDS = 20
SEEDS_OF_DEFECTS = 200
TTL_MS, HEARTBEAT_MS, GRACE_MS = 1_000, 400, 200
FAULTS_SECONDS = 5.0
HEALED_SECONDS = (TTL_MS + GRACE_MS + HEARTBEAT_MS) / 1_000 + 2 * leased_mailbox.MAX_PAUSE_SECONDS
"""Until every mailbox has an owner: the pauses are those of a runner that was refused, or not answered."""
MAILBOXES = ("orders@p0", "audit@p1")
PROXIES = ("p0:1", "p1:1")


class CheckedRecorder(DoubtfulRecorder):
    """Recorder that checks the promises of every event of a lease.

    Attributes:
        leases: the fold of all events.
        broken: the first promise that was broken.
    """

    def __init__(self, random: Random, promises: Promises) -> None:
        super().__init__(random)
        self.leases: dict[str, Lease] = {}
        self.broken: UnsafeStep | None = None
        self._promises = promises
        self._mapper = LeaseMapper()

    def record(self, stored_events: Any, **kwargs: Any) -> Any:
        """Record events, and check them."""
        positions = super().record(stored_events, **kwargs)
        for stored in stored_events:
            event = self._mapper.to_domain_event(stored).event
            if isinstance(event, LeaseChange):
                before = self.leases.get(event.mailbox)
                try:
                    self._promises.check(before, event)
                except UnsafeStep as error:
                    self.broken = self.broken or error
                self.leases[event.mailbox] = evolve(before, event)
        return positions


class Processes:
    """A cluster of processes in one event loop."""

    loop_type: type[VirtualLoop] = VirtualLoop
    admin_type: type[AdminProcess] = AdminProcess
    runner_type: type[RunnerProcess] = RunnerProcess

    def __init__(self, seed: int) -> None:
        self.random = chance = Random(seed)
        self.loop = self.loop_type(chance)
        self.sent: list[tuple[str, str]] = []
        self.is_healed = False
        self.tasks: list[asyncio.Task[None]] = []
        self.disks = {mailbox: Disk(mailbox) for mailbox in MAILBOXES}
        self.runners: list[RunnerProcess] = []
        self.recorder = CheckedRecorder(chance, Promises(World(seed), self.runners, is_bounded=True))
        self.pushes = Proxies(chance)
        self.pushes.tables = {address: RoutingTable() for address in PROXIES}
        store = SimulatedLeaseStore(self.recorder)
        policy = LeasePolicy(ttl_ms=TTL_MS, heartbeat_interval_ms=HEARTBEAT_MS, grace_period_ms=GRACE_MS)
        self.clocks: list[ProcessClock] = []
        self.admins = [self.admin_type(store, self.clock(), self.pushes, policy, chance) for _ in range(2)]
        self.wires: list[Wire] = []
        self.runners += [
            self.runner_type(f"runner{n}", self.wire(), self.disks, self.clock(), self.note_sent)
            for n in range(2)
        ]

    def clock(self) -> ProcessClock:
        rate = self.random.choice((1.0, 1.0 + GRACE_MS / TTL_MS - 0.01))
        self.clocks.append(ProcessClock(self.loop, rate, self.random.randrange(10**9)))
        return self.clocks[-1]

    def wire(self) -> Wire:
        self.wires.append(Wire(self.admins, self.random))
        return self.wires[-1]

    def note_sent(self, mailbox: str, id_: str) -> None:
        self.sent.append((mailbox, id_))

    def run(self) -> None:
        random.seed(self.random.random())  # the jitter of runners
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._run())

    async def _run(self) -> None:
        registering = [
            asyncio.create_task(self.pushes.stay_registered(address, self.wire())) for address in PROXIES
        ]
        await self._start_all()
        self._break_network()
        for _ in range(self.random.randrange(2, 7)):
            await asyncio.sleep(self.random.random() * FAULTS_SECONDS / 4)
            await self._fault()
        await self._heal()
        await asyncio.sleep(HEALED_SECONDS)
        self._check()
        for runner in self.runners:
            await runner.stop()
        if self.recorder.broken is None:
            held = [lease for lease in self.recorder.leases.values() if lease.is_held]
            assert not held, f"a runner that stops releases its leases: {held}"
        for process in self.admins:
            await process.crash()
        for task in registering:
            task.cancel()
        await asyncio.sleep(1)

    async def _start_all(self) -> None:
        for admin in self.admins:
            await admin.start()
        for runner in self.runners:
            await runner.start()

    def _break_network(self) -> None:
        chance = self.random
        loss = chance.choice((0.0, 0.05, 0.2))
        for wire in self.wires:
            wire.loss, wire.delay = loss, chance.choice((0.005, 0.2))
        self.pushes.loss = loss
        self.recorder.doubt = chance.choice((0.0, 0.1, 0.3))

    async def _fault(self) -> None:
        chance, later = self.random, self._later
        lasts = chance.random() * 2.5
        wire, clock = chance.choice(self.wires), chance.choice(self.clocks)
        match chance.choice(("crash", "stop", "admin", "cut", "cut", "clock")):
            case "crash":
                runner = chance.choice(self.runners)
                await runner.crash()
                later(lasts / 2, runner.start)
            case "stop":
                runner = chance.choice(self.runners)
                later(0, runner.stop)
                later(6 + lasts, runner.start)
            case "admin":
                admin = chance.choice(self.admins)
                await admin.crash()
                later(lasts, admin.start)
            case "cut":
                wire.is_cut = True
                later(lasts, self._mend, wire)
            case "clock":
                clock.skew = chance.randrange(-(10**13), 10**13)

    def _later(self, seconds: float, call: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        def begin() -> None:
            if not self.is_healed:
                self.tasks.append(asyncio.create_task(call(*args)))

        self.loop.call_later(seconds, begin)

    async def _mend(self, wire: Wire) -> None:
        wire.is_cut = False

    async def _heal(self) -> None:
        self.is_healed = True
        for wire in self.wires:
            wire.is_cut, wire.loss, wire.delay = False, 0.0, 0.005
        self.pushes.loss = self.recorder.doubt = 0.0
        await self._start_all()

    def _check(self) -> None:
        if self.recorder.broken is not None:
            raise self.recorder.broken
        refused = [name for runner in self.runners for name in runner.appended_without_lease]
        assert not refused, f"nobody appends without a lease: {refused}"
        for mailbox, disk in self.disks.items():
            lease = self.recorder.leases[mailbox]
            owners = [runner.name for runner in self.runners if runner.may_append(mailbox)]
            assert owners == [lease.runner], f"the owner has the mailbox open: {owners}, {lease}"
            epochs = [record.epoch for record in disk.read()]
            assert epochs == sorted(epochs), "no append of an older epoch"
            assert epochs[-1] == lease.epoch, f"the owner appends: {epochs[-1]}, {lease}"
            for address, table in self.pushes.tables.items():
                route = table.get(mailbox)
                is_known = route is not None and (route.runner, route.epoch) == (lease.runner, lease.epoch)
                assert is_known, f"all proxies have the route: {address}, {route}, {lease}"
            streams = {message_stream(mailbox, id_) for name, id_ in self.sent if name == mailbox}
            assert disk.existing_streams(streams) == streams, "no acknowledged message is lost"
        assert self.sent


def run_all(seeds: Iterable[int]) -> None:
    for seed in seeds:
        try:
            Processes(seed).run()
        except AssertionError as error:
            raise UnsafeStep(f"Seed {seed}: {error}") from error


@pytest.mark.extended
def test_admins_and_runners_keep_their_promises_and_recover() -> None:
    run_all(range(SEEDS))


@pytest.mark.extended
def test_an_expiry_without_the_grace_period_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    is_expired = LeaseObservations.is_expired
    monkeypatch.setattr(
        LeaseObservations,
        "is_expired",
        lambda self, lease, now: is_expired(self, replace(lease, grace_ms=0), now),
    )
    with pytest.raises(UnsafeStep, match="nobody takes a mailbox"):
        run_all(range(SEEDS_OF_DEFECTS))


@pytest.mark.extended
def test_a_deadline_that_is_counted_from_the_answer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    extend = HeldLease._extend

    def extend_from_later(self: HeldLease, sent_at: int) -> None:
        extend(self, sent_at)
        self.deadline = sent_at + (TTL_MS + 300) * MS

    monkeypatch.setattr(HeldLease, "_extend", extend_from_later)
    with pytest.raises(UnsafeStep, match="nobody takes a mailbox"):
        run_all(range(60, SEEDS_OF_DEFECTS))  # smaller seeds are slow to show it, or do not


def test_an_owner_that_does_not_look_at_its_lease_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    initialize = MailboxEngine.__init__

    def ignore(self: MailboxEngine, *args: Any, may_append: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)

    monkeypatch.setattr(MailboxEngine, "__init__", ignore)
    with pytest.raises(UnsafeStep, match="nobody appends without a lease"):
        run_all(range(SEEDS_OF_DEFECTS))


def test_a_mailbox_that_is_opened_with_another_epoch_than_its_lease_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    open_mailbox = MailboxEngine.open

    async def open_with_the_next_epoch(self: MailboxEngine, owner: str, **options: Any) -> None:
        await open_mailbox(self, owner, accept_clock=True)

    monkeypatch.setattr(MailboxEngine, "open", open_with_the_next_epoch)
    with pytest.raises(UnsafeStep, match="the owner appends"):
        run_all(range(SEEDS_OF_DEFECTS))
