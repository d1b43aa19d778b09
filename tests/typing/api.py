"""The public API as a user writes it: type-checked, never run."""

import sqlite3
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import assert_never, assert_type
from uuid import UUID

import psycopg
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from postroom import (
    AckMessages,
    AsyncMailboxOutbox,
    AsyncOutbox,
    Backlog,
    CaptureColumns,
    CaptureSettings,
    Changes,
    DeadLetter,
    DeletionReport,
    EnvelopeProblem,
    EventFilter,
    MailboxLimits,
    MailboxOutbox,
    MessageDetail,
    MessagingSettings,
    NatsSettings,
    NewEvent,
    NewMessage,
    Outbox,
    OwnedMailbox,
    Page,
    PostroomError,
    Receipt,
    ReceivedMessage,
    ReceiveMessages,
    RedriveMessage,
    RedrivePreview,
    RedriveReport,
    RedriveSpec,
    Rejected,
    RewindReport,
    Saturated,
    ScheduleReport,
    ScheduleSpec,
    SendMessage,
    Sent,
    Simulation,
    SubscriptionFilter,
    SubscriptionReport,
    Tables,
    TopicPolicy,
    Unavailable,
    ValidationMode,
    Verification,
    Worker,
    WorkerCounts,
    every,
    list_mailboxes,
    open_capture,
    open_mailbox,
    open_outbox,
    open_relay,
    read_mailbox,
    read_projections,
    read_receipt,
    write_receipt,
)


async def send(mailbox: OwnedMailbox) -> str:
    sent = await mailbox.send_message(
        NewMessage(
            topic="orders",
            payload=b"{}",
            idem_key="order-1",
            sticky_key="customer-7",
            attrs={"source": "shop", "raw": b"\xff"},
            deliver_after_ms=1_000,
            ttl_seconds=3_600,
            content_type="application/json",
        )
    )
    assert_type(sent, Sent)
    assert_type(sent.duplicate, bool)
    return sent.message_id


async def send_many(mailbox: OwnedMailbox, payloads: Sequence[bytes]) -> list[str]:
    ids: list[str] = []
    for answer in await mailbox.send_batch(
        [NewMessage(topic="orders", payload=payload) for payload in payloads]
    ):
        match answer:
            case Sent(message_id=id_):
                ids.append(id_)
            case Saturated(retry_after_ms=ms):
                assert_type(ms, int)
            case Rejected(code=code, status=status):
                assert_type(code, str)
                assert_type(status, int)
            case _:
                assert_never(answer)
    return ids


async def store_envelopes(mailbox: OwnedMailbox, envelopes: Sequence[bytes]) -> None:
    def report(index: int, problem: EnvelopeProblem) -> None:
        assert_type(problem.message, str)

    answers = await mailbox.send_envelopes(envelopes, validation=ValidationMode.WARN, on_problem=report)
    assert_type(answers, list[Sent | Rejected])


async def consume(mailbox: OwnedMailbox) -> None:
    for message in await mailbox.receive_messages(
        "orders", max_messages=10, visibility_ms=30_000, wait_ms=20_000
    ):
        assert_type(message, ReceivedMessage)
        assert_type(message.payload, bytes)
        assert_type(message.attrs, dict[str, str])
        assert_type(message.receipt, Receipt)
        try:
            handle(message.payload)
        except ValueError as error:
            await mailbox.nack_messages([message.receipt], reason=str(error), delay_ms=5_000)
            continue
        await mailbox.extend_visibility([message.receipt], 60_000)
        refused = await mailbox.ack_messages([read_receipt(write_receipt(message.receipt))])
        assert_type(refused, list[Rejected | None])


def handle(payload: bytes) -> None:
    """Stand for a user's own code."""


async def operate(mailbox: OwnedMailbox) -> None:
    await mailbox.set_topic_policy("orders", TopicPolicy(shards=16, max_attempts=3).validate())
    await mailbox.pause_topic("orders")
    await mailbox.resume_topic("orders")
    assert_type([each.paused for each in await mailbox.list_topics()], list[bool])
    assert_type(await mailbox.get_backlog("orders"), Backlog)
    assert_type(await mailbox.list_dead_letters("orders", reason="max_attempts", limit=10), Page[DeadLetter])
    assert_type(await mailbox.get_message("order-1"), MessageDetail)
    assert_type(await mailbox.redrive_dead_letters("orders", message_ids=["order-1"]), int)
    spec = RedriveSpec(topics=("orders.*",), reasons=("max_attempts",), rate=100)
    assert_type(await mailbox.preview_redrive(spec), RedrivePreview)
    job = await mailbox.start_redrive(spec)
    assert_type(await mailbox.change_redrive(job.job_id, "undo"), RedriveReport)
    assert_type(await mailbox.list_redrives(), list[RedriveReport])
    assert_type(await mailbox.list_redrive_messages(job.job_id, outcome="skipped"), Page[RedriveMessage])
    assert_type(await mailbox.purge_topic("orders", dead=True, ready=False), int)
    filter_ = SubscriptionFilter(("orders.*", "invoices"), {"country": "de"})
    assert_type(await mailbox.set_subscription("mail", filter_, start=0), SubscriptionReport)
    assert_type(await mailbox.rewind_subscription("mail", datetime.now(UTC), dry_run=True), RewindReport)
    spec_ = ScheduleSpec("reports", "0 3 * * *", "Europe/Madrid", missed="all")
    assert_type(await mailbox.set_schedule("nightly", spec_), ScheduleReport)
    assert_type(await mailbox.list_schedules(), list[ScheduleReport])
    assert_type(await mailbox.run_schedule("nightly"), Sent)
    assert_type(await mailbox.delete_schedule("nightly"), None)
    assert_type(await mailbox.delete_subscription("mail", dry_run=True), DeletionReport)


