"""Relays to a mailbox, to Kafka and to RabbitMQ; for JetStream see `test_outbox_relay.py`."""

from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import aio_pika
import psycopg
import pytest
from aio_pika.abc import AbstractChannel
from aio_pika.exceptions import DeliveryError

from postroom import TopicPolicy, connect
from postroom.adapters.compose.outbox import (
    EventTarget,
    KafkaSettings,
    MailboxTarget,
    MessagingSettings,
    OutboxSettings,
    RabbitmqSettings,
    open_outbox,
    open_relay,
)
from postroom.application.cloudevents import MAILBOX
from postroom.application.outbox.formats import FormatName
from postroom.domain.errors import InvalidRequest, Unavailable
from tests.support.cloud_events import read_by_sdk
from tests.support.outboxes import column, order_placed, record
from tests.support.servers.rabbitmq import RabbitmqServer


async def relay_all(database: str, target: EventTarget, **settings: Any) -> None:
    messaging = MessagingSettings(database, "sea")
    options = OutboxSettings(hints=False, cleanup_every_ms=0, **settings)
    async with open_relay(messaging, target, options) as relay:
        while await relay.relay_once():
            pass


async def test_a_mailbox_has_each_event_once_in_the_order_of_its_aggregate(
    messaging_database: str, tmp_path: Path
) -> None:
    store = str(tmp_path / "mail.db")
    ids = record(messaging_database, *(order_placed(f"Größe {n % 2}", n) for n in range(10)))
    target = MailboxTarget(address=store, mailbox="shop@local")
    await relay_all(messaging_database, target)
    with psycopg.connect(messaging_database) as connection:  # as if a relay died before it recorded them
        connection.execute("UPDATE outbox_events SET published_at = NULL")
    await relay_all(messaging_database, target)
    assert None not in column(messaging_database, "published_at")
    async with connect(store, "shop@local") as mailbox:
        received = await mailbox.receive_messages("sea.order", max_messages=100)
    assert {each.message_id for each in received} == {str(id_) for id_ in ids}
    assert len(received) == 10
    for order in ("Größe 0", "Größe 1"):
        own = [each.message_id for each in received if each.attrs["Aggregate-Id"] == order]
        assert own == sorted(own)


async def test_a_topic_is_filled_in_from_the_event(messaging_database: str, tmp_path: Path) -> None:
    store = str(tmp_path / "mail.db")
    record(messaging_database, order_placed("o-1", 1, event_version=2))
    target = MailboxTarget(address=store)
    await relay_all(
        messaging_database, target, topic="{context}/{aggregate_type}/{event_type}/{event_version}"
    )
    async with connect(store) as mailbox:
        (message,) = await mailbox.receive_messages("sea/order/order_placed/2")
    assert (message.payload, message.content_type) == (b'{"n": 1, "order": "o-1"}', "application/json")


@pytest.mark.parametrize("name", ["cloudevents-binary", "cloudevents-structured"])
async def test_events_are_relayed_as_cloud_events(
    messaging_database: str, tmp_path: Path, name: FormatName
) -> None:
    store = str(tmp_path / "mail.db")
    (id_,) = record(messaging_database, order_placed("o-1", 1, attributes={"tenant": "Zoë"}))
    target = MailboxTarget(address=store)
    await relay_all(messaging_database, target, format=name, source="https://shop.example/orders")
    async with connect(store) as mailbox:
        (message,) = await mailbox.receive_messages("sea.order")
    assert (message.message_id, message.attrs["Aggregate-Id"]) == (str(id_), "o-1")
    headers = message.attrs | {"Content-Type": message.content_type or ""}
    event = read_by_sdk(MAILBOX, message.payload, headers)
    assert (event.get_source(), event.get_id()) == ("https://shop.example/orders", str(id_))
    assert (event.get_data(), event.get_extension("tenant")) == ({"n": 1, "order": "o-1"}, "Zoë")


async def test_an_event_that_is_no_cloud_event_is_parked_with_the_reason(
    messaging_database: str, tmp_path: Path
) -> None:
    record(messaging_database, order_placed("o-1", 1, attributes={"CE-id": "5"}), order_placed("o-2", 1))
    record(messaging_database, order_placed("o-3\x85", 1))
    target = MailboxTarget(address=str(tmp_path / "mail.db"))
    await relay_all(messaging_database, target, format="cloudevents-binary", max_attempts=1)
    errors = column(messaging_database, "publish_error")
    assert "'CE-id' would be read as an attribute of the CloudEvent itself; name it differently" in errors[0]
    assert errors[1] is None
    assert "The subject of the CloudEvent has control characters" in errors[2]


