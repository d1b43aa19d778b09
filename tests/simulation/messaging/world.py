"""A service, its relays and its worker, on a real PostgreSQL and a real NATS server."""

import asyncio
import json
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import psycopg
from nats.errors import Error as NatsError
from nats.js.errors import NotFoundError

from postroom.adapters.nats.client import SupervisedClient
from postroom.adapters.nats.connection import connect
from postroom.adapters.nats.definitions import ConsumerDefinition, StreamDefinition, with_defaults
from postroom.adapters.nats.publisher import JetStreamDeadLetterQueue, JetStreamPublisher
from postroom.adapters.nats.pull_consumer import PullConsumer
from postroom.adapters.nats.settings import NatsSettings
from postroom.adapters.nats.source import JetStreamSource
from postroom.adapters.nats.streams import JetStreamStreams
from postroom.adapters.postgres.messaging import middleware
from postroom.adapters.postgres.messaging.inbox import PostgresInbox
from postroom.adapters.postgres.messaging.outbox import AsyncOutbox, Outbox
from postroom.adapters.postgres.messaging.outbox_repository import PostgresOutboxRepository
from postroom.application.inbox.dead_letter_admin import DeadLetterAdmin
from postroom.application.inbox.dead_letters import DeadLetterPublisher
from postroom.application.inbox.delivery import InboxDelivery
from postroom.application.inbox.worker import InboxWorker
from postroom.application.messaging import Cleanup
from postroom.application.outbox.new_event import NewEvent
from postroom.application.outbox.operate import RetryOutboxEvents
from postroom.application.outbox.relay import OutboxRelay, OutboxSettings
from postroom.application.ports.inbox import HandlerRequest
from postroom.application.ports.source import SourceMessage
from postroom.domain.errors import Unavailable
from postroom.domain.inbox import DeliveryPolicy, HandlerResult
from tests.simulation.messaging.crashes import (
    CrashAt,
    CrashingOutbox,
    CrashingPublisher,
    Process,
    Wrapped,
    is_crash,
)
from tests.support.clocks import TickingClock
from tests.support.servers.nats import NatsServer

STREAM, DLQ, READER = "SEA_EVENTS", "SEA_DLQ", "reader"
ACK_WAIT_MS = 150
PUBLISH_MS = 500
FETCH_WAIT_MS = 25
"""How long a worker waits for messages until it takes the stream for empty."""
RELAY = OutboxSettings(
    batch=4, concurrency=4, claim_ms=60_000, max_attempts=3, backoff_base_ms=1, backoff_max_ms=1
)
POLICY = DeliveryPolicy(max_deliver=3, backoff_base_ms=1, backoff_max_ms=2)
HOUR_US = 3_600_000_000
EFFECTS = "CREATE TABLE effects (message_id UUID NOT NULL, event TEXT NOT NULL)"

Answer = TypeVar("Answer")


class OnStream(NamedTuple):
    """A message of the stream: the event that it carries, and that event's aggregate."""

    message_id: UUID
    event: str
    aggregate: str


class Servers:
    """The servers, and one event loop, for all examples of a run."""

    def __init__(self, folder: Path, database: str) -> None:
        self.nats = NatsServer(folder / "nats")
        self.database = database
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(_ignore_crashes)

    @contextmanager
    def running(self) -> Iterator["Servers"]:
        with psycopg.connect(self.database, autocommit=True) as connection:
            connection.execute(EFFECTS)
        try:
            with self.nats:
                yield self
        finally:
            self.loop.close()


