"""A worker that kills itself at one point: `inbox_crash_worker.py NATS DATABASE POINT MAX_DELIVER [URL]`.

A point is `part.method.before` or `.after`, such as `inbox.insert.after`. With a URL, messages are posted
there in batches. Run without its folder on the path.
"""

import asyncio
import os
import signal
import sys
from typing import Any

import psycopg

from postroom.adapters.http.event_handler import HttpEventHandler
from postroom.adapters.memory.store import FunctionEventHandler
from postroom.adapters.nats.connection import connect
from postroom.adapters.nats.publisher import JetStreamPublisher
from postroom.adapters.nats.pull_consumer import PullConsumer
from postroom.adapters.nats.settings import NatsSettings
from postroom.adapters.nats.source import JetStreamSource
from postroom.adapters.postgres.messaging.inbox import PostgresInbox
from postroom.adapters.postgres.messaging.middleware import current_transaction, inbox, pipeline, transaction
from postroom.adapters.system.clock import SystemClock
from postroom.application.inbox.dead_letters import DeadLetterPublisher
from postroom.application.inbox.delivery import InboxDelivery
from postroom.application.inbox.worker import InboxWorker
from postroom.application.ports.inbox import EventHandler, HandlerRequest
from postroom.domain.errors import PoisonMessage
from postroom.domain.inbox import DeliveryPolicy

ACK_WAIT_MS = 400
KEY = "0123456789abcdef0123456789abcdef"


class CrashAt:
    """Stand before a part of the worker, and end the process at one point of it."""

    def __init__(self, part: Any, name: str, point: str) -> None:
        self._part = part
        self._name = name
        self._point = point

    def __getattr__(self, method: str) -> Any:
        real = getattr(self._part, method)

        async def call(*arguments: Any, **options: Any) -> Any:
            self._pass(method, "before")
            result = await real(*arguments, **options)
            self._pass(method, "after")
            return result

        return call

    def _pass(self, method: str, when: str) -> None:
        if self._point == f"{self._name}.{method}.{when}":
            os.kill(os.getpid(), signal.SIGKILL)


async def place_order(request: HandlerRequest) -> None:
    """Write an order; `poison` never can be, `down` can't now."""
    await current_transaction().execute("INSERT INTO orders VALUES (%s)", (request.payload,))
    if request.payload == "poison":
        raise PoisonMessage("no total")
    if request.payload == "down":
        raise RuntimeError("down")


def order_handler(database: str) -> Any:
    return pipeline(transaction(lambda: psycopg.AsyncConnection.connect(database)), inbox(), place_order)


def open_handler(database: str, url: str | None) -> EventHandler:
    """Return the handler of orders itself, or the one that posts them to a service in batches."""
    if url is None:
        return FunctionEventHandler(order_handler(database))
    return HttpEventHandler(url, allow=[f"{url} 127.0.0.0/8"], keys=[KEY], batch=20)


async def main(nats_url: str, database: str, point: str, max_deliver: int, url: str | None = None) -> None:
    settings, clock = NatsSettings(nats_url), SystemClock()
    consumer = PullConsumer(
        durable="sea__from_shop",
        stream="SHOP_EVENTS",
        create=True,
        ack_wait_ms=ACK_WAIT_MS,
        max_ack_pending=50,
    )
    policy = DeliveryPolicy(max_deliver, backoff_base_ms=5, backoff_max_ms=20)
    source = await JetStreamSource.open(settings, consumer)
    async with connect(settings, "crash") as client:
        publisher = CrashAt(JetStreamPublisher(client), "publisher", point)
        delivery = InboxDelivery(
            CrashAt(PostgresInbox(database), "inbox", point),
            CrashAt(open_handler(database, url), "handler", point),
            DeadLetterPublisher(publisher, "sea", "SHOP_EVENTS", "sea__from_shop"),
            clock,
            policy,
            stream="SHOP_EVENTS",
        )
        worker = InboxWorker(
            CrashAt(source, "source", point), delivery, clock, policy, concurrency=50, ack_wait_ms=ACK_WAIT_MS
        )
        await worker.run(asyncio.Event())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), *sys.argv[5:]))
