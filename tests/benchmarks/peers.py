"""PostgreSQL as a message store: Postroom side by side with other queues, in one run, on one server.

Each system does the same: 8 callers send batches of 200-byte messages while 8 others receive and settle
them. pgmq is measured twice: through its Python client, as a Python service would use it, and by plain SQL
through asyncpg, where nothing but the database works. PgQueuer runs as documented.
"""

import asyncio
import random
import string
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import msgspec

from postroom.adapters.compose import OwnedMailbox, is_database, open_mailbox
from tests.benchmarks.figures import Figures, Stopwatch
from tests.benchmarks.servers import postgres_server
from tests.benchmarks.throughput import CALLERS, LIMITS, POLICY, TOPIC, new_messages

BATCH = 100
MESSAGES = 50_000
PAYLOAD_BYTES = 200
VISIBILITY_S = 60
HELD_SECONDS, FREE_SECONDS, WINDOW_SECONDS = 60, 30, 5
HELD_GOAL = 0.98
PEER_GOALS = {("lives", "pgmq"): 1.5, ("lives", "pgmq.client"): 2.0, ("send", "pgmq"): 0.8}
"""How many times the rate of a peer ours should be in the same run."""
SUSTAINED_GOAL = 1.0
"""The same for lives over `FREE_SECONDS`, after `WINDOW_SECONDS` of them."""
JOBS = 20_000


class Queue(Protocol):
    """What every system is asked to do; calls come from several tasks at once."""

    async def send(self) -> None:
        """Send `BATCH` messages and return when they are durable."""

    async def live(self) -> int:
        """Receive up to `BATCH` messages, settle them, and return how many there were."""


OpenQueue = Callable[[str], AbstractAsyncContextManager[Queue]]


class _Postroom:
    def __init__(self, postroom: OwnedMailbox) -> None:
        self.postroom = postroom
        # Without idempotency keys: the others know none.
        self._messages = [msgspec.structs.replace(new, idem_key=None) for new in new_messages(BATCH)]

    async def send(self) -> None:
        for answer in await self.postroom.send_batch(self._messages):
            if isinstance(answer, Exception):
                raise answer

    async def live(self) -> int:
        taken = await self.postroom.receive_messages(TOPIC, max_messages=BATCH, max_bytes=1 << 30, wait_ms=20)
        for message in taken:
            assert len(message.payload) == PAYLOAD_BYTES
        if taken:
            await self.postroom.ack_messages([message.receipt for message in taken])
        return len(taken)


class _PostroomWithKeys(_Postroom):
    """Each message has an idempotency key of its own, as those have that must be stored once."""

    def __init__(self, postroom: OwnedMailbox) -> None:
        super().__init__(postroom)
        self._batch = 0

    async def send(self) -> None:
        self._batch += 1
        batch = self._batch
        self._messages = [
            msgspec.structs.replace(new, idem_key=f"{batch}-{number}")
            for number, new in enumerate(self._messages)
        ]
        await super().send()


class _Pgmq:
    """The extension's functions, installed by its SQL; a message is a JSON document of the same size."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        body = "".join(random.Random(1).choices(string.ascii_letters, k=PAYLOAD_BYTES - len('{"data": ""}')))
        self._messages = [f'{{"data": "{body}"}}'] * BATCH

    async def send(self) -> None:
        await self.pool.fetch(
            "SELECT * FROM pgmq.send_batch($1::text, $2::text[]::jsonb[])", "bench", self._messages
        )

    async def live(self) -> int:
        rows = await self.pool.fetch(
            "SELECT msg_id, message FROM pgmq.read($1::text, $2::int, $3::int)", "bench", VISIBILITY_S, BATCH
        )
        if not rows:
            await asyncio.sleep(0.02)
            return 0
        await self.pool.fetch("SELECT pgmq.delete($1::text, $2::bigint[])", "bench", [row[0] for row in rows])
        return len(rows)


class _PgmqClient:
    """The same through the client that pgmq's package brings."""

    def __init__(self, client: Any) -> None:
        self._client = client
        body = "".join(random.Random(1).choices(string.ascii_letters, k=PAYLOAD_BYTES - len('{"data": ""}')))
        self._messages = [{"data": body}] * BATCH

    async def send(self) -> None:
        await self._client.send_batch("bench", self._messages)

    async def live(self) -> int:
        taken = await self._client.read_batch("bench", vt=VISIBILITY_S, batch_size=BATCH)
        if not taken:
            await asyncio.sleep(0.02)
            return 0
        await self._client.delete_batch("bench", [message.msg_id for message in taken])
        return len(taken)


