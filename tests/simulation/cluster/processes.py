"""The product's own admins and runners in one event loop on virtual time, joined by a bad network."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any, TypeVar

from postroom.application.cluster.control_plane import ControlPlane
from postroom.application.cluster.control_plane_metrics import ControlPlaneSettings, LeasePolicies
from postroom.application.cluster.leased_mailbox import RunnerIdentity
from postroom.application.cluster.runner import Runner
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.ports.control_plane import MailboxReport, RouteChange
from postroom.application.ports.event_log import EventLog
from postroom.domain.commit import Commit
from postroom.domain.errors import PostroomError, Unavailable
from postroom.domain.lease.lease import LeasePolicy
from postroom.domain.lease.routing import RoutingTable
from postroom.domain.settings import SettingsChanges
from tests.simulation.choices import LIMITS, POLICY
from tests.simulation.cluster.doubtful_store import DoubtfulRecorder
from tests.simulation.cluster.virtual_loop import VirtualLoop
from tests.simulation.operations import Receipts, Room, Send
from tests.simulation.world import Disk, LogHandle

T = TypeVar("T")
NoteSent = Callable[[str, str], None]
"""Called with the mailbox and the id of a message that was acknowledged."""
SEND_SECONDS = 0.1


class ProcessClock:
    """Clocks of a process: an uptime at a rate of its own, and a wall clock that can be set.

    Attributes:
        skew: error of the wall clock, µs.
    """

    def __init__(self, loop: VirtualLoop, rate: float, boot: int) -> None:
        self.skew = 0
        self._loop = loop
        self._rate = rate
        self._boot = boot

    def wall(self) -> int:
        return 1_700_000_000_000_000 + int(self._loop.time() * 1_000_000) + self.skew

    def uptime(self) -> int:
        return self._boot + int(self._loop.time() * 1_000_000 * self._rate)

    def boot(self) -> str:
        return f"boot-{self._boot}"


class SimulatedLeaseStore:
    """A lease store whose writes collide and whose answers get lost."""

    def __init__(self, recorder: DoubtfulRecorder) -> None:
        self.recorder = recorder

    def wait(self, after: int, timeout_ms: int) -> None:
        """Return at once: admins poll."""

    def remove_old_events(self) -> int:
        return self.recorder.remove_old_events()

    def close(self) -> None:
        """Do nothing."""


class Proxies:
    """Routing tables of proxies by address, to which pushes get lost.

    Attributes:
        loss: probability that a push is lost.
    """

    def __init__(self, random: Random) -> None:
        self.loss = 0.0
        self.tables: dict[str, RoutingTable] = {}
        self._random = random

    async def push(self, address: str, change: RouteChange, key: str) -> None:
        """Push a change; see `RoutePush.push`."""
        await asyncio.sleep(self._random.random() * 0.05)
        if self._random.random() < self.loss:
            raise Unavailable("The simulated push was lost.")
        table = self.tables[address]
        if change.route is None:
            table.remove(change.mailbox, change.position)
        else:
            table.update(change.route)

    async def forget(self, address: str) -> None:
        """Do nothing."""

    async def stay_registered(self, address: str, wire: Any) -> None:
        """Register a proxy again and again."""
        while True:
            table = self.tables[address]
            with suppress(Unavailable):
                registration = await wire.register_proxy(address.partition(":")[0], address, table.position)
                if registration.table is not None:
                    table.replace_all(registration.table.position, registration.table.routes)
            await asyncio.sleep(0.3)


class AdminProcess:
    """A process of the control plane, which starts with nothing but the lease store."""

    def __init__(
        self,
        store: SimulatedLeaseStore,
        clock: ProcessClock,
        proxies: Proxies,
        policy: LeasePolicy,
        random: Random,
    ) -> None:
        self.control_plane: ControlPlane | None = None
        self._store = store
        self._clock = clock
        self._proxies = proxies
        self._policies = LeasePolicies(policy)
        self._random = random
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def crash(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        settings = ControlPlaneSettings(
            member_ttl_ms=1_000, poll_ms=50, expiry_ms=100, cleanup_ms=self._random.choice((300, 60_000))
        )
        while True:
            plane = ControlPlane(
                self._store, self._clock, self._proxies, self._blocking, self._policies, settings
            )
            try:
                async with plane.running():
                    self.control_plane = plane
                    await asyncio.get_running_loop().create_future()
            except Unavailable:
                await asyncio.sleep(0.1)
            finally:
                self.control_plane = None

    async def _blocking(self, work: Callable[[], T], /) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, work)


class LeasedLogHandle(LogHandle):
    """Access of a runner to a log, which notes appends without a lease.

    Attributes:
        may_append: whether its lease lasts.
        refused: mailboxes of such appends.
    """

    may_append: Callable[[], bool]
    refused: list[str]

    def append(self, commits: Sequence[Commit]) -> None:
        """Append commits."""
        if not self.may_append():
            self.refused.append(self.mailbox)
        super().append(commits)


class Host:
    """The store of a runner process, in which the mailboxes of all processes are; see `MailboxHost`."""

    def __init__(
        self, name: str, disks: dict[str, Disk], clock: ProcessClock, sent: Callable[[str, str], None]
    ) -> None:
        self.opened: dict[str, Callable[[], bool]] = {}
        self.appended_without_lease: list[str] = []
        self._name = name
        self._disks = disks
        self._clock = clock
        self._sent = sent
        self._handles: list[LogHandle] = []
        self._count = 0

    async def log_epoch(self, mailbox: str) -> int:
        await asyncio.sleep(0.001)
        head = self._disks[mailbox].head()
        return 0 if head is None else head.epoch

    @asynccontextmanager
    async def open(self, mailbox: str, epoch: int, may_append: Callable[[], bool]) -> AsyncIterator["Hosted"]:
        log = await self._open_log(mailbox, may_append)
        engine = MailboxEngine(log, self._clock, may_append=may_append)
        self.opened[mailbox] = may_append
        settings = SettingsChanges.of(LIMITS, POLICY)
        await engine.open(self._name, settings=settings, epoch=epoch, accept_clock=True)
        sending = asyncio.create_task(self._send(engine))
        try:
            yield Hosted(engine)
        finally:
            sending.cancel()
            await engine.close()
            self.opened.pop(mailbox, None)

    async def _open_log(self, mailbox: str, may_append: Callable[[], bool]) -> EventLog:
        """Open a log, which notes appends without a lease."""
        handle = LeasedLogHandle(self._disks[mailbox])
        handle.may_append, handle.refused = may_append, self.appended_without_lease
        self._handles.append(handle)
        return handle

    def kill(self) -> None:
        """Let nothing of this process reach the store any more."""
        for handle in self._handles:
            handle.kill()
        self.opened.clear()

    async def _send(self, engine: MailboxEngine) -> None:
        room, receipts = Room(engine, self._clock.wall), Receipts()
        while True:
            self._count += 1
            id_ = f"{self._name}-{self._count}"
            with suppress(PostroomError):
                await Send(id_, "news", b"payload", has_external_id=True, ttl_seconds=1).ask(room, receipts)
                self._sent(engine.name, id_)
            await asyncio.sleep(SEND_SECONDS)


class Hosted:
    """A mailbox that is open; see `HostedMailbox`."""

    def __init__(self, engine: MailboxEngine) -> None:
        self._engine = engine

    async def wait_until_lost(self) -> None:
        await self._engine.wait_until_lost()

    async def report(self) -> MailboxReport:
        return MailboxReport(events_stored=self._engine.mailbox.position)


class RunnerProcess:
    """A process that owns mailboxes."""

    def __init__(
        self,
        name: str,
        wire: "Wire",
        disks: dict[str, Disk],
        clock: ProcessClock,
        sent: Callable[[str, str], None],
    ) -> None:
        self.name = name
        self.wire = wire
        self._disks = disks
        self._clock = clock
        self._sent = sent
        self._host: Host | None = None
        self._runner: Runner | None = None
        self._task: asyncio.Task[None] | None = None
        self._lives = 0
        self._is_stopping = False
        self.appended_without_lease: list[str] = []

    def may_append(self, mailbox: str) -> bool:
        """Return whether it has the mailbox open and its lease lasts."""
        may_append = None if self._host is None else self._host.opened.get(mailbox)
        return may_append is not None and may_append()

    async def start(self) -> None:
        """Start, unless it runs; when it is stopping, after that."""
        if self._is_stopping:
            await self.stop()
        if self._task is None:
            self._lives += 1
            self._host = self._new_host(f"{self.name}-{self._lives}")
            self._host.appended_without_lease = self.appended_without_lease
            identity = RunnerIdentity(self.name, "p0", f"{self.name}:1")
            self._runner = Runner(identity, tuple(self._disks), self.wire, self._host, self._clock)
            self._task = asyncio.create_task(self._runner.run())

    def _new_host(self, name: str) -> Host:
        """Return the store as this life of the process sees it."""
        return Host(name, self._disks, self._clock, self._sent)

    async def crash(self) -> None:
        """Die: nothing that is cancelled reaches the store or an admin any more."""
        task, self._task = self._task, None
        if task is not None:
            assert self._host is not None
            self._host.kill()
            was_cut, self.wire.is_cut = self.wire.is_cut, True
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            self.wire.is_cut = was_cut

    async def stop(self) -> None:
        """Shut down in order."""
        task = self._task
        if task is not None:
            assert self._runner is not None
            self._is_stopping = True
            self._runner.stop()
            with suppress(asyncio.CancelledError):  # it crashed meanwhile
                await task
            if self._task is task:
                self._task = None
            self._is_stopping = False


class Wire:
    """The way of one process to the admins, which asks the next one when one does not answer.

    Attributes:
        is_cut: whether nothing arrives.
        loss: probability that a request or an answer is lost.
        delay: the longest time that either takes, in seconds.
    """

    TIMEOUT = 0.3

    def __init__(self, admins: list[Any], random: Random) -> None:
        self.is_cut = False
        self.loss = 0.0
        self.delay = 0.005
        self._admins = admins
        self._random = random
        self._first = random.randrange(len(admins))
        self._tasks: set[asyncio.Task[Any]] = set()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            for _ in self._admins:
                try:
                    async with asyncio.timeout(self.TIMEOUT):
                        return await self._deliver(self._admins[self._first], method, args, kwargs)
                except (TimeoutError, Unavailable):
                    self._first = (self._first + 1) % len(self._admins)
            raise Unavailable("No simulated admin answered.")

        return call

    async def _deliver(self, admin: Any, method: str, args: Any, kwargs: Any) -> Any:
        await self._travel()
        if admin.control_plane is None:
            raise Unavailable("The simulated admin is down.")
        work = asyncio.ensure_future(getattr(admin.control_plane, method)(*args, **kwargs))
        self._tasks.add(work)
        work.add_done_callback(self._forget)
        answer = await asyncio.shield(work)  # an admin goes on when its caller has given up
        await self._travel()
        return answer

    async def _travel(self) -> None:
        if self.is_cut or self._random.random() < self.loss:
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(self._random.random() * self.delay)

    def _forget(self, work: asyncio.Task[Any]) -> None:
        self._tasks.discard(work)
        if not work.cancelled():
            work.exception()
