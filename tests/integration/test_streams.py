"""Streams and consumers of a real server become what the settings define."""

from collections.abc import Sequence
from typing import Any

import msgspec
import nats
import pytest
from nats.aio.client import Client
from nats.js.api import ConsumerConfig, StreamConfig

from postroom.adapters.cli.settings import InvalidSettings, Settings
from postroom.adapters.cli.streams import read_definitions
from postroom.adapters.compose.brokers import open_streams
from postroom.adapters.nats.connection import connect
from postroom.adapters.nats.definitions import Difference
from postroom.adapters.nats.plan import apply_plan, make_plan
from postroom.adapters.nats.settings import NatsSettings
from postroom.domain.errors import InvalidRequest

SEA = {"subjects": ["sea.event.>"], "max_age": "7d"}


def settings(streams: dict[str, Any], consumers: dict[str, Any] | None = None) -> Settings:
    return Settings(sections={"streams": streams, "consumers": consumers or {}})


async def applied(
    url: str, streams: dict[str, Any], consumers: dict[str, Any] | None = None
) -> Sequence[Difference]:
    """Apply definitions, and return how the server differs from them afterwards."""
    definitions = read_definitions(settings(streams, consumers))
    async with open_streams(NatsSettings(url)) as broker:
        await apply_plan(broker, await make_plan(broker, definitions))
        return (await make_plan(broker, definitions)).differences


async def config(client: Client, where: str) -> dict[str, Any]:
    answer = await client.request(f"$JS.API.{where}")
    found: dict[str, Any] = msgspec.json.decode(answer.data)["config"]
    return found


async def test_what_is_not_defined_is_left_alone(nats_url: str) -> None:
    async with connect(NatsSettings(nats_url), "test") as client:
        ours = StreamConfig(name="SEA_EVENTS", subjects=["sea.event.>"], max_msgs=7, description="ours")
        await client.jetstream().add_stream(ours)
        await client.jetstream().add_stream(name="FOREIGN", subjects=["foreign"])
        assert await applied(nats_url, {"SEA_EVENTS": SEA}) == []
        found = await config(client, "STREAM.INFO.SEA_EVENTS")
        assert (found["max_msgs"], found["description"]) == (7, "ours")
        assert found["max_age"] == 7 * 86_400 * 10**9
        assert await config(client, "STREAM.INFO.FOREIGN")


async def test_a_consumer_made_elsewhere_gives_its_limit_to_the_worker(nats_url: str) -> None:
    async with connect(NatsSettings(nats_url), "test") as client:
        await client.jetstream().add_stream(name="SEA_EVENTS", subjects=["sea.event.>"])
        made = ConsumerConfig(durable_name="reader", max_deliver=7, filter_subject="sea.event.>")
        await client.jetstream().add_consumer("SEA_EVENTS", made)
        reader = {"stream": "SEA_EVENTS", "ack_wait": "1m"}
        assert await applied(nats_url, {"SEA_EVENTS": SEA}, {"reader": reader}) == []
        found = await config(client, "CONSUMER.INFO.SEA_EVENTS.reader")
        assert (found["max_deliver"], found["metadata"]["postroom.max_deliver"]) == (-1, "7")
        assert (found["ack_wait"], found["filter_subject"]) == (60 * 10**9, "sea.event.>")


async def test_several_filters_become_one_and_one_becomes_several(nats_url: str) -> None:
    for subjects in (["sea.event.a", "sea.event.b"], ["sea.event.a"], [], ["sea.event.b", "sea.event.c"]):
        reader = {"stream": "SEA_EVENTS", "filter_subjects": subjects}
        assert await applied(nats_url, {"SEA_EVENTS": SEA}, {"reader": reader}) == []


async def test_every_field_can_be_given_and_those_that_can_change_can_change(nats_url: str) -> None:
    stream = {
        **SEA,
        "retention": "limits",
        "storage": "memory",
        "replicas": 1,
        "discard": "new",
        "compression": "none",
        "max_bytes": "64MiB",
        "max_msgs": 1_000,
        "max_msg_size": "1kB",
        "duplicate_window": "1m",
    }
    reader = {
        "stream": "SEA_EVENTS",
        "durable": "other_reader",
        "filter_subject": "sea.event.a",
        "ack_policy": "explicit",
        "deliver_policy": "new",
        "ack_wait": "30s",
        "max_deliver": 3,
        "max_ack_pending": 10,
    }
    assert await applied(nats_url, {"SEA_EVENTS": stream}, {"reader": reader}) == []
    stream |= {"subjects": ["sea.>"], "retention": "interest", "discard": "old", "max_age": "1d"}
    stream |= {"max_bytes": "1GB", "max_msgs": 5, "max_msg_size": "2MB", "duplicate_window": "2m"}
    reader |= {"filter_subject": "sea.event.b", "ack_wait": "2m", "max_deliver": 20, "max_ack_pending": 50}
    assert await applied(nats_url, {"SEA_EVENTS": stream}, {"reader": reader}) == []


