"""Connections of processes to simulated NATS servers, and blocking calls in turns with the event loop."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from contextvars import ContextVar
from itertools import count
from random import Random
from typing import Any, TypeVar

from nats.errors import TimeoutError as NatsTimeoutError

from postroom.adapters.jetstream.client import StreamClient
from postroom.adapters.jetstream.durability import SyncWatch
from postroom.adapters.jetstream.settings import LogStreamSettings, parse_store_url
from postroom.adapters.jetstream.store_streams import OpenStreams, StoreStreams
from postroom.adapters.nats.client import Reply
from postroom.domain.errors import Unavailable
from tests.simulation.cluster.virtual_loop import MAX_JOB_SECONDS, VirtualLoop
from tests.simulation.jetstream.servers import Answer, Servers
from tests.simulation.jobs import Job

T = TypeVar("T")
STORE = "nats://simulated:4222/LOGS?sync=always"
MAX_PAYLOAD = 1_500
"""So small that some appends have several parts."""
LATE_SECONDS = 8.0
"""Longest time that a write waits at a server that is paused."""
SECONDS = 30


class TurnsLoop(VirtualLoop):
    """A loop on virtual time whose jobs run in threads: one at a time, and the loop does not run meanwhile.

    So code that blocks, and calls coroutines of the loop, runs the same in each run.
    """

    process: ContextVar[object] = ContextVar("process", default=None)
    """The process that hands over a job: its jobs wait for each other."""

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self._turn = threading.Semaphore(0)
        self._calls: list[tuple[Coroutine[Any, Any, Any], _Waiting]] = []
        self._jobs: dict[object, list[Job]] = {}

    def run_in_executor(  # type: ignore[override]  # the base class types the arguments more narrowly
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        done: asyncio.Future[Any] = self.create_future()
        process = self.process.get()
        jobs = self._jobs.setdefault(process, [])
        jobs.append(Job(done, func, args))
        if len(jobs) == 1:
            self.call_later(self._delay(), self._start, jobs)
        return done

    def _delay(self) -> float:
        return self._random.random() * MAX_JOB_SECONDS

    def _start(self, jobs: list[Job]) -> None:
        def work() -> None:
            jobs[0].run()
            self.call_later(self._delay(), jobs.pop(0).finish)
            if jobs:
                self.call_later(self._delay(), self._start, jobs)
            self._turn.release()

        threading.Thread(target=work, daemon=True).start()
        self._let_run()

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop for the thread of a job, which waits for its result."""
        waiting = _Waiting()
        self._calls.append((work, waiting))
        self._turn.release()
        assert waiting.go_on.acquire(timeout=SECONDS)
        if waiting.error is not None:
            raise waiting.error
        result: T = waiting.result
        return result

    def _let_run(self) -> None:
        """Wait until the thread that runs has ended, or waits for a coroutine."""
        assert self._turn.acquire(timeout=SECONDS)
        while self._calls:
            work, waiting = self._calls.pop()
            self.create_task(self._serve(work, waiting))

    async def _serve(self, work: Coroutine[Any, Any, Any], waiting: "_Waiting") -> None:
        try:
            waiting.result = await work
        except asyncio.CancelledError:
            waiting.error = Unavailable("The simulated connection was closed.")
        except Exception as error:
            waiting.error = error
        waiting.go_on.release()
        self._let_run()


class _Waiting:
    """A thread that waits for a coroutine."""

    def __init__(self) -> None:
        self.go_on = threading.Semaphore(0)
        self.result: Any = None
        self.error: Exception | None = None


class Conditions:
    """What happens to requests on their way to the servers of NATS.

    Attributes:
        loss: probability that a request or an answer is lost.
        late: probability that a request waits on its way for some seconds.
        cut_off: names of processes that nothing reaches.
    """

    def __init__(self) -> None:
        self.loss = self.late = 0.0
        self.cut_off: set[str] = set()