async def test_a_full_topic_of_a_mailbox_holds_back_its_own_events_only(
    messaging_database: str, tmp_path: Path
) -> None:
    store = str(tmp_path / "mail.db")
    events = [
        order_placed(f"{kind}-{n}", n, aggregate_type=kind) for kind in ("full", "free") for n in range(9)
    ]
    record(messaging_database, *events)
    async with connect(store) as mailbox:
        await mailbox.set_topic_policy("sea.full", TopicPolicy(shards=1, shard_capacity=2))
        await relay_all(messaging_database, MailboxTarget(address=store), max_attempts=2, backoff_max_ms=1)
        assert len(await mailbox.receive_messages("sea.free", max_messages=100)) == 9
        assert len(await mailbox.receive_messages("sea.full", max_messages=100)) == 2
    errors = [error for error in column(messaging_database, "publish_error") if error]
    assert len(errors) == 7
    assert all("Mailbox main@local is full" in error for error in errors)


@pytest.mark.parametrize("kind", ["classic", "quorum"])
async def test_a_full_queue_of_rabbitmq_holds_back_its_own_events_only_and_they_are_parked(
    messaging_database: str, rabbitmq_server: RabbitmqServer, kind: str
) -> None:
    full, free = (f"{name}-{uuid4().hex}" for name in ("full", "free"))
    # The events of the full queue come first, in every partition.
    record(
        messaging_database,
        *(order_placed(f"{name}-{n}", n, aggregate_type=name) for name in (full, free) for n in range(40)),
    )
    target = RabbitmqSettings(url=rabbitmq_server.url)
    settings: dict[str, Any] = {"topic": "{aggregate_type}", "max_attempts": 2, "backoff_max_ms": 1}
    async with await aio_pika.connect(rabbitmq_server.url) as connection:
        channel = await connection.channel()
        limits: dict[str, Any] = {"x-queue-type": kind, "x-max-length": 1, "x-overflow": "reject-publish"}
        limited = await channel.declare_queue(full, durable=True, arguments=limits)
        await channel.declare_queue(free, durable=True)
        for n in range(10):  # a quorum queue takes some more than its limit at first
            with suppress(DeliveryError):
                await channel.default_exchange.publish(aio_pika.Message(b"%d" % n), full)
        await relay_all(messaging_database, target, **settings)
        assert await stored(channel, free) == {f"{free}-{n}" for n in range(40)}
        errors = [error for error in column(messaging_database, "publish_error") if error]
        assert len(errors) == 40
        assert all(
            f"could not store a message at {full}: a queue refuses it, as it is full" in e for e in errors
        )
        assert column(messaging_database, "publish_attempts") == [2] * 40 + [1] * 40
        await limited.delete(if_unused=False, if_empty=False)
        await channel.declare_queue(full, durable=True)
        async with open_outbox(MessagingSettings(messaging_database, "sea")) as desk:
            assert await desk.retry_events.all() == 40
        await relay_all(messaging_database, target, **settings)
        assert await stored(channel, full) == {f"{full}-{n}" for n in range(40)}
    assert None not in column(messaging_database, "published_at")


async def stored(channel: AbstractChannel, queue: str) -> set[str]:
    """Take all messages out of a queue, and return the aggregates of their events."""
    taken = await channel.get_queue(queue)
    aggregates = set()
    while message := await taken.get(no_ack=True, fail=False, timeout=60):
        aggregates.add(str(message.headers["Aggregate-Id"]))
    return aggregates


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"format": "cloudevents"}, "The format 'cloudevents' is not one of postroom, cloudevents-binary"),
        ({"format": 5}, "format must be"),
        ({"format": "cloudevents-binary", "source": "a b"}, "The source 'a b' is not a URI"),
        ({"format": "cloudevents-binary", "source": 5}, "source must be"),
    ],
)
async def test_a_format_that_is_invalid_is_refused_before_anything_is_connected(
    settings: dict[str, Any], reason: str
) -> None:
    target = MailboxTarget(address="/no/such/folder/mail.db")
    with pytest.raises(InvalidRequest, match=reason):
        await relay_all("postgresql://127.0.0.1:9/shop", target, **settings)


@pytest.mark.parametrize("topic", ["{", "{order}", "{context!r}", "{context:>9}", "{}", "{0}", "{context.x}"])
async def test_a_topic_that_can_not_be_filled_in_is_refused_before_anything_is_connected(topic: str) -> None:
    target = MailboxTarget(address="/no/such/folder/mail.db")
    with pytest.raises(InvalidRequest, match="is not a valid template; write text with any of"):
        await relay_all("postgresql://127.0.0.1:9/shop", target, topic=topic)


@pytest.mark.parametrize(
    "target",
    [KafkaSettings(url="kafka://127.0.0.1:1"), RabbitmqSettings(url="amqp://me:secret@127.0.0.1:1")],
    ids=["kafka", "rabbitmq"],
)
async def test_an_outage_of_a_broker_counts_no_attempt(messaging_database: str, target: EventTarget) -> None:
    record(messaging_database, order_placed("o-1", 1))
    with pytest.raises(Unavailable) as outage:
        await relay_all(messaging_database, target)
    assert "secret" not in f"{outage.value} {target!r}"
    assert column(messaging_database, "publish_attempts") == [0]
