"""Uses of public names that no guide shows, for the reference of the API: type-checked, never run."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from fastapi import FastAPI

from postroom import (
    AckMessages,
    BrokenLog,
    BrokenProjection,
    ClientTls,
    Connection,
    ConsumerDefinition,
    DeleteOldEvents,
    DuplicateInboxMessage,
    EventFilter,
    Explanation,
    ExtendVisibility,
    Fenced,
    Forbidden,
    FoundMessage,
    FrameTooLarge,
    FutureEvent,
    HandlerRequest,
    HistoryEntry,
    IdempotencyConflict,
    ImplausibleClock,
    InboxSettings,
    IntegrityFailure,
    InternalError,
    InvalidOutboxEvent,
    InvalidRequest,
    InvalidTimestamp,
    KafkaSettings,
    KafkaSource,
    Mailbox,
    MailboxClosed,
    MailboxOwned,
    MailboxSettings,
    MailboxTarget,
    MessageDetail,
    MessageOutcome,
    MessageProjection,
    MessageResult,
    MessageStream,
    MessagingSettings,
    MissingExtra,
    NackMessages,
    Namespace,
    NatsSettings,
    NatsSource,
    NewEvent,
    NewMessage,
    NotFound,
    Outbox,
    OutboxSettings,
    PeekedMessage,
    Projections,
    PurgeTopic,
    RabbitmqSettings,
    RabbitmqSource,
    Reader,
    Receipt,
    ReceivedMessage,
    ReceiveMessages,
    RedisSource,
    RedriveDeadLetters,
    Rejected,
    SendBatch,
    SendEnvelopes,
    SendMessage,
    Sent,
    SettingsConflict,
    SetTopicPolicy,
    SourceMessage,
    StaleReceipt,
    StreamDefinition,
    SyncMailbox,
    SyncMessageStream,
    SyncReceivedMessage,
    TopicPolicy,
    ValidationMode,
    Worker,
    acknowledge,
    connect,
    export_messages,
    find_namespace,
    inbox,
    load_namespaces,
    migrate_messaging,
    migrate_store,
    open_dead_letters,
    open_follower,
    open_inbox,
    open_ingester,
    open_mailbox,
    open_relay,
    open_streams,
    open_worker,
    pipeline,
    read_mailbox,
    read_projections,
    rebuild_projections,
    roll_back_projections,
    sentry,
    transaction,
    verify_projections,
)
from postroom.application.ports.source import Source

app = FastAPI()
worker = Worker("shop", middlewares=[sentry])


async def call_a_server(receipts: list[Receipt]) -> None:
    tls = ClientTls(ca="ca.pem", certificate="shop.pem", key="shop.key")
    async with connect("https://mail.example:8443", token="prm1...", tls=tls) as mailbox:
        await count_ready(mailbox)


async def count_ready(mailbox: Mailbox) -> int:
    backlog = await mailbox.get_backlog("orders")
    return backlog.ready


def count_ready_now(mailbox: SyncMailbox) -> int:
    return mailbox.get_backlog("orders").ready


async def send_all(send_batch: SendBatch, messages: list[NewMessage]) -> list[Sent | Rejected]:
    return await send_batch(messages)


async def store(send_envelopes: SendEnvelopes, envelopes: list[bytes]) -> list[Sent | Rejected]:
    return await send_envelopes(envelopes, validation=ValidationMode.STRICT)


async def settle(ack_messages: AckMessages, receipts: list[Receipt]) -> list[Rejected | None]:
    return await ack_messages(receipts)


async def release(nack_messages: NackMessages, receipts: list[Receipt]) -> list[Rejected | None]:
    return await nack_messages(receipts, reason="out of stock", delay_ms=5_000)


async def hide(extend_visibility: ExtendVisibility, receipts: list[Receipt]) -> list[Rejected | None]:
    return await extend_visibility(receipts, visibility_ms=60_000)


async def redrive(redrive_dead_letters: RedriveDeadLetters) -> int:
    return await redrive_dead_letters("orders", limit=100)


async def purge(purge_topic: PurgeTopic) -> int:
    return await purge_topic("orders", dead=True, ready=False)


async def limit_attempts(set_topic_policy: SetTopicPolicy) -> None:
    await set_topic_policy("orders", TopicPolicy(max_attempts=3))


async def forget(delete_old_events: DeleteOldEvents) -> int:
    return await delete_old_events(older_than=1_795_000_000_000_000)


async def send_one(send_message: SendMessage) -> Sent:
    return await send_message(NewMessage("orders", b"{}", idem_key="order-7"))


async def receive_some(receive_messages: ReceiveMessages) -> list[ReceivedMessage]:
    return await receive_messages("orders", max_messages=10, wait_ms=20_000)


async def open_later(connection: Connection) -> str:
    async with connection as mailbox:
        return mailbox.name


async def read_a_stream(mailbox: Mailbox) -> None:
    async with mailbox.stream_messages("orders") as stream:
        await handle_all(stream)


async def handle_all(stream: MessageStream) -> None:
    async for message in stream:
        await message.ack()


def handle_all_now(stream: SyncMessageStream) -> None:
    for message in stream:
        handle(message)


def handle(message: SyncReceivedMessage) -> None:
    try:
        print(message.payload)
    except ValueError as error:
        message.nack(reason=str(error), delay_ms=5_000)
    else:
        message.ack()


async def look_back(mailbox: Mailbox) -> None:
    detail: MessageDetail = await mailbox.get_message("order-7")
    first: HistoryEntry = detail.history[0]
    explanation: Explanation = await mailbox.explain_message("order-7")
    outcome: MessageOutcome = await mailbox.wait_for_result("order-7", wait_ms=5_000)
    result: MessageResult | None = outcome.result
    settings: MailboxSettings = await mailbox.get_settings()
    peeked: list[PeekedMessage] = await mailbox.peek_messages("orders")
    print(first.event, explanation.story[-1].text, result, settings.limits.topics, len(peeked))


def read(reader: Reader) -> str:
    return reader.verify_log().chain


def search(projections: Projections) -> Iterable[str]:
    found: tuple[FoundMessage, ...] = projections.search_messages(EventFilter(topics=("orders.*",))).items
    return (each.message_id for each in found)


def maintain() -> None:
    with read_mailbox("orders.db") as reader, read_projections("orders.db") as projections:
        print(read(reader), *search(projections))
    migrate_store("postgresql://postroom@db/postroom", dry_run=True)
    migrate_messaging("postgresql://shop@db/shop", grant_to=["shop_app"])
    rebuild_projections("orders.db", only=["mailbox"], compare=True)
    verify_projections("orders.db", chain=True)
    roll_back_projections("orders.db")
    with open_follower("orders.db", max_events=50_000) as running:
        print(running)
    export_messages("orders.db", EventFilter(topics=("orders.*",)), "parquet", "orders.parquet")


old_messages = MessageProjection(name="old", columns=())


MESSAGING = MessagingSettings(database="postgresql://shop@db/shop", context="sea")
NATS = NatsSettings(url="nats://127.0.0.1:4222")
STREAM = StreamDefinition(name="SEA_EVENTS", subjects=("sea.event.>",), replicas=3)
CONSUMER = ConsumerDefinition(stream="SEA_EVENTS", durable="billing", max_deliver=20)
INBOX = InboxSettings(handler="http://127.0.0.1:8000/events", timeout_ms=30_000)


async def handle_events() -> None:
    async with open_streams(NATS) as streams:
        print(streams)
    async with open_worker(MESSAGING, NATS, CONSUMER, INBOX) as inbox_worker:
        await inbox_worker.run(asyncio.Event())
    async with open_inbox(MESSAGING, INBOX) as opened:
        print(await opened.get_backlog())
    async with open_dead_letters(MESSAGING, NATS, INBOX, can_redrive=False) as dead_letters:
        print(dead_letters)


async def relay_to_brokers() -> None:
    kafka = KafkaSettings(url="kafka+ssl://broker:9093", user="shop", password_file="kafka.password")
    async with open_relay(MESSAGING, kafka, OutboxSettings(batch=1_000, poll_ms=200)) as relay:
        await relay.run()
    rabbitmq = RabbitmqSettings(url="amqps://broker/shop", user="shop", password_file="rabbitmq.password")
    async with open_relay(MESSAGING, rabbitmq) as relay:
        await relay.run()
    async with open_relay(MESSAGING, MailboxTarget(address="orders.db")) as relay:
        await relay.run()


async def ingest(file: str) -> None:
    namespace: Namespace = find_namespace(load_namespaces(file), "orders")
    async with (
        open_mailbox(namespace.store, namespace.mailbox, mode="archive") as mailbox,
        open_ingester(namespace, mailbox) as ingester,
    ):
        await ingester.run()


SOURCES = (
    NatsSource(url="nats://127.0.0.1:4222", subject="orders.>", consumer_group="archive"),
    KafkaSource(url="kafka://broker:9092", topic="orders", consumer_group="archive"),
    RabbitmqSource(url="amqp://broker/shop", queue="orders", consumer_group="archive"),
    RedisSource(url="redis://127.0.0.1:6379", stream="orders", consumer_group="archive", field="envelope"),
)


async def consume(source: Source, engine: Any) -> None:
    async def ship(message: SourceMessage) -> None:
        print(message.subject, message.delivered)

    handle_message = pipeline(acknowledge(source), transaction(engine), inbox())(ship)
    print(handle_message)


def explain(error: MissingExtra) -> str:
    return f"{error.code}: {error}"


@app.post("/events")
async def receive(request: HandlerRequest) -> None:
    print(request.event_type, request.payload)


async def reject(message: ReceivedMessage) -> None:
    await message.reject("no such customer")


async def recover(mailbox: Mailbox, reader: Reader, message: NewMessage, delivery: ReceivedMessage) -> None:
    try:
        reader.verify_log()
    except BrokenLog as error:
        print(f"altered from position {error.position} on")
    try:
        rebuild_projections("orders.db")
    except BrokenProjection as error:
        print(f"the read models stay as they were: {error}")
    try:
        await mailbox.send_message(message)
    except Fenced as error:
        print(f"epoch {error.newer} owns the mailbox now")
    try:
        await mailbox.send_message(message)
    except Forbidden as error:
        print(f"the token does not cover its {error.reason}")
    try:
        await mailbox.send_message(message)
    except FrameTooLarge as error:
        print(f"store the payload elsewhere: {error}")
    try:
        await mailbox.send_message(message)
    except IdempotencyConflict as error:
        print(f"another payload has this key: {error}")
    try:
        await open_and_send(message)
    except ImplausibleClock as error:
        print(f"set the clock first: {error}")
    try:
        await mailbox.get_message("order-7")
    except IntegrityFailure as error:
        print(f"restore the store from a backup: {error}")
    try:
        await mailbox.send_message(message)
    except InternalError as error:
        print(f"report the traceback in the log: {error}")
    try:
        await mailbox.receive_messages("orders", max_messages=0)
    except InvalidRequest as error:
        print(f"correct the call: {error}")
    try:
        await mailbox.send_message(message)
    except MailboxClosed as error:
        print(f"open the mailbox again: {error}")
    try:
        await open_and_send(message)
    except MailboxOwned as error:
        print(f"{error.owner} has the mailbox; use connect")
    try:
        await mailbox.get_message("order-7")
    except NotFound as error:
        print(f"retention may have removed it: {error}")
    try:
        await open_and_send(message)
    except SettingsConflict as error:
        print(*(f"{each.name} is {each.stored}" for each in error.differences))
    try:
        await delivery.ack()
    except StaleReceipt as error:
        print(f"another consumer may have it now: {error}")


async def recover_events(
    connection: Any,
    event: NewEvent,
    source_message: SourceMessage,
    handle_event: Callable[[SourceMessage], Any],
) -> None:
    try:
        Outbox().record(connection, event)
    except InvalidOutboxEvent as error:
        print(f"roll back, and correct the event: {error}")
    try:
        Outbox().record(connection, event)
    except FutureEvent as error:
        print(f"correct the clock, and roll back: {error}")
    try:
        await handle_event(source_message)
    except DuplicateInboxMessage as error:
        print(f"acknowledge it: {error}")
    try:
        await handle_event(source_message)
    except InvalidTimestamp as error:
        print(f"synchronize the clocks: {error}")


async def open_and_send(message: NewMessage) -> None:
    async with open_mailbox("orders.db") as mailbox:
        await mailbox.send_message(message)
