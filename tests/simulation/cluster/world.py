"""A world of processes with clocks of their own and a network that loses, repeats, delays and reorders."""

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any

MS = 1_000
SECOND = 1_000 * MS


class UnsafeStep(AssertionError):
    """A step of the simulation broke a promise."""


class World:
    """What happens, in the order of true time; the same seed makes the same run.

    Attributes:
        random: the only source of chance.
        now: true time, in µs since the simulation began; no process can read it.
        trace: what happened, as tuples of time, name and details.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0
        self.trace: list[tuple[Any, ...]] = []
        self.network = Network(self)
        self._due: list[tuple[int, int, Process | None, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, delay: int, call: Callable[..., None], *args: Any) -> None:
        """Let something happen that is no process's, such as a fault or a write that is under way."""
        self.schedule(self.now + delay, None, 0, call, args)

    def schedule(
        self, at: int, process: "Process | None", life: int, call: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        """Call a process at a true time, unless it died before: its `life` has then another number."""
        self._count += 1
        heappush(self._due, (at, self._count, process, life, call, args))

    def run(self, until: int) -> None:
        """Let everything happen that is due until a true time."""
        due = self._due
        while due and due[0][0] <= until:
            at, _, process, life, call, args = heappop(due)
            self.now = max(self.now, at)
            if process is None:
                call(*args)
            elif process.life == life:
                process.take(call, args)
        self.now = until

    def note(self, *what: Any) -> None:
        """Add a line to the trace."""
        self.trace.append((self.now, *what))

    def require(self, is_kept: bool, promise: str, *details: Any) -> None:
        """Raise UnsafeStep unless a promise is kept."""
        if not is_kept:
            raise UnsafeStep(promise, *details)


class Process:
    """A process of the cluster with its own clocks, which may crash, start again and be paused.

    Attributes:
        life: counts its starts and deaths; timers and answers of an earlier life reach nobody. Even: dead.
        rate: how fast its monotonic clock runs, in millionths of true time.
        skew: error of its wall clock, in µs.
        is_gone: whether it never starts again.
    """

    def __init__(self, world: World, name: str, rate: int) -> None:
        self.world = world
        self.name = name
        self.life = 0
        self.rate = rate
        self.skew = 0
        self.is_gone = False
        self._boot = world.random.randrange(100 * SECOND)
        self._rest: list[tuple[Callable[..., None], tuple[Any, ...]]] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether it runs or is paused."""
        return self.life % 2 == 1

    def uptime(self) -> int:
        """Return its monotonic clock, µs."""
        return self._boot + self.world.now * self.rate // 1_000_000

    def wall(self) -> int:
        """Return its wall clock, µs since 1970."""
        return 1_700_000_000 * SECOND + self.world.now + self.skew

    def change_rate(self, rate: int) -> None:
        """Let its monotonic clock run at another rate from now on."""
        now = self.uptime()
        self.rate = rate
        self._boot = now - self.world.now * rate // 1_000_000

    def after(self, delay: int, call: Callable[..., None], *args: Any) -> None:
        """Call a method of its own after a time by its own clock, µs, unless it dies before."""
        at = self.world.now + delay * 1_000_000 // self.rate
        self.world.schedule(at, self, self.life, call, args)

    def bound(self, call: Callable[..., None]) -> Callable[..., None]:
        """Return a function that has this life of the process, and no later one, take a call."""
        life = self.life

        def take(*args: Any) -> None:
            if self.life == life:
                self.take(call, args)

        return take

    def take(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Do something now, or when it goes on."""
        if self._rest is None:
            call(*args)
        else:
            self._rest.append((call, args))

    def start(self) -> None:
        """Start with what is on disk only."""
        if not self.is_alive and not self.is_gone:
            self.life += 1
            self._rest = None
            self.world.note(self.name, "starts")
            self.started()

    def crash(self) -> None:
        """Die with everything that is in memory."""
        if self.is_alive:
            self.life += 1
            self._rest = None
            self.world.note(self.name, "crashes")

    def pause(self) -> None:
        """Stop running: its clocks go on, and what reaches it waits."""
        if self.is_alive and self._rest is None:
            self._rest = []
            self.world.note(self.name, "is paused")

    def go_on(self) -> None:
        """Run again, with what waited in the order in which it came."""
        rest, self._rest = self._rest, None
        if rest is not None:
            self.world.note(self.name, "goes on")
            life = self.life
            for call, args in rest:
                if self.life == life:
                    call(*args)

    def started(self) -> None:
        """Set up everything that lives in memory."""
        raise NotImplementedError


class Network:
    """Messages between processes: as bad as its attributes say until it is healed.

    Attributes:
        loss, repeats: probability that a message is lost, or arrives twice.
        delay: the longest time that a message usually takes, µs.
        straggler: the longest time that one message of twenty takes, µs.
        cut: names of processes that reach nobody and are reached by nobody.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.loss = 0.0
        self.repeats = 0.0
        self.delay = 5 * MS
        self.straggler = 5 * MS
        self.cut: set[str] = set()
        self._heals = 0

    def heal(self) -> None:
        """Deliver every message from now on, once and in time; those under way are lost."""
        self._heals += 1
        self.loss = self.repeats = 0.0
        self.delay = self.straggler = 5 * MS
        self.cut.clear()

    def send(self, source: str, target: Process, call: Callable[..., None], *args: Any) -> None:
        """Deliver a call to whatever life the target has when it arrives, or don't."""
        random = self._world.random
        if self.cut and (source in self.cut or target.name in self.cut):
            return
        if random.random() < self.loss:
            return
        self._world.at(self._latency(), self._arrive, self._heals, target, call, args)
        if random.random() < self.repeats:
            self._world.at(self._latency(), self._arrive, self._heals, target, call, args)

    def _latency(self) -> int:
        random = self._world.random
        longest = self.straggler if random.random() < 0.05 else self.delay
        return 1 + int(random.random() * longest)

    def _arrive(self, heals: int, target: Process, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if target.is_alive and heals == self._heals:
            target.take(call, args)