@pytest.mark.parametrize(
    ("before", "after"), [("limits", "workqueue"), ("workqueue", "limits"), ("workqueue", "interest")]
)
async def test_a_retention_that_nats_can_not_change_is_refused_in_the_plan(
    nats_url: str, before: str, after: str
) -> None:
    await applied(nats_url, {"SEA_EVENTS": SEA | {"retention": before}})
    with pytest.raises(InvalidRequest, match=rf"Nothing was changed.*retention from {before} to {after}"):
        await applied(nats_url, {"SEA_EVENTS": SEA | {"retention": after}})


async def test_a_consumer_that_nats_can_not_change_is_refused_in_the_plan(nats_url: str) -> None:
    reader = {"stream": "SEA_EVENTS"}
    await applied(nats_url, {"SEA_EVENTS": SEA}, {"reader": reader})
    with pytest.raises(InvalidRequest, match=r"Nothing was changed.*deliver_policy from all to new"):
        await applied(nats_url, {"SEA_EVENTS": SEA}, {"reader": reader | {"deliver_policy": "new"}})


async def test_what_nats_refuses_for_reasons_of_its_own_is_passed_on(nats_url: str) -> None:
    await applied(nats_url, {"SEA_EVENTS": SEA})
    with pytest.raises(InvalidRequest, match=r"Stream OTHER is refused by NATS: subjects overlap"):
        await applied(nats_url, {"OTHER": {"subjects": ["sea.event.a"]}})


async def test_a_consumer_of_a_stream_that_nobody_has_is_named(nats_url: str) -> None:
    with pytest.raises(InvalidRequest, match="Consumer reader reads stream SEE_EVENTS, which neither exists"):
        await applied(nats_url, {"SEA_EVENTS": SEA}, {"reader": {"stream": "SEE_EVENTS"}})


async def test_more_streams_than_the_server_lists_at_once_are_all_listed(nats_url: str) -> None:
    client = await nats.connect(nats_url)
    for n in range(300):
        await client.jetstream().add_stream(name=f"S{n:03}", subjects=[f"s{n}"], storage="memory")
    await client.close()
    async with open_streams(NatsSettings(nats_url)) as streams:
        assert [each.name for each in await streams.list_streams()] == [f"S{n:03}" for n in range(300)]


@pytest.mark.parametrize(
    ("flag", "setting", "replicas"), [(None, None, 3), (None, "1", 1), (2, "1", 2), (2, None, 2)]
)
def test_the_number_of_replicas_of_all_streams_can_be_set_at_once(
    flag: int | None, setting: str | None, replicas: int
) -> None:
    common = {} if setting is None else {"replicas": setting}
    (stream,) = read_definitions(settings(common | {"SEA_EVENTS": SEA | {"replicas": 3}}), flag)
    assert stream.replicas == replicas  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("streams", "message"),
    [
        ({"S": {"subject": ["a"]}}, r"\[streams.S\] in .* has no key 'subject'; did you mean subjects\?"),
        ({"S": {"subjects": ["a"], "max_bytes": "10G"}}, "max_bytes: '10G' is not a size"),
        ({"S": {"subjects": ["a"], "max_age": "soon"}}, "max_age: 'soon' is not a duration"),
        ({"S": {"subjects": ["a"], "storage": "tape"}}, "Invalid enum value 'tape'"),
        ({"S": {"subjects": ["a"], "replicas": 9}}, "replicas must be 1 to 5; it was 9"),
        ({"S": "sea.event.>"}, r"\[streams.S\] in postroom.toml must be a table"),
        ({"a.b": {"subjects": ["a"]}}, "'a.b' can't be the name of a stream"),
        ({}, "postroom.toml defines no streams"),
    ],
)
def test_a_stream_that_makes_no_sense_is_named(streams: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSettings, match=message):
        read_definitions(settings(streams))


@pytest.mark.parametrize(
    ("consumer", "message"),
    [
        ({"ack_wait": "1m"}, r"\[consumers.reader\] in .*missing required field `stream`"),
        ({"stream": "S", "ack_policy": "none"}, "Invalid enum value 'none'"),
        ({"stream": "S", "server_max_deliver": 20}, "has no key 'server_max_deliver'"),
        ({"stream": "S", "filter_subject": "a", "filter_subjects": ["b"]}, "has both filter_subject and"),
        ({"stream": "S", "max_deliver": 0}, "max_deliver must be at least 1; it was 0"),
    ],
)
def test_a_consumer_that_makes_no_sense_is_named(consumer: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSettings, match=message):
        read_definitions(settings({}, {"reader": consumer}))
