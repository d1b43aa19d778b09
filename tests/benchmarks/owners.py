"""Lives of messages in a namespace of one store, by the number of owners, each a process (ADR 0137).

Two client processes send, receive and ack messages with sticky keys, beside the owners. The CPU time of each
process counts: on a machine with fewer cores than processes, the busiest process tells what more would give.
"""

import asyncio
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import NamedTuple

from postroom.adapters.compose import OwnerSettings, make_settings, open_mailbox
from postroom.adapters.compose.connect import connect
from postroom.adapters.compose.maintenance import migrate_store
from postroom.adapters.compose.store_namespace import create_namespace
from postroom.application.messages import NewMessage
from postroom.application.operations.mailbox import Mailbox
from tests.benchmarks.figures import Figures
from tests.benchmarks.servers import postgres_server
from tests.benchmarks.throughput import LIMITS, PAYLOAD_BYTES, POLICY, TOPIC

NAMESPACE = "bench"
OWNERS = (0, 1, 2, 4)
"""0 is one owner, called by the name of its mailbox, without a namespace."""
CLIENTS = 2
KEYS = 1_000
WAIT_MS = 2_000
END_SECONDS = 20.0


class Work(NamedTuple):
    """What the clients do.

    Arguments:
        size: messages of each call.
        callers: concurrent callers of all clients; half of them send.
        messages: of all clients.
    """

    size: int
    callers: int
    messages: int


WORK = {
    "single_64": Work(1, 64, 10_000),
    "single_512": Work(1, 512, 20_000),
    "batch_100": Work(100, 16, 100_000),
}


class Rate(NamedTuple):
    """What a run measured.

    Arguments:
        lives: messages sent, received and acked in a second.
        owner_us, client_us, server_us: CPU time for each of them, of all processes of a kind.
        busiest: share of a core that the busiest owner took.
    """

    lives: float
    owner_us: float
    client_us: float
    server_us: float
    busiest: float


def own(store: str, mailbox: str, pipe: Connection) -> None:
    """Own a mailbox until told to end, and send the CPU time whenever the parent asks."""

    async def main() -> None:
        async with open_mailbox(store, mailbox):
            pipe.send("open")
            while await asyncio.to_thread(pipe.recv):
                pipe.send(time.process_time())

    asyncio.run(main())


def use(store: str, name: str, number: int, work: Work, pipe: Connection) -> None:
    """Send, receive and ack messages, and send their number and the CPU time to the parent."""

    async def main() -> None:
        async with connect(store, name) as mailbox:
            pipe.send("open")
            await asyncio.to_thread(pipe.recv)
            started = time.process_time()
            done = await _live(mailbox, number, work)
            pipe.send((done, time.process_time() - started))
            await asyncio.to_thread(pipe.recv)

    asyncio.run(main())