def _ignore_crashes(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    if error is None or not is_crash(error):
        loop.default_exception_handler(context)


class Service:
    """The consuming service: what it does about an event is one row of `effects`, and maybe an event more.

    Arguments:
        outcomes: how the next calls end; after these all end well.
    """

    def __init__(self, database: str, clock: TickingClock, outcomes: Sequence[str]) -> None:
        self._outcomes = iter(outcomes)
        self._handle = middleware.pipeline(
            middleware.transaction(lambda: psycopg.AsyncConnection.connect(database, autocommit=True)),
            middleware.inbox(wall=clock.wall),
            middleware.outbox(recorder=AsyncOutbox(wall=clock.wall)),
            self._take_effect,
        )
        self._outcome = "well"

    async def handle(self, request: HandlerRequest) -> HandlerResult:
        self._outcome = next(self._outcomes, "well")
        if self._outcome == "poison":
            return HandlerResult("poison", "HTTP 422")
        if self._outcome == "unavailable":
            return HandlerResult("failed", "HTTP 503")
        try:
            await self._handle(request)
        except _RolledBack:
            return HandlerResult("failed", "HTTP 500")
        if self._outcome == "answer_lost":
            return HandlerResult("failed", "no answer within 60,000 ms")
        return HandlerResult("processed")

    async def close(self) -> None: ...

    async def _take_effect(self, request: HandlerRequest) -> Sequence[NewEvent] | None:
        event = request.payload["event"]
        await middleware.current_transaction().execute(
            "INSERT INTO effects VALUES (%s, %s)", (request.message_id, event)
        )
        if self._outcome == "rolled_back":
            raise _RolledBack
        if not request.payload["causes"]:
            return None
        caused = {"event": f"{event}'", "causes": False}
        return [NewEvent(aggregate_type="caused", aggregate_id=event, event_type="caused", payload=caused)]


class _RolledBack(Exception):
    pass


class World:
    """One example's world; everything in it is made anew, the servers stay."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        self.clock = TickingClock()
        self.url = servers.nats.url
        self._service: dict[str, psycopg.Connection[Any]] = {}
        self._is_broker_down = self._is_broker_new = False
        self._outbox = Outbox(wall=self.clock.wall)
        self._clients: dict[str, tuple[SupervisedClient, AbstractAsyncContextManager[SupervisedClient]]] = {}
        self.admin = psycopg.connect(servers.database, autocommit=True)
        self.admin.execute(
            "TRUNCATE outbox_events, outbox_retries, inbox_messages, aggregate_events, effects"
        )
        self.run(self._empty_streams())

    def run(self, work: Awaitable[Answer]) -> Answer:
        async def bounded() -> Answer:
            async with asyncio.timeout(240):
                return await work

        return self.servers.loop.run_until_complete(bounded())

    def close(self) -> None:
        for connection in self._service.values():
            connection.close()
        self.admin.close()
        for name in list(self._clients):
            self.run(self._leave(name))

    # -- the service that records events ---

    def begin(self, aggregate: str) -> None:
        if aggregate not in self._service:
            self._service[aggregate] = psycopg.connect(self.servers.database)

    def record(self, aggregate: str, event: str, causes: bool) -> None:
        """Record an event in the aggregate's transaction; one at a time is open, as if by a lock."""
        self._outbox.record(
            self._service[aggregate],
            NewEvent(
                aggregate_type="order",
                aggregate_id=aggregate,
                event_type="changed",
                payload={"event": event, "causes": causes},
            ),
        )

    def end(self, aggregate: str, *, commit: bool) -> None:
        connection = self._service[aggregate]
        (connection.commit if commit else connection.rollback)()

    # -- the relays ---

    async def relay(self, name: str, crash: CrashAt | None = None, refusals: int = 0) -> None:
        """Let one relay look at the outbox once."""
        process = Process(crash)
        client = await self._client(name)
        repository = PostgresOutboxRepository(self.servers.database, claim_ms=RELAY.claim_ms)
        relay = OutboxRelay(
            CrashingOutbox(repository, process),  # type: ignore[arg-type]  # of what a relay uses
            CrashingPublisher(JetStreamPublisher(client, PUBLISH_MS), process, refusals),
            self.clock,
            lambda: 0.5,
            "sea",
            settings=RELAY,
        )
        try:
            await self._until_crash(name, process, relay.relay_once())
        finally:
            await repository.close()

    async def clean_outbox(self) -> None:
        repository = PostgresOutboxRepository(self.servers.database)
        delete = repository.delete_published
        await Cleanup("outbox", delete, self.clock, lambda: 0.5, retention_ms=0).clean()
        await repository.close()

    async def retry_parked(self) -> None:
        repository = PostgresOutboxRepository(self.servers.database)
        await RetryOutboxEvents(repository, self.clock).all()
        await repository.close()

    # -- the worker, and the operator who looks after its dead letters ---

    async def consume(
        self, outcomes: Sequence[str] = (), crash: CrashAt | None = None, fetches: int = 1_000
    ) -> None:
        """Let a worker take what comes, until nothing does or it has asked for messages so often."""
        process, stop = Process(crash), asyncio.Event()
        inbox = PostgresInbox(self.servers.database)
        source = await JetStreamSource.open(
            NatsSettings(self.url), PullConsumer(durable=READER, stream=STREAM)
        )
        worker = InboxWorker(
            _BriefSource(source, process, stop, fetches),  # type: ignore[arg-type]  # of what a worker uses
            await self._delivery("worker", process, inbox, outcomes),
            self.clock,
            POLICY,
            concurrency=4,
            ack_wait_ms=ACK_WAIT_MS,
            jitter=lambda: 0.5,
        )
        try:
            await self._until_crash("worker", process, worker.run(stop, until_idle=True))
        finally:
            await inbox.close()
            if process.is_dead:
                await source._client.close()  # it can say nothing any more, not even what it gives back
            await source.close()

    async def redrive(self, outcomes: Sequence[str] = (), crash: CrashAt | None = None) -> None:
        """Let an operator put all dead letters back."""
        process = Process(crash)
        inbox = PostgresInbox(self.servers.database)
        admin = DeadLetterAdmin(
            process.wrap(JetStreamDeadLetterQueue(await self._client("redrive"))),
            _CrashingInbox(inbox, process),
            process.wrap(Service(self.servers.database, self.clock, outcomes)),
            self.clock,
            "sea",
        )

        async def put_all_back() -> None:
            async with aclosing(admin.redrive(await admin.list())) as redriven:
                async for _ in redriven:
                    pass

        try:
            await self._until_crash("redrive", process, put_all_back())
        finally:
            await inbox.close()

    async def _delivery(
        self, name: str, process: Process, inbox: PostgresInbox, outcomes: Sequence[str]
    ) -> InboxDelivery:
        publisher = CrashingPublisher(JetStreamPublisher(await self._client(name), PUBLISH_MS), process)
        return InboxDelivery(
            process.wrap(inbox),
            process.wrap(Service(self.servers.database, self.clock, outcomes)),
            DeadLetterPublisher(publisher, "sea", STREAM, READER),
            self.clock,
            POLICY,
            stream=STREAM,
            jitter=lambda: 0.5,
        )

    # -- the broker ---

    def restart_broker(self) -> None:
        self.servers.nats.kill()
        self.servers.nats.start()
        self._is_broker_new = True

    async def relay_without_broker(self, name: str) -> None:
        """Let a relay, connected until now, find that the broker is gone."""
        await self._client(name)
        self.servers.nats.kill()
        self._is_broker_down = True
        try:
            await self.relay(name)
        finally:
            self.servers.nats.start()
            self._is_broker_down, self._is_broker_new = False, True

    # -- what there is to see ---

    async def on_stream(self) -> list[OnStream]:
        client = await self._client("observer")
        state = (await client.jetstream().stream_info(STREAM)).state
        found = []
        first = state.last_seq + 1 - state.messages  # nothing is deleted from within it
        for sequence in range(first, state.last_seq + 1):
            message = await client.jetstream().get_msg(STREAM, seq=sequence)
            headers = message.headers or {}
            event = json.loads(message.data or b"")["event"]
            found.append(OnStream(UUID(headers["Nats-Msg-Id"]), event, headers["Aggregate-Id"]))
        return found

    async def is_at_rest(self) -> bool:
        """Tell whether nothing is left to publish, to deliver, or to put back."""
        (unpublished,) = self.rows("SELECT count(*) FROM outbox_events WHERE published_at IS NULL")[0]
        stream = (await self._client("observer")).jetstream()
        consumer = await stream.consumer_info(STREAM, READER)
        letters = (await stream.stream_info(DLQ)).state.messages
        return not (unpublished or consumer.num_pending or consumer.num_ack_pending or letters)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return self.admin.execute(query.encode()).fetchall()

    # -- connections ---

    async def _client(self, name: str) -> SupervisedClient:
        """Return a process's connection: the one it has, connected again after an outage, or a new one."""
        if name not in self._clients:
            connection = connect(NatsSettings(self.url), name)
            self._clients[name] = (await connection.__aenter__(), connection)
        client, _ = self._clients[name]
        while not self._is_broker_down:
            await asyncio.sleep(
                0.002 * self._is_broker_new
            )  # to see what happened while the loop stood still
            with suppress(NatsError, OSError, TimeoutError):
                if client.is_connected:
                    await client.flush(1)
                    break
            await asyncio.sleep(0.005)
        return client

    async def _leave(self, name: str) -> None:
        if name in self._clients:
            _, connection = self._clients.pop(name)
            await connection.__aexit__(None, None, None)

    async def _until_crash(self, name: str, process: Process, work: Awaitable[Any]) -> None:
        try:
            await work
        except Unavailable:
            assert self._is_broker_down, "nothing was down"
        except BaseException as error:
            if not is_crash(error):
                raise
        if process.is_dead:
            await self._leave(name)

    async def _empty_streams(self) -> None:
        client = await self._client("observer")
        streams = JetStreamStreams(client)
        for name, subject in ((STREAM, "sea.event.>"), (DLQ, "sea.dlq.>")):
            try:
                await client.jetstream().purge_stream(name)
            except NotFoundError:
                await streams.create_stream(_stream(name, subject))
        with suppress(NotFoundError):
            await client.jetstream().delete_consumer(STREAM, READER)
        await streams.create_consumer(_reader())


class _CrashingInbox(Wrapped):
    def exclusive(self, task: str) -> AbstractAsyncContextManager[bool]:
        lock: AbstractAsyncContextManager[bool] = self._port.exclusive(task)
        return lock


class _BriefSource:
    """The worker's source, which waits for messages briefly and tells the worker when to stop."""

    def __init__(self, source: JetStreamSource, process: Process, stop: asyncio.Event, fetches: int) -> None:
        self._source = source
        self._process = process
        self._stop = stop
        self._fetches = fetches
        wrapped = process.wrap(source)
        self.ack, self.nack = wrapped.ack, wrapped.nack

    async def fetch(self, limit: int, wait_ms: int) -> Sequence[SourceMessage]:
        self._fetches -= 1
        if self._fetches <= 0:
            self._stop.set()
        async with self._process.call("fetch"):
            return await self._source.fetch(limit, min(wait_ms, FETCH_WAIT_MS))

    async def extend(self, messages: Sequence[SourceMessage]) -> None:
        if not self._process.is_dead:
            await self._source.extend(messages)


def _stream(name: str, subject: str) -> StreamDefinition:
    definition = with_defaults(StreamDefinition(name=name, subjects=(subject,), duplicate_window_ms=600_000))
    assert isinstance(definition, StreamDefinition)
    return definition


def _reader() -> ConsumerDefinition:
    definition = with_defaults(ConsumerDefinition(stream=STREAM, durable=READER, ack_wait_ms=ACK_WAIT_MS))
    assert isinstance(definition, ConsumerDefinition)
    return definition
