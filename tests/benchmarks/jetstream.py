"""Logs in JetStream side by side with other stores, and with a work queue of JetStream itself, in one run.

The servers are one (`r1`) or a cluster of three (`r3`) on this machine; `synced` ones have `sync_interval:
always`, as SQLite and PostgreSQL sync every commit here, and a stream that loses nothing needs it. All
servers share the disk and the cores, so three of them show what replication costs, not what three hosts do.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from itertools import count, product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import nats
from nats.js.api import ConsumerConfig, RetentionPolicy, StreamConfig

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.compose.store import open_store
from postroom.application.messages import NewMessage
from postroom.domain.commit import Commit
from postroom.domain.errors import PostroomError
from tests.benchmarks.figures import Figures, Stopwatch
from tests.benchmarks.history import CHUNK, generated, live
from tests.benchmarks.peers import BATCH, PAYLOAD_BYTES, life_rate, open_postroom, open_postroom_queue
from tests.benchmarks.servers import postgres_server
from tests.benchmarks.throughput import LIMITS, POLICY, TOPIC, new_messages
from tests.support.commits import as_appended
from tests.support.servers.nats import NatsServer
from tests.support.servers.nats_cluster import NatsCluster

SINGLES, APPENDS, LIVES, WORK_QUEUE_LIVES = 1_000, 500, 50_000, 10_000
FAIL_OVER_SECONDS = 60
FAIL_OVERS = 3
LIVES_GOAL, FAIL_OVER_GOAL, BYTES_GOAL = 15_000, 8, 1.3
SUBJECT = "work.orders"
_names = count()


@contextmanager
def _servers(folder: Path, replicas: int, *, is_synced: bool) -> Iterator[str]:
    """Run one or three servers, and yield their addresses without the scheme."""
    home = folder / f"nats-{next(_names)}"
    with ExitStack() as opened:
        server: NatsServer | NatsCluster
        if replicas == 1:
            server = opened.enter_context(NatsServer(home, sync_always=is_synced))
        else:
            server = opened.enter_context(NatsCluster(home, sync_always=is_synced))
        yield server.url.replace("nats://", "")


def _store(servers: str) -> str:
    return f"nats://{servers}/BENCH_{next(_names)}"


class _WorkQueue:
    """A stream with the retention of a work queue and a pull consumer with explicit acks, by nats-py."""

    def __init__(self, jetstream: Any, consumer: Any) -> None:
        self._jetstream = jetstream
        self._consumer = consumer
        self._payload = random.Random(1).randbytes(PAYLOAD_BYTES)

    async def send(self, size: int = BATCH) -> None:
        """Publish a batch; each message is confirmed by the server."""
        await asyncio.gather(*(self._jetstream.publish(SUBJECT, self._payload) for _ in range(size)))

    async def live(self, size: int = BATCH) -> int:
        """Fetch a batch, and ack each message with a confirmation, as Postroom's acks have one."""
        try:
            messages = await self._consumer.fetch(size, timeout=0.5)
        except TimeoutError:  # of nats-py, too
            return 0
        await asyncio.gather(*(message.ack_sync(timeout=30) for message in messages))
        return len(messages)


@asynccontextmanager
async def _open_work_queue(servers: str, replicas: int) -> AsyncIterator[_WorkQueue]:
    client = await nats.connect([f"nats://{each}" for each in servers.split(",")])
    try:
        jetstream = client.jetstream(timeout=30)
        config = StreamConfig(
            name="WORK", subjects=[SUBJECT], retention=RetentionPolicy.WORK_QUEUE, num_replicas=replicas
        )
        await jetstream.add_stream(config)
        consumer = await jetstream.pull_subscribe(
            SUBJECT, durable="workers", config=ConsumerConfig(max_ack_pending=100_000)
        )
        yield _WorkQueue(jetstream, consumer)
    finally:
        await client.close()


async def _single_lives(store: str) -> float:
    """Return lives a second of a caller that sends, receives and acks messages one by one."""
    async with open_postroom(store) as mailbox:
        messages = new_messages(SINGLES)
        with Stopwatch() as living:
            for message in messages:
                await mailbox.send_message(message)
                (received,) = await mailbox.receive_messages(TOPIC, max_messages=1)
                await received.ack()
    return SINGLES / living.seconds


async def _batch_lives(store: str) -> float:
    async with open_postroom_queue(store) as queue:
        return await life_rate(store, queue)


def _append_times(store: str) -> list[float]:
    """Return how long appends of one commit with one event take, in ms."""

    async def make() -> list[Commit]:
        async with open_mailbox(store, default_policy=POLICY, limits=LIMITS) as mailbox:
            for message in new_messages(APPENDS):
                await mailbox.send_message(message)
        log = open_store(store).existing_log(mailbox.name)
        try:
            return as_appended(log.commits())
        finally:
            log.close()

    commits = asyncio.run(make())
    log = open_store(f"{store.partition('?')[0]}_COPY").event_log("copy@bench")
    try:
        seconds = []
        for commit in commits:
            began = time.perf_counter()
            log.append([commit])
            seconds.append((time.perf_counter() - began) * 1_000)
        return seconds
    finally:
        log.close()