class Link:
    """The way of one life of a process to the servers.

    Attributes:
        is_dead: whether the process has ended: what it sent before may still arrive.
    """

    def __init__(
        self, loop: TurnsLoop, servers: Servers, conditions: Conditions, name: str, random: Random
    ) -> None:
        self.is_dead = False
        self._loop = loop
        self._servers = servers
        self._conditions = conditions
        self._name = name
        self._random = random

    def send(
        self, subject: str, headers: Mapping[str, str], data: bytes, answer: Callable[[Answer], None]
    ) -> None:
        """Send a request; its answers are given to a function, unless they are lost."""
        if self.is_dead:
            raise Unavailable("This process is dead.")
        if self._is_lost():
            return
        delay = self._random.random() * 0.002
        if self._random.random() < self._conditions.late:
            delay += self._random.random() * LATE_SECONDS
        self._loop.call_later(delay, self._arrive, subject, headers, data, answer)

    def _arrive(
        self, subject: str, headers: Mapping[str, str], data: bytes, answer: Callable[[Answer], None]
    ) -> None:
        answers = self._servers.handle(subject, headers, data)
        if not self._is_lost():
            for each in answers:
                self._loop.call_later(0.001, answer, each)

    def _is_lost(self) -> bool:
        is_cut_off = self._name in self._conditions.cut_off
        return is_cut_off or self._random.random() < self._conditions.loss


class SimulatedClient:
    """The methods of `SupervisedClient` that streams use."""

    max_payload = MAX_PAYLOAD

    def __init__(self, link: Link) -> None:
        self._link = link
        self._inboxes: dict[str, asyncio.Queue[Any]] = {}
        self._numbers = count()

    async def request_bytes(self, subject: bytes, headers: bytes, payload: bytes, seconds: float) -> Reply:
        """Send a request, and return its reply; see `SupervisedClient.request_bytes`."""
        reply: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def take(answer: Answer) -> None:
            if not reply.done():
                reply.set_result(answer)

        self._link.send(subject.decode(), _headers(headers), payload, take)
        try:
            async with asyncio.timeout(seconds):
                answer = await reply
        except TimeoutError:
            raise NatsTimeoutError from None
        lines = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
        return Reply(f"NATS/1.0\r\n{lines}\r\n".encode(), answer.data)

    def new_inbox(self) -> str:
        """Return a new subject for answers."""
        return f"_INBOX.{next(self._numbers)}"

    async def subscribe(self, inbox: str) -> "_Subscription":
        """Subscribe to answers."""
        return _Subscription(self._inboxes.setdefault(inbox, asyncio.Queue()))

    async def publish(self, subject: str, data: bytes, reply: str) -> None:
        """Send a request whose answers come to an inbox."""
        self._link.send(subject, {}, data, self._inboxes[reply].put_nowait)


class _Subscription:
    def __init__(self, answers: "asyncio.Queue[Answer]") -> None:
        self._answers = answers

    async def next_msg(self, timeout: float) -> Answer:  # noqa: ASYNC109  # as nats-py has it
        try:
            async with asyncio.timeout(timeout):
                return await self._answers.get()
        except TimeoutError:
            raise NatsTimeoutError from None

    async def unsubscribe(self) -> None:
        """Do nothing."""


class _Connection:
    """`ConnectionThread` whose thread is the one event loop of the simulation."""

    def __init__(self, loop: TurnsLoop, link: Link) -> None:
        self.client = SimulatedClient(link)
        self._loop = loop

    def call(self, work: Callable[[], Coroutine[Any, Any, T]], _: float) -> T:
        return self._loop.wait_for(work())


class SimulatedStreams(StoreStreams):
    """The streams of a store as one process sees them."""

    def __init__(self, loop: TurnsLoop, link: Link) -> None:
        self.settings: LogStreamSettings = parse_store_url(STORE)
        connection: Any = _Connection(loop, link)
        client: Any = connection.client
        log, state = (
            StreamClient(client, name, is_atomic=False)
            for name in (self.settings.stream, self.settings.state_stream)
        )
        servers = frozenset(("one", "two", "three"))
        sync = SyncWatch(self.settings)
        self._opened = OpenStreams(connection, self.settings, log, state, servers, sync)

    def open(self, *, create: bool = False) -> OpenStreams:
        """Return the streams, which exist."""
        return self._opened

    def close(self) -> None:
        """Leave the connection open."""


def _headers(encoded: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in encoded.decode().split("\r\n")[1:])
    return {name: value.strip() for name, _, value in lines if name}
