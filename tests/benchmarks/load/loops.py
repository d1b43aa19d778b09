"""Closed and open loops of calls, and what they cost."""

import asyncio
import resource
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from tests.benchmarks.load.callers import Caller, Refused, Token

DEADLINE_SECONDS = 10.0
MIXED = ("send", "ack", "receive", "send", "ack", "send", "ack", "receive", "send", "ack")
"""Mixed work: 40 % sends, 20 % receives, 40 % acks."""
RECEIVED_AT_ONCE = 32

Act = Callable[[], Awaitable[str | None]]
"""Make one call and return its kind; None when there is nothing left to do."""


class Run(NamedTuple):
    """What a loop did.

    Arguments:
        seconds: its duration.
        latencies: of calls that succeeded by kind, s.
        refused: calls answered 429 or 503.
        failures: other calls that failed, by error.
        load_seconds: CPU time of this process.
        offered: calls per second that were begun.
        details: texts of the refusals and failures.
    """

    seconds: float
    latencies: dict[str, list[float]]
    refused: int
    failures: Counter[str]
    load_seconds: float
    offered: float
    details: Counter[str]

    def __or__(self, other: "Run") -> "Run":
        """Return the sum of two runs that were made at the same time."""
        kinds = self.latencies.keys() | other.latencies.keys()
        return Run(
            max(self.seconds, other.seconds),
            {kind: self.latencies.get(kind, []) + other.latencies.get(kind, []) for kind in kinds},
            self.refused + other.refused,
            self.failures + other.failures,
            self.load_seconds + other.load_seconds,
            self.offered + other.offered,
            self.details + other.details,
        )

    @property
    def calls(self) -> int:
        """Return the number of calls that succeeded."""
        return sum(map(len, self.latencies.values()))

    @property
    def rate(self) -> float:
        """Return calls per second."""
        return self.calls / self.seconds

    def percentile_ms(self, share: float, *kinds: str) -> float:
        """Return a percentile of the latencies of some kinds of calls, by default of all, ms."""
        values = sorted(t for kind in kinds or self.latencies for t in self.latencies.get(kind, ()))
        return 1_000 * values[min(int(share * len(values)), len(values) - 1)] if values else 0.0


class Work:
    """The calls of a load, which share what they have received: the `tokens` of deliveries to be settled."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._turn = 0
        self.tokens: deque[Token] = deque()

    async def prepare(self, count: int) -> None:
        """Send and receive messages, so that there are always some to be settled."""
        await asyncio.gather(*(self.send() for _ in range(count)))
        while await self.receive():
            pass

    async def send(self) -> str | None:
        """Send a message."""
        await self._caller.send()
        return "send"

    async def receive(self) -> str | None:
        """Receive messages; there is nothing left to do when there are none."""
        received = await self._caller.receive(RECEIVED_AT_ONCE)
        self.tokens.extend(received)
        return "receive" if received else None

    async def ack(self) -> str | None:
        """Settle a delivery."""
        if not self.tokens:
            return None
        await self._caller.ack(self.tokens.popleft())
        return "ack"

    async def mix(self) -> str | None:
        """Make the next call of the mixed work; a receive while there is nothing to settle."""
        self._turn += 1
        kind = MIXED[self._turn % len(MIXED)]
        if kind == "send":
            return await self.send()
        if kind == "ack" and self.tokens:
            return await self.ack()
        await self.receive()
        return "receive"


class _Recorder:
    def __init__(self) -> None:
        self._latencies: dict[str, list[float]] = {}
        self._refused = 0
        self._failures: Counter[str] = Counter()
        self._details: Counter[str] = Counter()
        self._start = time.perf_counter()
        self._cpu = _cpu_seconds()

    async def call(self, act: Act, since: float) -> bool:
        """Make a call and record it; return whether there is more to do."""
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                kind = await act()
        except Refused as error:
            self._refused += 1
            self._details[str(error)[:100]] += 1
        except Exception as error:
            self._failures[type(error).__name__] += 1
            self._details[str(error)[:100]] += 1
        else:
            if kind is None:
                return False
            self._latencies.setdefault(kind, []).append(time.perf_counter() - since)
        return True

    def elapsed(self) -> float:
        return time.perf_counter() - self._start

    def run(self, offered: float | None = None) -> Run:
        seconds = self.elapsed()
        calls = sum(map(len, self._latencies.values()))
        cpu = _cpu_seconds() - self._cpu
        offered = offered or calls / seconds
        return Run(seconds, self._latencies, self._refused, self._failures, cpu, offered, self._details)


async def closed_loop(act: Act, callers: int, seconds: float) -> Run:
    """Have callers make one call after the other, until the time is over or there is nothing left to do."""
    recorder = _Recorder()
    end = time.perf_counter() + seconds

    async def caller() -> None:
        while (now := time.perf_counter()) < end and await recorder.call(act, now):
            pass

    await asyncio.gather(*(caller() for _ in range(callers)))
    return recorder.run()


async def open_loop(
    act: Act,
    rate: float,
    seconds: float,
    at_once: int | None = None,
) -> Run:
    """Make calls at a rate, whether or not earlier ones were answered; latencies count from when each is due.

    Arguments:
        at_once: most calls in progress, as in a client with a pool of connections; others wait.
    """
    if at_once is not None:
        act = _limited(act, asyncio.Semaphore(at_once))
    recorder = _Recorder()
    running: set[asyncio.Task[bool]] = set()
    start = time.perf_counter()
    total = int(rate * seconds)
    for n in range(total):
        due = start + n / rate
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        elif n % 100 == 0:
            await asyncio.sleep(0)  # lets answers in, even if this process is late
        task = asyncio.ensure_future(recorder.call(act, due))
        running.add(task)
        task.add_done_callback(running.discard)
    offered = total / recorder.elapsed()
    if running:
        await asyncio.wait(running)
    return recorder.run(offered)


def _limited(act: Act, room: asyncio.Semaphore) -> Act:
    async def limited() -> str | None:
        async with room:
            return await act()

    return limited


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
