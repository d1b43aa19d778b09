"""A stream, an inbox, and handlers for the tests of the inbox worker."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import msgspec
import nats
import psycopg
from nats.aio.client import Client

from postroom.adapters.compose.inbox import (
    InboxSettings,
    MessagingSettings,
    NatsSettings,
    open_dead_letters,
    open_worker,
)
from postroom.adapters.memory.store import FunctionEventHandler
from postroom.adapters.nats.definitions import ConsumerDefinition
from postroom.application.inbox.dead_letter_admin import DeadLetterAdmin
from postroom.application.inbox.dead_letters import DeadLetterRecord
from postroom.application.inbox.worker import InboxWorker
from postroom.application.ports.inbox import HandlerRequest
from tests.support.waiting import SECONDS

EVENTS, DLQ = "SHOP_EVENTS", "SEA_DLQ"
SUBJECT = "shop.event.order_placed.v1"
CONSUMER = ConsumerDefinition(
    stream=EVENTS,
    durable="sea__from_shop",
    filter_subjects=("shop.event.>",),
    ack_wait_ms=30_000,
    max_deliver=3,
    max_ack_pending=50,
)
SOON = InboxSettings(backoff_base_ms=5, backoff_max_ms=20, cleanup_every_ms=0)
Handler = Callable[[HandlerRequest], Coroutine[Any, Any, Any]]
WORK_SECONDS = 300


class World:
    """A NATS server with streams, and a database with an inbox."""

    def __init__(self, nats_url: str, database: str, client: Client) -> None:
        self.nats = NatsSettings(nats_url)
        self.messaging = MessagingSettings(database, "sea")
        self.client = client
        self.stream = client.jetstream(timeout=SECONDS)

    async def make_streams(self, **options: Any) -> None:
        await self.stream.add_stream(name=EVENTS, subjects=["shop.event.>"], **options)
        await self.stream.add_stream(name=DLQ, subjects=["sea.dlq.>"])

    async def publish(
        self,
        payload: Any,
        *,
        id_: str | None = None,
        aggregate: str | None = None,
        subject: str = SUBJECT,
        headers: dict[str, str] | None = None,
    ) -> str:
        """Publish an event as a relay does, and return its message id."""
        id_ = str(uuid4()) if id_ is None else id_
        named = {"Nats-Msg-Id": id_} if id_ else {}
        named |= {"Aggregate-Type": "order", "Aggregate-Id": aggregate} if aggregate else {}
        data = payload if isinstance(payload, bytes) else msgspec.json.encode(payload)
        await self.stream.publish(subject, data, headers=named | (headers or {}))
        return id_

    @asynccontextmanager
    async def worker(
        self,
        handler: Handler | None,
        settings: InboxSettings = SOON,
        consumer: ConsumerDefinition = CONSUMER,
    ) -> AsyncIterator[InboxWorker]:
        asked = None if handler is None else FunctionEventHandler(handler)
        async with open_worker(self.messaging, self.nats, consumer, settings, handler=asked) as worker:
            yield worker

    async def work(
        self,
        handler: Handler | None,
        settings: InboxSettings = SOON,
        consumer: ConsumerDefinition = CONSUMER,
    ) -> InboxWorker:
        """Have a worker deal with all there is, however often it comes again, within `WORK_SECONDS`."""
        async with asyncio.timeout(WORK_SECONDS), self.worker(handler, settings, consumer) as worker:
            while True:
                await worker.run(asyncio.Event(), until_idle=True)
                info = await self.stream.consumer_info(consumer.stream, consumer.durable)
                if not info.num_pending and not info.num_ack_pending:
                    return worker

    @asynccontextmanager
    async def admin(
        self, handler: Handler | None, settings: InboxSettings = SOON
    ) -> AsyncIterator[DeadLetterAdmin]:
        asked = None if handler is None else FunctionEventHandler(handler)
        async with open_dead_letters(
            self.messaging, self.nats, settings, can_redrive=handler is not None, handler=asked
        ) as admin:
            yield admin

    async def dead_letters(self) -> list[DeadLetterRecord]:
        async with self.admin(None) as admin:
            return [letter.record for letter in await admin.list()]

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.messaging.database) as connection:
            return connection.execute(query.encode()).fetchall()

    def inbox(self) -> list[tuple[bool, bool, int]]:
        """Return of each message, in the order received: whether processed, whether dead, attempts."""
        return self.rows(
            "SELECT processed_at IS NOT NULL, dead_lettered_at IS NOT NULL, attempts FROM inbox_messages "
            "ORDER BY received_at"
        )


@asynccontextmanager
async def opened_world(nats_url: str, database: str) -> AsyncIterator[World]:
    client = await nats.connect(nats_url, max_reconnect_attempts=-1, reconnect_time_wait=0.1)
    try:
        yield World(nats_url, database, client)
    finally:
        await client.close()
