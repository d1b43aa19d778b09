"""A stream is read without gaps, whoever has the deliveries of its consumer."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from nats.aio.client import Client
from nats.js.api import ConsumerConfig, DeliverPolicy

from postroom.adapters.nats.ordered_stream import JetStreamOrderedStream
from postroom.adapters.nats.pull_consumer import PullConsumer
from postroom.adapters.nats.settings import NatsSettings
from postroom.adapters.nats.source import JetStreamSource
from postroom.application.ports.source import SourceMessage
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable
from tests.support.waiting import SECONDS, until_answer

WAIT_MS = 200
CONSUMER = PullConsumer(durable="sea", stream="SHOP", subjects=("shop.a.>", "shop.b.>"), create=True)


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[tuple[JetStreamSource, JetStreamOrderedStream]]:
    source = await JetStreamSource.open(NatsSettings(url), CONSUMER)
    stream = JetStreamOrderedStream(source, "SHOP", "sea")
    try:
        yield source, stream
    finally:
        await stream.close()


async def publish(client: Client, *subjects: str) -> None:
    jetstream = client.jetstream(timeout=SECONDS)
    for subject in subjects:
        await jetstream.publish(f"shop.{subject}.x", subject.encode(), headers={"Event-Type": subject})


def shown(messages: Sequence[SourceMessage]) -> list[tuple[str, str]]:
    return [(each.sequence, each.data.decode()) for each in messages]


async def take(source: JetStreamSource, count: int) -> None:
    """Receive messages and do nothing with them, as a worker that is paused."""
    async with asyncio.timeout(SECONDS):
        while count > 0:
            count -= len(await source.fetch(count, WAIT_MS))


async def read_on(stream: JetStreamOrderedStream, after: int) -> None:
    """Look for what comes after a message, until that is an error."""
    async with asyncio.timeout(SECONDS):
        while True:
            assert await stream.read(after, 10, WAIT_MS) == []


async def test_what_another_worker_received_and_holds_is_read_from_the_stream(
    nats_url: str, client: Client
) -> None:
    await client.jetstream().add_stream(name="SHOP", subjects=["shop.>"])
    async with opened(nats_url) as (paused, _), opened(nats_url) as (_, stream):
        state = await stream.state()
        assert (state.floor, state.delivered) == (0, 0)
        await publish(client, "a", "other", "b", "a", "a", "b")
        await take(paused, 2)
        first = await stream.read(0, 2, WAIT_MS)
        assert shown(first) == [("1", "a"), ("3", "b")]
        assert first[0].headers["Event-Type"] == "a"
        rest: list[SourceMessage] = []
        while len(rest) < 3:
            rest += await stream.read(int(rest[-1].sequence) if rest else 3, 10, WAIT_MS)
        assert shown(rest) == [("4", "a"), ("5", "a"), ("6", "b")]
        await stream.ack([*first, *rest])
        await publish(client, "a", "b")
        await take(paused, 2)
        assert shown(await stream.read(6, 10, 1)) == [("7", "a"), ("8", "b")]
        assert await stream.read(8, 10, 1) == []


async def test_deliveries_of_what_is_stored_are_acknowledged(nats_url: str, client: Client) -> None:
    await client.jetstream().add_stream(name="SHOP", subjects=["shop.>"])
    async with opened(nats_url) as (_, stream):
        await stream.state()
        await publish(client, "a", "b", "a")

        async def is_last_unsettled() -> bool:
            assert shown(await stream.read(2, 10, WAIT_MS)) == [("3", "a")]
            info = await client.jetstream().consumer_info("SHOP", "sea")
            assert info.delivered is not None
            return (info.delivered.stream_seq, info.num_ack_pending) == (3, 1)

        await until_answer(is_last_unsettled)


async def test_a_message_that_was_deleted_from_the_stream_is_no_gap(nats_url: str, client: Client) -> None:
    jetstream = client.jetstream()
    await jetstream.add_stream(name="SHOP", subjects=["shop.>"])
    async with opened(nats_url) as (paused, _), opened(nats_url) as (_, stream):
        await stream.state()
        await publish(client, "a", "b", "a")
        await take(paused, 1)
        await jetstream.delete_msg("SHOP", 1)
        assert shown(await stream.read(0, 10, WAIT_MS)) == [("2", "b"), ("3", "a")]


async def test_a_recreated_stream_is_not_read_until_its_state_was(nats_url: str, client: Client) -> None:
    jetstream = client.jetstream()
    await jetstream.add_stream(name="SHOP", subjects=["shop.>"])
    async with opened(nats_url) as (_, stream):
        before = await stream.state()
        await publish(client, "a")
        await jetstream.delete_stream("SHOP")
        with pytest.raises(NotFound):
            await stream.state()
        await jetstream.add_stream(name="SHOP", subjects=["shop.>"])
        await jetstream.add_consumer("SHOP", ConsumerConfig(durable_name="sea"))
        await publish(client, "b")
        with pytest.raises(Unavailable, match="was recreated"):
            await read_on(stream, 1)
        after = await stream.state()
        assert after.incarnation != before.incarnation
        assert shown(await stream.read(0, 10, WAIT_MS)) == [("1", "b")]


async def test_a_consumer_that_passes_over_messages_is_refused(nats_url: str, client: Client) -> None:
    jetstream = client.jetstream()
    await jetstream.add_stream(name="SHOP", subjects=["shop.>"])
    config = ConsumerConfig(
        durable_name="sea",
        deliver_policy=DeliverPolicy.LAST_PER_SUBJECT,
        filter_subjects=["shop.a.>", "shop.b.>"],
    )
    await jetstream.add_consumer("SHOP", config)
    async with opened(nats_url) as (_, stream):
        with pytest.raises(InvalidRequest, match="only the last message of each subject"):
            await stream.state()
