"""Nothing that is logged, at any level, has a payload, a token, a principal or the value of a header."""

import io
import json
import logging
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psycopg
import pydantic
import pytest

from postroom import (
    Mailbox,
    MessagingSettings,
    NewEvent,
    NewMessage,
    OutboxSettings,
    PoisonMessage,
    PostroomError,
    TopicPolicy,
    Worker,
    connect,
    open_mailbox,
    open_relay,
    outbox,
    transaction,
)
from postroom.adapters.cli.logs import make_formatter
from postroom.application.ports.inbox import HandlerRequest
from tests.integration.inbox_world import opened_world
from tests.integration.ingest_world import ingest, namespace, publish, stream_of
from tests.support.stores import envelope
from tests.support.surfaces import served

PAYLOAD, TOKEN, PRINCIPAL, HEADER = "canary-payload", "canary-token", "canary-principal", "canary-header"
SECRETS = [
    each for text in (PAYLOAD, TOKEN, PRINCIPAL, HEADER) for each in (text, b64encode(text.encode()).decode())
]
BODY = f'{{"total": "{PAYLOAD}"}}'.encode()
ORDER = NewMessage(topic="orders", payload=BODY, principal=PRINCIPAL, attrs={"note": HEADER}, idem_key="1")
FAST = TopicPolicy(max_attempts=1, backoff_base_ms=1, backoff_max_ms=1)


class Order(pydantic.BaseModel):
    total: int