@asynccontextmanager
async def open_postroom(url: str, **policy: Any) -> AsyncIterator[OwnedMailbox]:
    """Open a mailbox in a new database.

    Arguments:
        policy: fields of the policy of its topics.
    """
    from postroom.adapters.compose.maintenance import migrate_store

    if is_database(url):
        migrate_store(url)
    settings = msgspec.structs.replace(POLICY, **policy)
    async with open_mailbox(url, default_policy=settings, limits=LIMITS) as mailbox:
        yield mailbox


@asynccontextmanager
async def open_postroom_queue(url: str) -> AsyncIterator[Queue]:
    async with open_postroom(url) as postroom:
        yield _Postroom(postroom)


@asynccontextmanager
async def _open_postroom_with_keys(url: str) -> AsyncIterator[Queue]:
    async with open_postroom(url) as postroom:
        yield _PostroomWithKeys(postroom)


@asynccontextmanager
async def install_pgmq(url: str) -> AsyncIterator[Any]:
    """Install pgmq in a new database, and yield a pool of connections to it."""
    import asyncpg
    from pgmq.install import get_embedded_install_sql

    async with asyncpg.create_pool(url, min_size=2 * CALLERS, max_size=2 * CALLERS) as pool:
        await pool.execute(get_embedded_install_sql())
        yield pool


@asynccontextmanager
async def _open_pgmq(url: str) -> AsyncIterator[Queue]:
    async with install_pgmq(url) as pool:
        await pool.execute("SELECT pgmq.create('bench')")
        yield _Pgmq(pool)


@asynccontextmanager
async def _open_pgmq_client(url: str) -> AsyncIterator[Queue]:
    async with _open_pgmq(url) as queue:
        from pgmq.async_queue import PGMQueue

        assert isinstance(queue, _Pgmq)
        yield _PgmqClient(PGMQueue(pool=queue.pool, init_extension=False))


