"""Throughput from the outbox to the stream, from the stream to the inbox, and into the archive."""

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import msgspec
import psycopg
from aiohttp import web

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.brokers import open_streams
from postroom.adapters.compose.inbox import InboxSettings, open_worker
from postroom.adapters.compose.ingest import Namespace, NatsSource, open_ingester
from postroom.adapters.compose.maintenance import migrate_messaging, migrate_store
from postroom.adapters.compose.outbox import MessagingSettings, NatsSettings, NewEvent, Outbox, open_relay
from postroom.adapters.nats.definitions import ConsumerDefinition, StreamDefinition
from postroom.application.threads import exempt_heap
from postroom.domain.envelope.validation import ValidationMode
from tests.benchmarks.figures import Figures, Stopwatch
from tests.benchmarks.servers import nats_server, postgres_server
from tests.benchmarks.throughput import LIMITS
from tests.support.envelopes import build_envelope
from tests.support.servers.nats import NatsServer

EVENTS = 20_000
AGGREGATES = 2_000
RECORDED_AT_ONCE = 500
PAYLOAD = {"data": "x" * 200}
CONCURRENCY = 50
BATCH = 20
"""Messages of a request to the handler, where they are posted in batches."""
ENVELOPES = 100_000
RELAY_GOAL, INGEST_GOAL = 0.15, 0.8
"""How many times the rate at which a bare client publishes as many messages to the same server."""
RELAY_RATE_GOAL, CONSUME_RATE_GOAL = 15_000, 5_000
"""Of two quiet cores; the worker's, of messages in batches."""
CONTEXT = "bench"
SIGNING_KEY = "benchmark-key-of-thirty-two-bytes!"
STREAMS = [
    StreamDefinition(name="BENCH_EVENTS", subjects=(f"{CONTEXT}.event.>",)),
    StreamDefinition(name="BENCH_DLQ", subjects=(f"{CONTEXT}.dlq.>",)),
    StreamDefinition(name="ARCHIVE", subjects=("archive.>",)),
]


def record_events(database: str, count: int) -> None:
    """Record events of `AGGREGATES` aggregates in an outbox, as services do."""
    outbox = Outbox()
    with psycopg.connect(database) as connection:
        for start in range(0, count, RECORDED_AT_ONCE):
            events = [
                NewEvent(
                    aggregate_type="order",
                    aggregate_id=str(n % AGGREGATES),
                    event_type="order_placed",
                    payload=PAYLOAD,
                )
                for n in range(start, min(start + RECORDED_AT_ONCE, count))
            ]
            outbox.record(connection, *events)
            connection.commit()


async def make_streams(server: NatsServer) -> None:
    """Make the benchmark's streams."""
    async with open_streams(NatsSettings(server.url)) as streams:
        for definition in STREAMS:
            await streams.create_stream(definition)


def relay_all(database: str, server: NatsServer) -> float:
    """Publish what is in an outbox, and return the seconds it took."""

    async def main() -> float:
        async with open_relay(MessagingSettings(database, CONTEXT), NatsSettings(server.url)) as relay:
            with exempt_heap(), Stopwatch() as relaying:  # as the command does, for hours
                while await relay.relay_once():
                    pass
            assert relay.counts.published == EVENTS
            return relaying.seconds

    return asyncio.run(main())


def consume_all(database: str, server: NatsServer, handler: str, batch: int = 1) -> float:
    """Take the published events to an HTTP handler, and return the seconds it took."""

    async def main() -> float:
        settings = InboxSettings(
            handler=handler,
            allow=(f"{handler} 127.0.0.0/8",),
            signing_key=SIGNING_KEY,
            batch=batch,
            concurrency=CONCURRENCY * batch,
        )
        consumer = ConsumerDefinition(
            stream="BENCH_EVENTS", durable=f"bench__{batch}", max_ack_pending=2 * CONCURRENCY * batch
        )
        messaging, nats = MessagingSettings(database, CONTEXT), NatsSettings(server.url)
        async with open_worker(messaging, nats, consumer, settings) as worker:
            with exempt_heap(), Stopwatch() as consuming:
                await worker.run(asyncio.Event(), until_idle=True)
            assert worker.counts["processed"] == EVENTS
            return consuming.seconds

    return asyncio.run(main())


