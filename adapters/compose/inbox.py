"""Wire the inbox: the middlewares of services, the worker, and what operators do."""

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from nats.aio.client import Client

from postroom.adapters.compose.messaging import MessagingSettings
from postroom.adapters.http.event_handler import TIMEOUT_MS, HttpEventHandler
from postroom.adapters.nats.connection import NatsSettings, connect
from postroom.adapters.nats.dead_letter_queue import JetStreamDeadLetterQueue
from postroom.adapters.nats.publisher import JetStreamPublisher
from postroom.adapters.nats.source import JetStreamSource, PullConsumer
from postroom.adapters.nats.streams import JetStreamStreams
from postroom.adapters.postgres.messaging.inbox import PostgresInbox
from postroom.adapters.postgres.messaging.middleware import (
    acknowledge,
    current_transaction,
    inbox,
    outbox,
    pipeline,
    transaction,
)
from postroom.adapters.system.clock import SystemClock
from postroom.application.background import beside
from postroom.application.inbox.cleanup import RETENTION_MS, InboxCleanup
from postroom.application.inbox.dead_letters import DeadLetters
from postroom.application.inbox.redrive import DeadLetterOffice, Letter
from postroom.application.inbox.worker import Delivery, InboxWorker
from postroom.application.ports.event_handler import EventHandler
from postroom.application.telemetry import logger
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable
from postroom.domain.inbox import DeliveryPolicy
from postroom.domain.policy import SECOND_MS
from postroom.domain.streams import ConsumerDefinition
from postroom.domain.subject import check_token

__all__ = [
    "DeadLetterOffice",
    "InboxBacklog",
    "InboxDesk",
    "InboxSettings",
    "Letter",
    "MessagingSettings",
    "NatsSettings",
    "acknowledge",
    "current_transaction",
    "inbox",
    "open_dead_letters",
    "open_inbox",
    "open_worker",
    "outbox",
    "pipeline",
    "transaction",
]

ACK_WAIT_MS = 120 * SECOND_MS
MAX_DELIVER = 20
MAX_ACK_PENDING = 50
"""Of a consumer that its definition says nothing else of (SDS-047 section 10)."""


class InboxSettings(msgspec.Struct, frozen=True):
    """Say how an inbox is worked on: `[inbox]` of the settings file; times in ms.

    Arguments:
        handler: URL that events are posted to.
        allow: what the handler's URL must begin with, and the networks it may be in; see `parse_allowed`. As
            text with commas between entries, or as a list.
        signing_key, signing_key_file: what requests are signed with, or the file it is in.
        previous_signing_key, previous_signing_key_file: the one before, while handlers still know only that.
        timeout_ms: how long the handler may take.
        concurrency: messages in hand at once; never more than the consumer's `max_ack_pending`.
        backoff_base_ms, backoff_max_ms: see `DeliveryPolicy`.
        retention_ms: how long processed messages are known; longer than the stream keeps them.
        cleanup_every_ms: how often a worker cleans up; 0 leaves that to `postroom inbox cleanup`.
        keep_history: leave the histories of messages that are cleaned up in `aggregate_events`.
        consumer: which of `[consumers]` to read, where there are several.
    """

    handler: str = ""
    allow: str | tuple[str, ...] = ()
    signing_key: str = ""
    signing_key_file: str = ""
    previous_signing_key: str = ""
    previous_signing_key_file: str = ""
    timeout_ms: Annotated[int, Meta(ge=1)] = TIMEOUT_MS
    concurrency: Annotated[int, Meta(ge=1)] = MAX_ACK_PENDING
    backoff_base_ms: Annotated[int, Meta(ge=1)] = SECOND_MS
    backoff_max_ms: Annotated[int, Meta(ge=1)] = 120 * SECOND_MS
    retention_ms: Annotated[int, Meta(ge=0)] = RETENTION_MS
    cleanup_every_ms: Annotated[int, Meta(ge=0)] = 600 * SECOND_MS
    keep_history: bool = False
    consumer: str = ""

    def __repr__(self) -> str:
        return f"InboxSettings(handler={self.handler!r})"  # the rest has secrets

    @property
    def allowed(self) -> tuple[str, ...]:
        """Return the entries of the allow-list."""
        entries = self.allow.split(",") if isinstance(self.allow, str) else self.allow
        return tuple(entry.strip() for entry in entries if entry.strip())

    @property
    def keys(self) -> list[str]:
        """Return the signing keys, the current one first.

        Raises: InvalidRequest when a file can't be read.
        """
        current = _key(self.signing_key, self.signing_key_file, "signing_key_file")
        previous = _key(
            self.previous_signing_key, self.previous_signing_key_file, "previous_signing_key_file"
        )
        return [key for key in (current, previous) if key]