async def _send(queue: Queue, messages: int) -> None:
    turns = iter(range(messages // BATCH))

    async def caller() -> None:
        for _ in turns:
            await queue.send()

    await asyncio.gather(*(caller() for _ in range(CALLERS)))


async def _settle(queue: Queue, messages: int) -> None:
    left = messages

    async def caller() -> None:
        nonlocal left
        while left > 0:
            count = await queue.live()
            left -= count

    await asyncio.gather(*(caller() for _ in range(CALLERS)))


async def _send_rate(_url: str, queue: Queue) -> float:
    with Stopwatch() as sending:
        await _send(queue, MESSAGES)
    return MESSAGES / sending.seconds


async def life_rate(_url: str, queue: Queue, messages: int = MESSAGES) -> float:
    """Return messages a second that are sent while others are received and settled."""
    with Stopwatch() as living:
        await asyncio.gather(_send(queue, messages), _settle(queue, messages))
    return messages / living.seconds


async def _rates(url: str, queue: Queue) -> tuple[float, float, list[float], list[float]]:
    """Return lives a second in windows while two idle transactions hold old snapshots, and without them."""
    import psycopg

    sent = settled = 0
    is_over = False
    room = asyncio.Event()

    async def send() -> None:
        nonlocal sent
        while not is_over:
            await queue.send()
            sent += BATCH
            room.clear()
            # No backlog, so that all windows do the same.
            while sent - settled > 20 * BATCH and not is_over:
                await room.wait()
                room.clear()

    async def settle() -> None:
        nonlocal settled
        while not is_over:
            count = await queue.live()
            settled += count
            room.set()

    async def windows(seconds: int) -> list[float]:
        rates = []
        for _ in range(seconds // WINDOW_SECONDS):
            before = settled
            with Stopwatch() as window:
                await asyncio.sleep(WINDOW_SECONDS)
            rates.append((settled - before) / window.seconds)
        return rates

    work = [asyncio.create_task(turn()) for turn in (send, settle) for _ in range(CALLERS)]
    await asyncio.sleep(WINDOW_SECONDS)
    free = await windows(FREE_SECONDS)
    idle = [await psycopg.AsyncConnection.connect(url) for _ in range(2)]
    for connection in idle:
        await connection.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
        await connection.execute("SELECT count(*) FROM pg_class")
    held = await windows(HELD_SECONDS)
    for connection in idle:
        await connection.close()
    free += await windows(FREE_SECONDS)
    is_over = True
    room.set()
    await asyncio.gather(*work)
    return median(held), median(free), held, free


def is_installed(figures: Figures, *packages: str) -> bool:
    """Tell whether a peer is installed; it is measured only where it is (dependency group `dev`)."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        figures.progress(f"not measured, for want of {', '.join(missing)}")
    return not missing


def _systems(figures: Figures) -> dict[str, OpenQueue]:
    systems: dict[str, OpenQueue] = {"postgres": open_postroom_queue}
    if is_installed(figures, "pgmq", "asyncpg"):
        systems |= {"pgmq": _open_pgmq, "pgmq.client": _open_pgmq_client}
    return systems


def _in_database(
    folder: Path, open_queue: OpenQueue, work: Callable[[str, Queue], Coroutine[Any, Any, Any]]
) -> Any:
    with postgres_server(folder) as server:
        url = server.create_database()

        async def main() -> Any:
            async with open_queue(url) as queue:
                return await work(url, queue)

        return asyncio.run(main())


def _measure_stores(figures: Figures, folder: Path, _: int) -> None:
    """Measure the systems in turns, so that a slow moment of the machine hits both."""
    systems = _systems(figures)
    rates: dict[tuple[str, str], list[float]] = {}
    for _ in range(figures.runs):
        for name, open_queue in systems.items():
            for stage, rate in (("send", _send_rate), ("lives", life_rate)):
                if figures.wants(f"{name}.{stage}.{BATCH}") or figures.wants(f"postgres.{stage}.{BATCH}"):
                    rates.setdefault((stage, name), []).append(_in_database(folder, open_queue, rate))
    for stage, name in sorted(rates, key=lambda key: key[::-1], reverse=True):
        figures.add(f"{name}.{stage}.{BATCH}", median(rates[stage, name]), "messages/s")
    for (stage, peer), goal in PEER_GOALS.items():
        if (stage, peer) in rates and (stage, "postgres") in rates:
            pairs = zip(rates[stage, "postgres"], rates[stage, peer], strict=True)
            ratio = median(ours / theirs for ours, theirs in pairs)
            figures.add(f"postgres.{stage}.{BATCH}.of_{peer}", ratio, "times", goal)


def _measure_held(figures: Figures, folder: Path, _: int) -> None:
    systems = _systems(figures) | {"postgres.keys": _open_postroom_with_keys}
    sustained: dict[str, float] = {}
    for name, open_queue in systems.items():
        if name == "pgmq.client" or not figures.wants(f"{name}.lives.held_snapshot"):
            continue
        held, free, windows, free_windows = _in_database(folder, open_queue, _rates)
        figures.progress(
            f"{name}: lives/s while snapshots are held {', '.join(f'{w:,.0f}' for w in windows)}"
        )
        sustained[name] = median(free_windows[: FREE_SECONDS // WINDOW_SECONDS])
        figures.add(f"{name}.lives.sustained", sustained[name], "messages/s")
        figures.add(f"{name}.lives.free_snapshot", free, "messages/s")
        figures.add(f"{name}.lives.held_snapshot", held, "messages/s")
        goal = HELD_GOAL if name.startswith("postgres") else None
        figures.add(f"{name}.lives.held_snapshot.of_free", held / free, "times", goal)
    if {"postgres", "pgmq"} <= sustained.keys():
        ratio = sustained["postgres"] / sustained["pgmq"]
        figures.add("postgres.lives.sustained.of_pgmq", ratio, "times", SUSTAINED_GOAL)


def _measure_pgqueuer(figures: Figures, folder: Path, _: int) -> None:
    async def main(url: str) -> float:
        import asyncpg
        from pgqueuer import PgQueuer
        from pgqueuer.db import AsyncpgPoolDriver
        from pgqueuer.domain.types import QueueExecutionMode
        from pgqueuer.queries import Queries

        async with asyncpg.create_pool(url, min_size=CALLERS, max_size=CALLERS) as pool:
            driver = AsyncpgPoolDriver(pool)
            queries = Queries(driver)
            await queries.install()
            payload: list[bytes | None] = [random.Random(1).randbytes(PAYLOAD_BYTES)] * BATCH
            manager = PgQueuer(driver)

            async def job(_: Any) -> None:
                return

            manager.entrypoint("bench")(job)
            with Stopwatch() as living:
                for _ in range(JOBS // BATCH):
                    await queries.enqueue(["bench"] * BATCH, payload, [0] * BATCH)
                await manager.qm.run(batch_size=BATCH, mode=QueueExecutionMode.drain)
            return JOBS / living.seconds

    if not is_installed(figures, "pgqueuer", "asyncpg"):
        return
    with postgres_server(folder) as server:
        rates = [asyncio.run(main(server.create_database())) for _ in range(figures.runs)]
    figures.add("pgqueuer.jobs", median(rates), "jobs/s")


MEASUREMENTS: dict[str, Callable[[Figures, Path, int], None]] = {
    f"postgres.send.{BATCH}": _measure_stores,
    f"postgres.lives.{BATCH}": _measure_stores,
    f"pgmq.send.{BATCH}": _measure_stores,
    f"pgmq.lives.{BATCH}": _measure_stores,
    "pgmq.client.": _measure_stores,
    "postgres.lives.held_snapshot": _measure_held,
    "postgres.keys.lives.held_snapshot": _measure_held,
    "pgmq.lives.held_snapshot": _measure_held,
    "pgqueuer.jobs": _measure_pgqueuer,
}