@contextmanager
def http_handler() -> Iterator[str]:
    """Run a handler in a process of its own that accepts every message; yield its URL."""
    receiver, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(sender,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{receiver.recv()}/handle"
    finally:
        process.terminate()
        process.join()


def _serve(port: "multiprocessing.connection.Connection") -> None:
    async def handle(request: web.Request) -> web.Response:
        body = await request.read()
        if not body.startswith(b"["):
            return web.Response()
        return web.json_response([{"status": 200} for _ in msgspec.json.decode(body)])

    async def main() -> None:
        application = web.Application()
        application.router.add_post("/handle", handle)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(main())


async def publish_envelopes(server: NatsServer, count: int) -> float:
    """Publish envelopes to the archive's subjects, many at a time, and return the seconds it took."""
    import nats

    client = await nats.connect(server.url)
    stream = client.jetstream(publish_async_max_pending=2_000)
    payload = b"x" * 200
    envelopes = [
        build_envelope(
            message_id=f"bench-{n}",
            topic=f"bench.t{n % 20}",
            namespace="bench",
            published_at_us=1_700_000_000_000_000 + n,
            payload=payload,
            attrs={"region": b"eu"},
            principal=f"user-{n % 1_000}",
        )
        for n in range(count)
    ]
    with Stopwatch() as publishing:
        answers = [
            await stream.publish_async(f"archive.t{n % 20}", envelope) for n, envelope in enumerate(envelopes)
        ]
        await asyncio.gather(*answers)
    await client.close()
    return publishing.seconds


def ingest_all(store: str, server: NatsServer) -> float:
    """Archive the messages of the stream, and return the seconds it took."""

    async def main() -> float:
        namespace = Namespace(
            name="bench",
            description=None,
            mailbox="bench@local",
            store=store,
            source=NatsSource(url=server.url, subject="archive.>", consumer_group="bench"),
            envelope_validation=ValidationMode.STRICT,
            payload_schemas=(),
            batch_size=500,
            max_retries=3,
            history_retention_ms=None,
            max_store_bytes=None,
        )
        async with (
            open_mailbox(store, namespace.mailbox, mode="archive", limits=LIMITS) as postroom,
            open_ingester(namespace, postroom) as ingester,
        ):
            with exempt_heap(), Stopwatch() as ingesting:
                running = asyncio.create_task(ingester.run())
                while ingester.counts.stored < ENVELOPES and not running.done():
                    await asyncio.sleep(0.005)
            ingester.stop()
            counts = await running
            assert (counts.stored, counts.duplicates) == (ENVELOPES, 0)
            return ingesting.seconds

    return asyncio.run(main())


def _measure_messaging(figures: Figures, folder: Path, _: int) -> None:
    relayed, ratios = [], []
    consumed: dict[str, list[float]] = {"inbox.consume": [], "inbox.consume.batch": []}
    with postgres_server(folder) as postgres, http_handler() as handler:
        for run in range(figures.runs):
            with nats_server(folder / f"messaging-{run}") as nats:
                database = postgres.create_database()
                migrate_messaging(database)
                asyncio.run(make_streams(nats))
                record_events(database, EVENTS)
                seconds = relay_all(database, nats)
                relayed.append(EVENTS / seconds)
                ratios.append(asyncio.run(publish_envelopes(nats, EVENTS)) / seconds)
                for name, rates in consumed.items():
                    if figures.wants(name):
                        inbox = postgres.create_database()
                        migrate_messaging(inbox)
                        batch = BATCH if name.endswith("batch") else 1
                        rates.append(EVENTS / consume_all(inbox, nats, handler, batch))
    figures.add("outbox.relay", median(relayed), "events/s", RELAY_RATE_GOAL)
    figures.add("outbox.relay.of_bare_publish", median(ratios), "times", RELAY_GOAL)
    for name, rates in consumed.items():
        if rates:
            goal = CONSUME_RATE_GOAL if name.endswith("batch") else None
            figures.add(name, median(rates), "events/s", goal)


def _measure_ingestion(figures: Figures, folder: Path, _: int) -> None:
    rates: dict[str, list[float]] = {"sqlite": [], "postgres": []}
    ratios: dict[str, list[float]] = {store: [] for store in rates}
    with postgres_server(folder) as postgres:
        for run in range(figures.runs):
            for store, values in rates.items():
                if not figures.wants(f"ingest.{store}"):
                    continue
                with nats_server(folder / f"ingest-{store}-{run}") as nats:
                    url = str(folder / f"ingest-{run}.db")
                    if store == "postgres":
                        url = postgres.create_database()
                        migrate_store(url)
                    asyncio.run(make_streams(nats))
                    published = asyncio.run(publish_envelopes(nats, ENVELOPES))
                    ingested = ingest_all(url, nats)
                    values.append(ENVELOPES / ingested)
                    ratios[store].append(published / ingested)
    for store, values in rates.items():
        if values:
            figures.add(f"ingest.{store}", median(values), "messages/s")
            figures.add(f"ingest.{store}.of_bare_publish", median(ratios[store]), "times", INGEST_GOAL)


MEASUREMENTS: dict[str, Callable[[Figures, Path, int], None]] = {
    "outbox.relay": _measure_messaging,
    "inbox.consume": _measure_messaging,
    "ingest.sqlite": _measure_ingestion,
    "ingest.postgres": _measure_ingestion,
}