def _key(key: str, file: str, name: str) -> str:
    if key or not file:
        return key
    try:
        return Path(file).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise InvalidRequest(f"The file {file} that [inbox] {name} names can't be read: {reason}.") from None


class InboxBacklog(msgspec.Struct, frozen=True):
    """Answer to SDS-047 QRY-051: how many messages are not dealt with, and since when the oldest is here."""

    context: str
    count: int
    oldest_at: datetime | None


class InboxDesk:
    """The queries on one inbox and what operators do to it."""

    def __init__(self, repository: PostgresInbox, context: str, settings: InboxSettings) -> None:
        self._repository = repository
        self._context = context
        self.cleanup = InboxCleanup(
            repository, SystemClock(), random.random, retention_ms=settings.retention_ms
        )

    async def get_backlog(self) -> InboxBacklog:
        """Count what is neither processed nor a dead letter (SDS-047 QRY-051)."""
        found = await self._repository.backlog()
        oldest = None if found.oldest_at is None else datetime.fromtimestamp(found.oldest_at / 1e6, UTC)
        return InboxBacklog(self._context, found.count, oldest)


@asynccontextmanager
async def open_inbox(
    messaging: MessagingSettings, settings: InboxSettings | None = None
) -> AsyncIterator[InboxDesk]:
    """Look after the inbox of a context while the context manager lasts."""
    settings = settings or InboxSettings()
    repository = _repository(messaging, settings)
    try:
        yield InboxDesk(repository, messaging.context, settings)
    finally:
        await repository.close()


@asynccontextmanager
async def open_worker(
    messaging: MessagingSettings,
    nats: NatsSettings,
    consumer: ConsumerDefinition,
    settings: InboxSettings,
    *,
    handler: EventHandler | None = None,
) -> AsyncIterator[InboxWorker]:
    """Have a worker that takes messages from a consumer to their handler, while the context manager lasts.

    The consumer is made where it is missing, without a limit of the server's own on deliveries.

    Arguments:
        handler: who deals with the messages; None posts them to the URL in the settings.

    Raises:
        InvalidRequest, Forbidden: the settings can't be what they are.
        NotFound: there is no such stream, or none that keeps dead letters.
        Unavailable: NATS or the database can't be reached.
    """
    check_token(messaging.context, "The context")
    async with AsyncExitStack() as opened:
        asked = handler or _handler(settings)
        opened.push_async_callback(asked.close)
        client = await opened.enter_async_context(connect(nats, f"postroom inbox {consumer.durable}"))
        await JetStreamDeadLetterQueue(client).check(f"{messaging.context}.dlq.>")
        found = await _find_or_make(client, consumer)
        policy = _policy(consumer, found, settings)
        repository = _repository(messaging, settings)
        opened.push_async_callback(repository.close)
        await repository.backlog()  # better to find out now than with the first message
        source = await JetStreamSource.open(nats, PullConsumer(durable=found.durable, stream=found.stream))
        opened.push_async_callback(source.close)
        if settings.cleanup_every_ms:
            await opened.enter_async_context(_cleaning(messaging, settings))
        clock = SystemClock()
        letters = DeadLetters(JetStreamPublisher(client), messaging.context, found.stream, found.durable)
        yield InboxWorker(
            source,
            Delivery(repository, asked, letters, clock, policy, stream=found.stream),
            clock,
            policy,
            concurrency=min(settings.concurrency, found.max_ack_pending or MAX_ACK_PENDING),
            ack_wait_ms=source.ack_wait_ms,
        )


