"""A stream of envelopes, and what an archive holds of them."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

import nats
from nats.aio.client import Client
from nats.js.errors import ServiceUnavailableError

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.ingest import open_ingester
from postroom.adapters.compose.queries import read_mailbox
from postroom.application.ingest.ingester import Ingester
from postroom.application.ingest.namespace import IngestCounts, Namespace, NatsSource
from postroom.domain.envelope.validation import ValidationMode
from postroom.domain.message import MessageSent
from postroom.domain.names import message_id
from tests.support.stores import envelope
from tests.support.waiting import SECONDS

STREAM, SUBJECT, DURABLE, DEAD = "EVENTS", "acme.orders.placed", "archive", "dead.acme"
MAILBOX = "acme@archive"
IDLE_MS = 300


def namespace(url: str, store: str, **fields: object) -> Namespace:
    """Return what to ingest from where into where; fields of the source have its names."""
    source = {"subject": "acme.>", "consumer_group": DURABLE, "stream": STREAM}
    of_source = {name: fields.pop(name) for name in list(fields) if name in NatsSource.__struct_fields__}
    values: dict[str, object] = {
        "name": "acme",
        "description": None,
        "mailbox": MAILBOX,
        "store": store,
        "source": NatsSource(url=url, **(source | of_source)),  # type: ignore[arg-type]
        "envelope_validation": ValidationMode.STRICT,
        "payload_schemas": (),
        "batch_size": 50,
        "max_retries": 3,
        "history_retention_ms": None,
        "max_store_bytes": None,
    }
    return Namespace(**(values | fields))  # type: ignore[arg-type]


@asynccontextmanager
async def stream_of(url: str) -> AsyncIterator[Client]:
    """Be connected to a server that keeps the subjects `acme.>` and `dead.>`."""
    client = await nats.connect(url)
    try:
        for name, subject in ((STREAM, "acme.>"), ("DEAD", "dead.>")):
            await add_stream(client, name, subject)
        yield client
    finally:
        await client.close()


async def add_stream(client: Client, name: str, subject: str) -> None:
    """Add a stream as soon as the server's JetStream works, which may be later than its port."""
    async with asyncio.timeout(SECONDS):
        while True:
            with suppress(ServiceUnavailableError):
                await client.jetstream().add_stream(name=name, subjects=[subject])
                return
            await asyncio.sleep(0.05)


async def publish(client: Client, *bodies: bytes, subject: str = SUBJECT) -> None:
    """Let the stream store messages."""
    stream = client.jetstream()
    for start in range(0, len(bodies), 500):
        await asyncio.gather(*(stream.publish(subject, body) for body in bodies[start : start + 500]))


def envelopes(ids: Iterable[str]) -> list[bytes]:
    """Return an envelope of each id."""
    return [envelope(id_) for id_ in ids]


def stored_ids(store: str) -> list[str]:
    """Return the message ids of the archive in the order of its log."""
    with read_mailbox(store, MAILBOX) as reader:
        events = [record.event for record in reader.log.read()]
        return [
            message_id(event.stream, event.headers.message_id)
            for event in events
            if isinstance(event, MessageSent)
        ]


def stored(store: str) -> Counter[str]:
    """Count how often the archive holds each message id."""
    return Counter(stored_ids(store))


@asynccontextmanager
async def ingesting(what: Namespace) -> AsyncIterator[Ingester]:
    async with (
        open_mailbox(what.store, what.mailbox, mode="archive", durability="relaxed") as postroom,
        open_ingester(what, postroom) as ingester,
    ):
        yield ingester


async def ingest(what: Namespace) -> IngestCounts:
    async with ingesting(what) as ingester:
        return await ingester.run(idle_ms=IDLE_MS)


async def unacked(client: Client) -> int:
    info = await client.jetstream().consumer_info(STREAM, DURABLE)
    return (info.num_ack_pending or 0) + (info.num_pending or 0)


async def dead_letters(client: Client) -> list[tuple[bytes, dict[str, str]]]:
    stream = client.jetstream()
    last = (await stream.stream_info("DEAD")).state.last_seq
    found = [await stream.get_msg("DEAD", seq=number + 1) for number in range(last)]
    return [(each.data or b"", each.headers or {}) for each in found]
