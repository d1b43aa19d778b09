"""Workers of job queues behind one interface: Postroom's, and those of its peers, as each documents them.

Every job calls `on_job` with its payload, a short text. Peers are optional; see `PEERS`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

from postroom.adapters.compose import is_database
from postroom.adapters.compose.connect import connect
from postroom.application.messages import NewMessage
from postroom.application.operations.mailbox import Mailbox
from postroom.application.threads import cancel_and_wait
from postroom.application.workers.worker import Worker
from tests.benchmarks.throughput import LIMITS, POLICY

NAME = "bench"
BATCH = 1_000
CONNECTIONS = 8
OnJob = Callable[[str], None]


class JobQueue(Protocol):
    """A queue, as its worker and as a sender of jobs uses it."""

    async def insert(self, payloads: Sequence[str]) -> None:
        """Send many jobs at once."""

    async def send(self, payload: str) -> None:
        """Send one job; return when it is durable."""

    async def work(self, concurrency: int, on_job: OnJob) -> None:
        """Handle jobs until cancelled."""


OpenQueue = Callable[[str], AbstractAsyncContextManager[JobQueue]]
"""Open the queue in a store, which is migrated if it is new."""


class _Postroom:
    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    async def insert(self, payloads: Sequence[str]) -> None:
        for some in _batches(payloads):
            answers = await self._mailbox.send_batch([_message(each) for each in some])
            assert not any(isinstance(answer, Exception) for answer in answers)

    async def send(self, payload: str) -> None:
        await self._mailbox.send_message(_message(payload))

    async def work(self, concurrency: int, on_job: OnJob) -> None:
        worker = Worker()

        @worker.consumer(NAME, concurrency=concurrency)
        async def handle(payload: str) -> None:
            on_job(payload)

        await worker.run(self._mailbox, stop_ms=0)


def _message(payload: str) -> NewMessage:
    return NewMessage(topic=NAME, payload=payload.encode())


@asynccontextmanager
async def open_postroom(store: str) -> AsyncIterator[JobQueue]:
    """Use a mailbox by `connect`: its owner is the process that connects first."""
    if is_database(store):
        from postroom.adapters.compose.maintenance import migrate_store

        migrate_store(store)
    async with connect(store, default_policy=POLICY, limits=LIMITS) as mailbox:
        yield _Postroom(mailbox)


class _PgQueuer:
    def __init__(self, driver: Any, queries: Any) -> None:
        self._driver = driver
        self._queries = queries

    async def insert(self, payloads: Sequence[str]) -> None:
        for some in _batches(payloads):
            await self._queries.enqueue([NAME] * len(some), [each.encode() for each in some], [0] * len(some))

    async def send(self, payload: str) -> None:
        await self._queries.enqueue(NAME, payload.encode())

    async def work(self, concurrency: int, on_job: OnJob) -> None:
        from pgqueuer import PgQueuer

        manager = PgQueuer(self._driver)

        async def handle(job: Any) -> None:
            on_job(job.payload.decode())

        manager.entrypoint(NAME)(handle)
        # It wants room for two batches.
        await manager.qm.run(batch_size=concurrency, max_concurrent_tasks=2 * concurrency)


@asynccontextmanager
async def _open_pgqueuer(url: str) -> AsyncIterator[JobQueue]:
    import asyncpg
    from pgqueuer.db import AsyncpgPoolDriver
    from pgqueuer.queries import Queries

    async with asyncpg.create_pool(url, min_size=CONNECTIONS, max_size=CONNECTIONS) as pool:
        driver = AsyncpgPoolDriver(pool)
        queries = Queries(driver)
        if not await queries.has_table(queries.qbe.settings.queue_table):
            await queries.install()
        yield _PgQueuer(driver, queries)


class _Procrastinate:
    def __init__(self, app: Any) -> None:
        self._app = app
        self._on_job: OnJob = lambda _: None

        async def handle(payload: str) -> None:
            self._on_job(payload)

        self._task = app.task(name=NAME)(handle)

    async def insert(self, payloads: Sequence[str]) -> None:
        for some in _batches(payloads):
            await self._task.batch_defer_async(*({"payload": each} for each in some))

    async def send(self, payload: str) -> None:
        await self._task.defer_async(payload=payload)

    async def work(self, concurrency: int, on_job: OnJob) -> None:
        self._on_job = on_job
        await self._app.run_worker_async(concurrency=concurrency, install_signal_handlers=False)


@asynccontextmanager
async def _open_procrastinate(url: str) -> AsyncIterator[JobQueue]:
    import procrastinate

    connector = procrastinate.PsycopgConnector(conninfo=url, min_size=CONNECTIONS, max_size=CONNECTIONS)
    app = procrastinate.App(connector=connector)
    queue = _Procrastinate(app)
    async with app.open_async():
        if not await app.check_connection_async():
            await app.schema_manager.apply_schema_async()
        yield queue


@dataclass
class AwaJob:
    payload: str


class _Awa:
    def __init__(self, client: Any) -> None:
        self._client = client

    async def insert(self, payloads: Sequence[str]) -> None:
        for some in _batches(payloads):
            await self._client.insert_many_copy([AwaJob(each) for each in some], queue=NAME)

    async def send(self, payload: str) -> None:
        await self._client.insert(AwaJob(payload), queue=NAME)

    async def work(self, concurrency: int, on_job: OnJob) -> None:
        async def handle(job: Any) -> None:
            on_job(job.args.payload)

        self._client.task(AwaJob, queue=NAME)(handle)
        await self._client.start([(NAME, concurrency)])
        try:
            await asyncio.Event().wait()
        finally:
            await self._client.shutdown()


@asynccontextmanager
async def _open_awa(url: str) -> AsyncIterator[JobQueue]:
    import awa

    client = awa.AsyncClient(url, max_connections=CONNECTIONS)
    await client.migrate()
    try:
        yield _Awa(client)
    finally:
        await client.close()


class _Oban:
    def __init__(self, pool: Any, client: Any) -> None:
        self._pool = pool
        self._client = client
        self._on_job: OnJob = lambda _: None
        queue = self

        class Handle:
            async def process(self, job: Any) -> None:
                queue._on_job(job.args["payload"])

        from oban import worker

        self._worker: Any = worker(queue=NAME)(Handle)

    async def insert(self, payloads: Sequence[str]) -> None:
        for some in _batches(payloads):
            await self._client.enqueue_many([self._worker.new({"payload": each}) for each in some])

    async def send(self, payload: str) -> None:
        await self._client.enqueue(self._worker.new({"payload": payload}))

    async def work(self, concurrency: int, on_job: OnJob) -> None:
        from oban import Oban

        self._on_job = on_job
        async with Oban(pool=self._pool, queues={NAME: concurrency}, shutdown_grace_period=0):
            await asyncio.Event().wait()


@asynccontextmanager
async def _open_oban(url: str) -> AsyncIterator[JobQueue]:
    from oban import Oban
    from oban.schema import install

    pool = await Oban.create_pool(url, min_size=CONNECTIONS, max_size=CONNECTIONS)
    async with pool:
        async with pool.connection() as connection:
            cursor = await connection.execute("SELECT to_regclass('oban_jobs') IS NULL")
            ((is_new,),) = await cursor.fetchall()
        if is_new:
            await install(pool)
        yield _Oban(pool, Oban(pool=pool))


PEERS: dict[str, tuple[OpenQueue, tuple[str, ...]]] = {
    "pgqueuer": (_open_pgqueuer, ("pgqueuer", "asyncpg")),
    "procrastinate": (_open_procrastinate, ("procrastinate",)),
    "awa": (_open_awa, ("awa",)),
    "oban": (_open_oban, ("oban",)),
}
"""Peers on PostgreSQL, and the packages that each needs."""


def installed_queues(tell: Callable[[str], None]) -> dict[str, OpenQueue]:
    """Return Postroom and those of its peers that are installed (dependency group `dev`)."""
    queues: dict[str, OpenQueue] = {"postroom": open_postroom}
    for name, (open_queue, packages) in PEERS.items():
        missing = [package for package in packages if find_spec(package) is None]
        if missing:
            tell(f"{name} is not measured: {', '.join(missing)} is not installed")
        else:
            queues[name] = open_queue
    return queues


@asynccontextmanager
async def working(queue: JobQueue, concurrency: int, on_job: OnJob) -> AsyncIterator[None]:
    """Run the worker of a queue while the context lasts."""
    work = asyncio.create_task(queue.work(concurrency, on_job))
    try:
        yield
    finally:
        if work.done():
            work.result()
        await cancel_and_wait(work)


def _batches(payloads: Sequence[str]) -> Iterator[Sequence[str]]:
    return (payloads[start : start + BATCH] for start in range(0, len(payloads), BATCH))