def _measure_rates(figures: Figures, folder: Path, _: int) -> None:
    """Measure lives and appends on one server and on three, with and without syncing every write."""
    for replicas, is_synced in product((1, 3), (True, False)):
        name = f"jetstream.r{replicas}.{'synced' if is_synced else 'unsynced'}"
        with _servers(folder, replicas, is_synced=is_synced) as servers:
            rates = [asyncio.run(_batch_lives(_store(servers))) for _ in range(figures.runs)]
            goal = LIVES_GOAL if replicas == 1 and is_synced else None
            figures.add(f"{name}.lives.{BATCH}", median(rates), "messages/s", goal)
            figures.add(f"{name}.lives.1", asyncio.run(_single_lives(_store(servers))), "messages/s")
            _add_appends(figures, name, _store(servers))
            in_batches, singly = _work_queue(servers, replicas)
            figures.add(f"{name}.work_queue.lives.{BATCH}", in_batches, "messages/s")
            figures.add(f"{name}.work_queue.lives.1", singly, "messages/s")


def _add_appends(figures: Figures, name: str, store: str) -> None:
    cuts = quantiles(_append_times(store), n=100)
    figures.add(f"{name}.append.p50", cuts[49], "ms")
    figures.add(f"{name}.append.p99", cuts[98], "ms")


def _work_queue(servers: str, replicas: int) -> tuple[float, float]:
    """Return lives a second of a work queue, in batches and one by one."""

    async def main() -> tuple[float, float]:
        async with _open_work_queue(servers, replicas) as queue:
            in_batches = await life_rate("", queue, WORK_QUEUE_LIVES)
            with Stopwatch() as living:
                for _ in range(SINGLES):
                    await queue.send(1)
                    assert await queue.live(1) == 1
        return in_batches, SINGLES / living.seconds

    return asyncio.run(main())


def _measure_others(figures: Figures, folder: Path, _: int) -> None:
    """Measure one server that syncs every write, SQLite and PostgreSQL in turns: all sync every commit."""
    rates: dict[str, list[float]] = {}
    with postgres_server(folder) as server, _servers(folder, 1, is_synced=True) as servers:
        stores: dict[str, Callable[[], str]] = {
            "jetstream": lambda: _store(servers),
            "sqlite": lambda: str(folder / f"beside-{next(_names)}.db"),
            "postgres": server.create_database,
        }
        for _ in range(figures.runs):
            for name, new in stores.items():
                rates.setdefault(f"{name}.lives.{BATCH}", []).append(asyncio.run(_batch_lives(new())))
                rates.setdefault(f"{name}.lives.1", []).append(asyncio.run(_single_lives(new())))
    for name, measured in rates.items():
        figures.add(f"jetstream.beside.{name}", median(measured), "messages/s")


def _measure_fail_over(figures: Figures, folder: Path, _: int) -> None:
    """Measure how long sends pause when the leader of the log is killed."""

    async def pauses(store: str, cluster: NatsCluster) -> list[float]:
        stream, seconds = store.rpartition("/")[2], []
        async with open_mailbox(store, default_policy=POLICY, limits=LIMITS) as mailbox:
            for number in range(FAIL_OVERS):
                message = NewMessage(topic=TOPIC, payload=b"after", idem_key=str(number))
                await mailbox.send_message(NewMessage(topic=TOPIC, payload=b"before"))
                leader = await asyncio.to_thread(cluster.leader, stream)
                leader.kill()
                with Stopwatch() as pausing:
                    async with asyncio.timeout(FAIL_OVER_SECONDS):
                        while not await _is_sent(mailbox, message):
                            await asyncio.sleep(0.01)
                seconds.append(pausing.seconds)
                await asyncio.to_thread(cluster.heal)
        return seconds

    with NatsCluster(folder / "fail-over") as cluster:
        found = asyncio.run(pauses(_store(cluster.url.replace("nats://", "")), cluster))
    figures.add("jetstream.r3.fail_over", median(found), "s", FAIL_OVER_GOAL)
    figures.add("jetstream.r3.fail_over.longest", max(found), "s")


async def _is_sent(mailbox: OwnedMailbox, message: NewMessage) -> bool:
    try:
        await mailbox.send_message(message)
    except PostroomError:
        return False
    return True


def _measure_bytes(figures: Figures, folder: Path, _: int) -> None:
    """Measure what a life takes on the disk of one replica, beside a SQLite file with the same lives."""

    async def in_batches(store: str) -> None:
        async with open_mailbox(store, default_policy=POLICY, limits=LIMITS) as mailbox:
            for start in range(0, LIVES, CHUNK):
                await live(mailbox, generated(start, min(CHUNK, LIVES - start)))

    uses: list[tuple[str, Callable[[str], Coroutine[Any, Any, object]], int]] = [
        ("life", in_batches, LIVES),
        ("single_life", _single_lives, SINGLES),
    ]
    for name, use, lives in uses:
        file, home = folder / f"{name}-beside.db", folder / f"{name}-bytes"
        asyncio.run(use(str(file)))
        sqlite = sum(path.stat().st_size for path in (file, Path(f"{file}-wal")) if path.exists()) / lives
        with NatsServer(home) as server:
            asyncio.run(use(_store(server.url.replace("nats://", ""))))
        stored = (
            sum(path.stat().st_size for path in (home / "jetstream").rglob("*") if path.is_file()) / lives
        )
        figures.add(f"jetstream.bytes.sqlite.{name}", sqlite, "bytes")
        figures.add(f"jetstream.bytes.{name}", stored, "bytes")
        figures.add(f"jetstream.bytes.{name}.of_sqlite", stored / sqlite, "x", BYTES_GOAL)


MEASUREMENTS = {
    "jetstream.r1": _measure_rates,
    "jetstream.r3.synced": _measure_rates,
    "jetstream.r3.unsynced": _measure_rates,
    "jetstream.beside": _measure_others,
    "jetstream.r3.fail_over": _measure_fail_over,
    "jetstream.bytes": _measure_bytes,
}