@asynccontextmanager
async def open_dead_letters(
    messaging: MessagingSettings,
    nats: NatsSettings,
    settings: InboxSettings,
    *,
    only_look: bool = False,
    handler: EventHandler | None = None,
) -> AsyncIterator[DeadLetterOffice]:
    """Look after the dead letters of a context while the context manager lasts.

    Arguments:
        only_look: no handler is needed then.
    """
    async with AsyncExitStack() as opened:
        asked = None if only_look else handler or _handler(settings)
        if asked is not None:
            opened.push_async_callback(asked.close)
        client = await opened.enter_async_context(connect(nats, "postroom inbox dlq"))
        repository = _repository(messaging, settings)
        opened.push_async_callback(repository.close)
        queue = JetStreamDeadLetterQueue(client)
        yield DeadLetterOffice(queue, repository, asked, SystemClock(), messaging.context)


def _handler(settings: InboxSettings) -> HttpEventHandler:
    if not settings.handler:
        raise InvalidRequest("Say who deals with the events: --handler URL, or handler under [inbox].")
    return HttpEventHandler(
        settings.handler,
        allow=settings.allowed,
        keys=settings.keys,
        timeout_ms=settings.timeout_ms,
        max_connections=settings.concurrency,
    )


def _repository(messaging: MessagingSettings, settings: InboxSettings) -> PostgresInbox:
    return PostgresInbox(messaging.database, messaging.tables, keep_history=settings.keep_history)


async def _find_or_make(client: Client, wanted: ConsumerDefinition) -> ConsumerDefinition:
    """Return a consumer as the server has it."""
    streams = JetStreamStreams(client)
    found = await streams.find_consumer(wanted.stream, wanted.durable)
    if found is None:
        if await streams.find_stream(wanted.stream) is None:
            raise NotFound(
                f"This NATS server has no stream {wanted.stream}; define it under [streams] in the settings "
                "file and run postroom streams apply."
            )
        defaults: dict[str, object] = {
            "ack_policy": "explicit",
            "ack_wait_ms": wanted.ack_wait_ms or ACK_WAIT_MS,
            "max_deliver": wanted.max_deliver or MAX_DELIVER,
            "max_ack_pending": wanted.max_ack_pending or MAX_ACK_PENDING,
        }
        await streams.create_consumer(msgspec.structs.replace(wanted, **defaults))
        found = await streams.find_consumer(wanted.stream, wanted.durable)
        if found is None:
            raise Unavailable(f"Consumer {wanted.durable} was removed as soon as it was made; try again.")
    return found


def _policy(wanted: ConsumerDefinition, found: ConsumerDefinition, settings: InboxSettings) -> DeliveryPolicy:
    if found.server_max_deliver is not None:
        logger().warning(
            "inbox.server_limit",
            consumer=found.durable,
            stream=found.stream,
            max_deliver=found.server_max_deliver,
            why="NATS drops a message whose worker is killed during its last delivery; let the worker count: "
            "postroom streams apply",
        )
    return DeliveryPolicy(
        wanted.max_deliver or found.max_deliver or MAX_DELIVER,
        settings.backoff_base_ms,
        settings.backoff_max_ms,
        found.server_max_deliver,
    )


@asynccontextmanager
async def _cleaning(messaging: MessagingSettings, settings: InboxSettings) -> AsyncIterator[None]:
    repository = _repository(messaging, settings)
    cleanup = InboxCleanup(repository, SystemClock(), random.random, retention_ms=settings.retention_ms)
    try:
        async with beside(cleanup.keep_cleaning(settings.cleanup_every_ms)):
            yield
    finally:
        await repository.close()