async def own() -> None:
    limits = MailboxLimits(in_flight_ceiling=100)
    try:
        async with open_mailbox("store.db", "acme@one", durability="relaxed", limits=limits) as mailbox:
            await send(mailbox)
        async with open_mailbox("memory:", mode="archive", default_policy=TopicPolicy()) as archive:
            await consume(archive)
    except Unavailable as error:
        assert_type(error.retry_after_ms, int)
    except PostroomError as error:
        assert_type(error.code, str)


def look() -> None:
    assert_type(list_mailboxes("store.db"), list[str])
    with read_mailbox("store.db", "acme@one") as reader:
        verified = reader.verify_log(expected_last=7, expected_chain="00" * 32, progress=print)
        assert_type(verified, Verification)
        assert_type(reader.get_backlog("orders", at=7), Backlog)
        assert_type(reader.list_dead_letters(at=datetime(2026, 1, 31, tzinfo=UTC)), Page[DeadLetter])
        account = reader.explain_message("order-1")
        assert_type([each.why for each in account.deliveries], list[str])
        simulation = Simulation(Changes(max_attempts=8, backoff_base_ms=500))
        reader.simulate_policy(simulation, start=7, topics=["github.*"])
        assert_type(simulation.comparison().worst.dead_lettered, int)
    with read_projections("store.db") as projections:
        page = projections.search_messages(EventFilter(topics=("github.*",)))
        assert_type([found.envelope_blob for found in page.items], list[bytes])


async def record(session: Session, engine: AsyncEngine) -> None:
    event = NewEvent(aggregate_type="order", aggregate_id="o-1", event_type="order_placed", payload={"n": 1})
    assert_type(Outbox(Tables(outbox_events="shop.outbox"), notify=True).record(session, event), list[UUID])
    with psycopg.connect() as connection:
        Outbox().record(connection, event, event)
    async with engine.begin() as opened, AsyncSession(engine) as async_session:
        assert_type(await AsyncOutbox().record(opened, event), list[UUID])
        await AsyncOutbox().record(async_session)


async def relay(messaging: MessagingSettings) -> None:
    async with open_relay(messaging, NatsSettings()) as running:
        await running.run()
    table = CaptureSettings(table="events", columns=CaptureColumns(payload="body", event_type="=made"))
    async with open_capture(messaging, table, NatsSettings()) as capture:
        await capture.run()
    async with open_outbox(messaging) as outbox:
        assert_type((await outbox.get_backlog()).count, int)


class Notifier:
    """Stand for a user's service, which asks for just the handlers it needs."""

    def __init__(self, send: SendMessage, receive: ReceiveMessages, ack: AckMessages) -> None:
        self.send = send
        self.receive = receive
        self.ack = ack


def inject(mailbox: OwnedMailbox) -> Notifier:
    return Notifier(mailbox.send_message, mailbox.receive_messages, mailbox.ack_messages)


worker = Worker("shop")


@worker.consumer("orders.*", concurrency=8, timeout=None)
async def place(message: ReceivedMessage, order: dict[str, str]) -> None:
    assert_type(message.attempt, int)


@worker.consumer(["orders.*", "invoices"], subscription="mail", headers={"country": "de"})
@worker.consumer("reports")
@worker.schedule(every("30s"), missed="skip", timeout="5s")
def report(text: str) -> None: ...


@worker.consumer("invoices", batch=10, results=True)
def invoice(ids: list[int], messages: list[ReceivedMessage]) -> list[str]:
    return [str(each) for each in ids]


async def send_to_handlers(mailbox: OwnedMailbox) -> None:
    assert_type(await worker.send(report, "text", mailbox=mailbox, delay="1h", key="a"), Sent)
    assert_type(worker.message(place, {"id": "1"}, topic="orders.eu", priority=9), NewMessage)
    await worker.call(invoice, 3, timeout="10s")
    await worker.send(report, b"data")  # type: ignore[arg-type]
    await worker.send(place, {"id": 1}, topic="orders.eu")  # type: ignore[arg-type]
    await worker.send(report, "text", delay=5)  # type: ignore[call-overload]
    worker.message(invoice, "3")  # type: ignore[arg-type]


async def work(mailbox: OwnedMailbox) -> int:
    assert_type(report("text"), None)
    counts = await worker.run(mailbox, once=True)
    assert_type(counts, WorkerCounts)
    return counts.handled


async def send_in_a_transaction(
    file: sqlite3.Connection, session: Session, connection: psycopg.AsyncConnection, message: NewMessage
) -> list[str]:
    ids = MailboxOutbox("acme@one", notify=True).record(file, message)
    ids += MailboxOutbox(schema="billing").record(session, message, message)
    return ids + await AsyncMailboxOutbox().record(connection, message)