@contextmanager
def logged() -> Iterator[io.StringIO]:
    """Yield what is logged in the context, as the command line writes it with `--log-level debug`."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(make_formatter("json"))
    root = logging.getLogger()
    root.addHandler(handler)
    logging.getLogger("postroom").setLevel(logging.DEBUG)
    try:
        yield stream
    finally:
        root.removeHandler(handler)


def check(stream: io.StringIO, *events: str) -> None:
    """Check that these events, and no secrets, were logged."""
    text = stream.getvalue()
    assert [event for event in events if f'"event": "{event}"' not in text] == []
    assert [secret for secret in SECRETS if secret in text] == []


async def use(mailbox: Mailbox) -> None:
    """Call every command and query that takes or returns a message."""
    await mailbox.send_message(ORDER)
    await mailbox.send_batch([NewMessage(topic="orders", payload=BODY, principal=PRINCIPAL), ORDER])
    with pytest.raises(PostroomError):
        await mailbox.send_message(NewMessage(topic="orders", payload=PAYLOAD.encode(), idem_key="1"))
    await mailbox.peek_messages("orders")
    (first,) = await mailbox.receive_messages("orders", max_messages=1)
    await first.nack(delay_ms=0)
    await mailbox.get_message(first.message_id)
    await mailbox.explain_message(first.message_id)
    await mailbox.redrive_dead_letters("orders")
    for message in await mailbox.receive_messages("orders"):
        await message.ack()


async def test_no_surface_logs_what_passes_through_it(tmp_path: Path) -> None:
    store = str(tmp_path / "store.db")
    with logged() as stream:
        async with (
            open_mailbox(store, default_policy=FAST, durability="relaxed") as owner,
            served(owner, "http") as http,
            served(owner, "grpc") as grpc,
        ):
            await use(owner)
            async with connect(store) as mailbox:
                await use(mailbox)
            for url in (http, grpc):
                async with connect(url, token=TOKEN) as mailbox:
                    await use(mailbox)
            headers = {
                "Authorization": f"Bearer {TOKEN}",
                "X-Note": HEADER,
                "Content-Type": "application/json",
            }
            async with aiohttp.ClientSession(http, headers=headers) as session:
                for body in (BODY, BODY[:-1], f'{{"topic": "{PAYLOAD} "}}'.encode()):
                    async with session.post("/v1/send", data=body) as answer:
                        assert answer.status == 400
                async with session.get(f"/v1/messages?principal={PRINCIPAL}&correlation_id={HEADER}"):
                    pass
    check(stream, "mailbox.owned", "http.request")


class Hostile(Exception):
    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]  # as a user may write it
        raise RuntimeError


async def test_a_worker_logs_no_value_of_a_payload_however_an_error_quotes_it() -> None:
    values = ["Zo\u00eb Zephyr", 'it\'s "Xanadu"\nfor Quentin', "Ulysses" * 20]
    payload = json.dumps({"values": values, "inner": json.dumps({"name": "Wilhelmina"})})
    errors: list[Callable[[], Any]] = [
        lambda: ValueError(repr(values)),
        lambda: ValueError(json.dumps(values)),
        lambda: ValueError(json.dumps(values, ensure_ascii=False).encode()),
        lambda: ExceptionGroup("all", [ValueError(values[1])]),
        lambda: ValueError(json.loads(json.loads(payload)["inner"])["name"]),
        lambda: pydantic.TypeAdapter(int).validate_python(values[2]),
        Hostile,
    ]
    worker = Worker()

    @worker.consumer("orders")
    def fail(_: bytes) -> None:
        raise errors.pop(0)()

    with logged() as stream:
        async with open_mailbox("memory:", default_policy=FAST) as mailbox:
            count = len(errors)
            await mailbox.send_batch([NewMessage(topic="orders", payload=payload.encode()) for _ in errors])
            assert (await worker.run(mailbox, once=True)).failed == count
    _, *lines = [json.loads(each) for each in stream.getvalue().splitlines()]
    assert [each["event"] for each in lines] == ["worker.handler_failed"] * count
    assert ["[redacted]" in each.get("exception", "") for each in lines] == [True] * (count - 1) + [False]
    for part in ("Zephyr", "Xanadu", "Quentin", "Ulysses", "Wilhelmina"):
        assert part not in stream.getvalue()


async def test_a_worker_does_not_log_what_its_handlers_can_not_read_or_refuse() -> None:
    worker = Worker()

    @worker.consumer("orders")
    async def place(order: Order) -> None:
        raise AssertionError

    @worker.consumer("returns")
    def refuse(payload: bytes) -> None:
        raise ValueError(payload)

    with logged() as stream:
        async with open_mailbox("memory:", default_policy=FAST) as mailbox:
            await mailbox.send_message(ORDER)
            await mailbox.send_message(NewMessage(topic="returns", payload=BODY))
            counts = await worker.run(mailbox, once=True)
            assert counts.failed == 2
            assert "in refuse\\n    raise ValueError(payload)\\n" in stream.getvalue()
            assert "[redacted]" in stream.getvalue()
            (letter, _) = (await mailbox.list_dead_letters()).items
            assert PAYLOAD in (letter.last_error or "")  # where whoever may read payloads finds it
    check(stream, "worker.handler_failed")


async def test_relay_inbox_and_ingester_do_not_log_what_they_pass_on(
    nats_url: str, messaging_database: str, tmp_path: Path
) -> None:
    worker = Worker(
        middlewares=[transaction(lambda: psycopg.AsyncConnection.connect(messaging_database)), outbox()]
    )

    @worker.consumer("orders")
    async def place(payload: bytes) -> list[NewEvent]:
        return [
            NewEvent(aggregate_type="order", aggregate_id=n, event_type="placed", payload={"text": PAYLOAD})
            for n in range(2)
        ]

    async def confirm(request: HandlerRequest) -> None:
        raise PoisonMessage(f"refused: {request.payload}")

    with logged() as stream:
        async with opened_world(nats_url, messaging_database) as world, open_mailbox("memory:") as mailbox:
            await world.make_streams()
            await mailbox.send_message(ORDER)
            await worker.run(mailbox, once=True)
            shop = MessagingSettings(messaging_database, "shop")
            async with open_relay(shop, world.nats, OutboxSettings(hints=False)) as relay:
                assert await relay.relay_once() == 2
            await world.publish(PAYLOAD.encode(), headers={"X-Note": HEADER})
            await world.work(confirm)
        async with stream_of(nats_url) as client:
            await publish(client, envelope("1"), PAYLOAD.encode(), envelope("2")[:-1])
            counts = await ingest(namespace(nats_url, str(tmp_path / "archive.db")))
            assert counts.skipped
    check(stream, "inbox.dead_lettered", "ingest.skipped")
