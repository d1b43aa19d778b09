"""Throughput and CPU of ordered inbox workers beside workers that are not, in one run (ADR 0088)."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
import psycopg

from postroom.adapters.compose.inbox import InboxSettings, open_worker
from postroom.adapters.compose.maintenance import migrate_messaging
from postroom.adapters.compose.outbox import MessagingSettings, NatsSettings
from postroom.adapters.memory.store import FunctionEventHandler
from postroom.adapters.nats.definitions import ConsumerDefinition
from postroom.application.ports.inbox import HandlerRequest
from tests.benchmarks.figures import Figures, Stopwatch
from tests.benchmarks.messaging import AGGREGATES, CONTEXT, PAYLOAD, make_streams
from tests.benchmarks.servers import nats_server, postgres_server
from tests.support.servers.nats import NatsServer
from tests.support.servers.postgres import PostgresServer

EVENTS = 20_000
WORKERS = (1, 2, 8)
POLL_SECONDS = 0.05
PROCESSED = "SELECT count(*) FROM inbox_messages WHERE processed_at IS NOT NULL"
TICKS = os.sysconf("SC_CLK_TCK")


class Run(NamedTuple):
    """What some workers took for all events.

    Arguments:
        workers_us, servers_us: CPU time per event of the workers, and of PostgreSQL and NATS.
    """

    seconds: float
    workers_us: float
    servers_us: float


async def work(nats_url: str, database: str, durable: str, ordered: str) -> None:
    """Handle events from a line on stdin until SIGTERM, and print the CPU seconds that this took."""
    print("ready", flush=True)
    sys.stdin.readline()
    before = time.process_time()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    async def handle(_: HandlerRequest) -> None: ...

    settings = InboxSettings(ordered=bool(ordered), cleanup_every_ms=0)
    consumer = ConsumerDefinition(stream="BENCH_EVENTS", durable=durable, max_ack_pending=1_000)
    messaging, nats = MessagingSettings(database, CONTEXT), NatsSettings(nats_url)
    async with open_worker(
        messaging, nats, consumer, settings, handler=FunctionEventHandler(handle)
    ) as worker:
        await worker.run(stop)
    print(time.process_time() - before, flush=True)


async def publish_events(server: NatsServer) -> None:
    """Publish events of all aggregates in turn, as relays do."""
    import nats

    client = await nats.connect(server.url)
    stream = client.jetstream(publish_async_max_pending=2_000)
    data = msgspec.json.encode(PAYLOAD)
    answers = [
        await stream.publish_async(
            f"{CONTEXT}.event.order_placed.v1",
            data,
            headers={"Nats-Msg-Id": f"e-{n}", "Aggregate-Type": "order", "Aggregate-Id": f"{n % AGGREGATES}"},
        )
        for n in range(EVENTS)
    ]
    await asyncio.gather(*answers)
    await client.close()


def handle_all(nats: NatsServer, postgres: PostgresServer, workers: int, *, ordered: bool) -> Run:
    """Have so many worker processes handle all events, with a database and a consumer of their own."""
    database = postgres.create_database()
    migrate_messaging(database)
    durable = f"bench_{workers}_{'ordered' if ordered else 'unordered'}"
    arguments = [nats.url, database, durable, "ordered" if ordered else ""]
    command = [sys.executable, "-m", "tests.benchmarks.ordered", *arguments]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(workers)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    before = cpu_seconds(postgres.pid) + cpu_seconds(nats.pid)
    with Stopwatch() as handling, psycopg.connect(database, autocommit=True) as connection:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        while connection.execute(PROCESSED).fetchall() < [(EVENTS,)]:
            time.sleep(POLL_SECONDS)
    servers = cpu_seconds(postgres.pid) + cpu_seconds(nats.pid) - before
    for process in processes:
        process.send_signal(signal.SIGTERM)
    used = [float(process.communicate()[0]) for process in processes]
    return Run(handling.seconds, 1e6 * sum(used) / EVENTS, 1e6 * servers / EVENTS)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, its children, and those that ended."""
    own = _times(pid)
    children = [_times(int(child)) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return (sum(own) + sum(sum(each[:2]) for each in children)) / TICKS


def _times(pid: int) -> tuple[int, ...]:
    """Return user and system time, and those of children that ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return (0, 0, 0, 0)
    return tuple(int(each) for each in fields[11:15])


def _measure(figures: Figures, folder: Path, _: int) -> None:
    runs: dict[str, list[Run]] = {}
    with postgres_server(folder) as postgres:
        for number in range(figures.runs):
            with nats_server(folder / f"ordered-{number}") as nats:
                asyncio.run(make_streams(nats))
                asyncio.run(publish_events(nats))
                for workers in WORKERS:
                    for name in ("ordered", "unordered"):
                        run = handle_all(nats, postgres, workers, ordered=name == "ordered")
                        runs.setdefault(f"inbox.{name}.{workers}", []).append(run)
    for name, values in runs.items():
        figures.add(name, median(EVENTS / each.seconds for each in values), "events/s")
        figures.add(f"{name}.cpu", median(each.workers_us for each in values), "us")
        figures.add(f"{name}.servers_cpu", median(each.servers_us for each in values), "us")
    for workers in WORKERS:
        pairs = zip(runs[f"inbox.ordered.{workers}"], runs[f"inbox.unordered.{workers}"], strict=True)
        ratios = [other.seconds / one.seconds for one, other in pairs]
        figures.add(f"inbox.ordered.{workers}.of_unordered", median(ratios), "times")


MEASUREMENTS = {"inbox.ordered": _measure}


if __name__ == "__main__":
    asyncio.run(work(*sys.argv[1:]))