async def _live(mailbox: Mailbox, number: int, work: Work) -> int:
    size, callers, count = work.size, work.callers // CLIENTS, work.messages // CLIENTS
    chance = random.Random(number)
    payload = chance.randbytes(PAYLOAD_BYTES)
    batches, left, done = iter(range(count // size)), count, 0

    def message(text: str) -> NewMessage:
        return NewMessage(TOPIC, payload, idem_key=text, sticky_key=f"key-{chance.randrange(KEYS)}")

    async def send() -> None:
        for batch in batches:
            if size == 1:
                await mailbox.send_message(message(f"{number}-{batch}"))
            else:
                answers = await mailbox.send_batch([message(f"{number}-{batch}-{n}") for n in range(size)])
                assert not any(isinstance(each, Exception) for each in answers)

    async def receive() -> None:
        nonlocal left, done
        while left > 0:
            wanted = min(size, left)
            left -= wanted  # before the call, so that all clients together receive no more than was sent
            received = await mailbox.receive_messages(
                TOPIC, max_messages=wanted, max_bytes=1 << 30, wait_ms=WAIT_MS
            )
            left += wanted - len(received)
            assert not any(await mailbox.ack_messages([each.receipt for each in received]))
            done += len(received)

    await asyncio.gather(*(call() for call in (send, receive) for _ in range(callers // 2)))
    return done


class _Process:
    """A process of the benchmark, and the pipe to it."""

    def __init__(self, program: object, *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self._process = context.Process(target=program, args=(*arguments, other))  # type: ignore[arg-type]
        self._process.start()

    def end(self) -> None:
        self.pipe.send(None)
        self._process.join(END_SECONDS)
        self._process.kill()


@contextmanager
def _started(processes: list[_Process]) -> Iterator[list[_Process]]:
    try:
        for each in processes:
            each.pipe.recv()
        yield processes
    finally:
        for each in processes:
            each.end()


def measure(store: str, owners: int, work: Work, server: int | None = None) -> Rate:
    """Measure the lives of messages with a number of owners; `server` is the process of the database."""
    settings = OwnerSettings(settings=make_settings(LIMITS, POLICY))
    names = asyncio.run(create_namespace(store, NAMESPACE, max(owners, 1), settings))
    name = NAMESPACE if owners else names[0]
    with ExitStack() as opened:
        owning = opened.enter_context(_started([_Process(own, store, name) for name in names]))
        using = opened.enter_context(
            _started([_Process(use, store, name, number, work) for number in range(CLIENTS)])
        )

        def cpu() -> list[float]:
            for each in owning:
                each.pipe.send("cpu")
            return [each.pipe.recv() for each in owning]

        before, server_before, started = cpu(), _cpu_of_tree(server), time.perf_counter()
        for each in using:
            each.pipe.send("go")
        answers = [each.pipe.recv() for each in using]
        seconds = time.perf_counter() - started
        spent = [after - earlier for after, earlier in zip(cpu(), before, strict=True)]
        server_spent = _cpu_of_tree(server) - server_before
    done = sum(number for number, _ in answers)
    return Rate(
        done / seconds,
        sum(spent) / done * 1e6,
        sum(each for _, each in answers) / done * 1e6,
        server_spent / done * 1e6,
        max(spent) / seconds,
    )


def _cpu_of_tree(root: int | None) -> float:
    """Return the CPU seconds of a process and its children; 0 without one."""
    if root is None:
        return 0.0
    ticks = 0
    for folder in Path("/proc").iterdir():
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split() if folder.name.isdigit() else []
        except OSError:  # it has just ended
            continue
        if fields and (int(folder.name) == root or int(fields[1]) == root):
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _report(figures: Figures, kind: str, rates: dict[tuple[str, int], list[Rate]]) -> None:
    for (work, owners), runs in rates.items():
        for field in Rate._fields:
            unit = {"lives": "messages/s", "busiest": "cores"}.get(field, "us")
            value = median(getattr(each, field) for each in runs)
            figures.add(f"owners.{kind}.{work}.{owners}.{field}", value, unit)


def _on_sqlite(figures: Figures, folder: Path, _: int) -> None:
    rates: dict[tuple[str, int], list[Rate]] = {}
    for turn in range(figures.runs):
        for name, work in WORK.items():
            for owners in OWNERS:  # in turns, so that a slow moment of the machine hits all
                store = str(folder / f"owners-{turn}-{name}-{owners}.db")
                rates.setdefault((name, owners), []).append(measure(store, owners, work))
    _report(figures, "sqlite", rates)


def _on_postgres(figures: Figures, folder: Path, _: int) -> None:
    rates: dict[tuple[str, int], list[Rate]] = {}
    with postgres_server(folder) as server:
        for _turn in range(figures.runs):
            for name, work in WORK.items():
                for owners in OWNERS:
                    store = server.create_database()
                    migrate_store(store)
                    rates.setdefault((name, owners), []).append(measure(store, owners, work, server.pid))
    _report(figures, "postgres", rates)


MEASUREMENTS = {"owners.sqlite": _on_sqlite, "owners.postgres": _on_postgres}
