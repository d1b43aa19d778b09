"""Ingestion from a real JetStream stream into both stores: what is stored, and what is refused."""

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nats.aio.client import Client
from nats.js.api import ConsumerConfig
from redis.asyncio import Redis

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.ingest import reload_namespace
from postroom.adapters.compose.queries import read_mailbox
from postroom.application.cloudevents import NATS
from postroom.application.ingest.file_import import RecordMapping, TopicTemplate
from postroom.application.ingest.namespace import IngestCounts, PayloadSchema, RedisSource, SchemaFormat
from postroom.domain.envelope.build import open_envelope
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.envelope.validation import ValidationMode
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import MessageSent
from tests.integration.ingest_world import (
    DEAD,
    DURABLE,
    MAILBOX,
    STREAM,
    SUBJECT,
    dead_letters,
    envelopes,
    ingest,
    ingesting,
    namespace,
    publish,
    stored,
    unacked,
)
from tests.support.archived import ARCHIVED, archived, cloud_events
from tests.support.logs import capture_logs
from tests.support.stores import envelope
from tests.support.waiting import SECONDS, until


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "store.db")
    url: str = request.getfixturevalue("postgres_store")
    return url


async def test_every_message_is_stored_once_and_acked(nats_url: str, client: Client, store: str) -> None:
    ids = [f"order-{number}" for number in range(500)]
    await publish(client, *envelopes(ids))
    assert await ingest(namespace(nats_url, store)) == IngestCounts(received=500, stored=500)
    assert stored(store) == Counter(ids)
    assert await unacked(client) == 0
    assert await ingest(namespace(nats_url, store)) == IngestCounts()


async def test_what_the_stream_has_twice_is_stored_once(nats_url: str, client: Client, store: str) -> None:
    await publish(client, *envelopes(["1", "2", "1"]))
    await publish(client, *envelopes(["2", "3"]))
    assert await ingest(namespace(nats_url, store)) == IngestCounts(received=5, stored=3, duplicates=2)
    assert stored(store) == Counter(["1", "2", "3"])


async def test_another_consumer_of_the_same_messages_adds_nothing(
    nats_url: str, client: Client, store: str
) -> None:
    await publish(client, *envelopes(["1", "2"]))
    await ingest(namespace(nats_url, store))
    counts = await ingest(namespace(nats_url, store, consumer_group="again"))
    assert counts == IngestCounts(received=2, duplicates=2)


async def test_cloud_events_are_archived_and_invalid_ones_become_dead_letters(
    nats_url: str, client: Client, store: str
) -> None:
    for event in cloud_events(NATS):
        await client.jetstream().publish(SUBJECT, event.payload, headers=event.headers)
    await publish(client, *envelopes(["1"]))
    what = namespace(nats_url, store, dead_letter_subject=DEAD)
    assert await ingest(what) == IngestCounts(received=6, stored=3, duplicates=1, dead_lettered=2)
    assert stored(store) == Counter(["/shop|1", "/shop|2", "1"])
    assert archived(store, what.mailbox) == ARCHIVED
    reasons = [headers["Postroom-Reason"] for _, headers in await dead_letters(client)]
    assert "This is a batch of CloudEvents" in reasons[0]
    assert reasons[1] == "The CloudEvent has no source."


async def test_wildcards_choose_subjects(nats_url: str, client: Client, sqlite: str) -> None:
    await publish(client, envelope("1"), subject="acme.orders.placed")
    await publish(client, envelope("2"), subject="acme.orders.paid")
    await publish(client, envelope("3"), subject="acme.stock.placed")
    await ingest(namespace(nats_url, sqlite, subject="acme.*.placed"))
    assert stored(sqlite) == Counter(["1", "3"])


async def test_bytes_that_are_no_envelope_are_skipped_with_a_warning(
    nats_url: str, client: Client, store: str
) -> None:
    await publish(client, envelope("1"), b"junk", b"", envelope("2"))
    with capture_logs() as logs:
        assert await ingest(namespace(nats_url, store)) == IngestCounts(received=4, stored=2, skipped=2)
    skipped = [each for each in logs if each["event"] == "ingest.skipped"]
    assert [(each["subject"], each["sequence"], each["log_level"]) for each in skipped] == [
        (SUBJECT, "2", "warning"),
        (SUBJECT, "3", "warning"),
    ]
    assert "not a PrismEnvelope" in skipped[0]["reason"]
    assert stored(store) == Counter(["1", "2"])
    assert await unacked(client) == 0


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (ValidationMode.STRICT, IngestCounts(received=1, skipped=1)),
        (ValidationMode.WARN, IngestCounts(received=1, stored=1)),
        (ValidationMode.DISABLED, IngestCounts(received=1, stored=1)),
    ],
)
async def test_an_envelope_without_id_is_refused_stored_with_a_warning_or_just_stored(
    nats_url: str, client: Client, sqlite: str, mode: ValidationMode, expected: IngestCounts
) -> None:
    await publish(client, envelope(""))
    with capture_logs() as logs:
        assert await ingest(namespace(nats_url, sqlite, envelope_validation=mode)) == expected
    warned = [each["problem"] for each in logs if each["event"] == "ingest.problem"]
    assert len(warned) == (1 if mode == ValidationMode.WARN else 0)


async def test_a_running_ingester_takes_over_how_a_namespace_validates(
    nats_url: str, client: Client, sqlite: str
) -> None:
    strict = namespace(nats_url, sqlite)
    async with ingesting(strict) as ingester:
        running = asyncio.create_task(ingester.run())
        await publish(client, envelope(""))
        await until(lambda: ingester.counts.skipped == 1)
        reload_namespace(ingester, namespace(nats_url, sqlite, envelope_validation=ValidationMode.DISABLED))
        await publish(client, envelope(""))
        await until(lambda: ingester.counts.stored == 1)
        missing = PayloadSchema(
            topic="*",
            format=SchemaFormat.JSON_SCHEMA,
            message_name=None,
            file=Path("/nowhere/schema.json"),
            validation=ValidationMode.STRICT,
            allows_unknown_fields=True,
        )
        with pytest.raises(InvalidRequest):
            reload_namespace(ingester, namespace(nats_url, sqlite, payload_schemas=(missing,)))
        await publish(client, envelope("7"))
        await until(lambda: ingester.counts.stored == 2)
        ingester.stop()
        await running


async def test_a_newer_envelope_is_stored_byte_for_byte_with_a_warning(
    nats_url: str, client: Client, sqlite: str
) -> None:
    newer = PrismEnvelope.FromString(envelope("1"))
    newer.envelope_version = 2
    blob = newer.SerializeToString() + b"\xfa\x3f\x03new"  # a field that we don't know
    await publish(client, blob)
    with capture_logs() as logs:
        assert await ingest(namespace(nats_url, sqlite)) == IngestCounts(received=1, stored=1)
    (warned,) = [each for each in logs if each["event"] == "ingest.problem"]
    assert "version 2" in warned["problem"]
    async with open_mailbox(sqlite, MAILBOX) as postroom:
        assert (await postroom.get_message("1")).item.envelope_blob == blob


async def test_payloads_are_checked_against_the_schema_of_their_topic(
    nats_url: str, client: Client, sqlite: str, tmp_path: Path
) -> None:
    schema = tmp_path / "order.json"
    schema.write_text(json.dumps({"type": "object", "required": ["total"]}))
    strict = PayloadSchema(
        topic="orders",
        format=SchemaFormat.JSON_SCHEMA,
        message_name=None,
        file=schema,
        validation=ValidationMode.STRICT,
        allows_unknown_fields=False,
    )
    await publish(
        client,
        envelope("good", payload=b'{"total": 1}'),
        envelope("bad", payload=b"{}"),
        envelope("other", topic="stock", payload=b"{}"),
    )
    what = namespace(nats_url, sqlite, payload_schemas=(strict,), dead_letter_subject=DEAD)
    assert await ingest(what) == IngestCounts(received=3, stored=2, dead_lettered=1)
    assert stored(sqlite) == Counter(["good", "other"])
    ((_, headers),) = await dead_letters(client)
    assert "total" in headers["Postroom-Reason"]


async def test_a_consumer_with_few_deliveries_at_once_is_read_to_the_end(
    nats_url: str, client: Client, sqlite: str
) -> None:
    ids = [str(number) for number in range(100)]
    await publish(client, *envelopes(ids))
    counts = await ingest(namespace(nats_url, sqlite, max_ack_pending=7))
    assert counts == IngestCounts(received=100, stored=100)


async def test_a_consumer_that_gives_up_after_some_deliveries_is_warned_of(
    nats_url: str, client: Client, sqlite: str
) -> None:
    limited = ConsumerConfig(durable_name=DURABLE, max_deliver=3, filter_subject="acme.>")
    await client.jetstream().add_consumer(STREAM, limited)
    with capture_logs() as logs:
        await ingest(namespace(nats_url, sqlite))
    (warned,) = [each for each in logs if each["event"] == "source.deliveries_are_limited"]
    assert warned["max_deliver"] == 3


async def test_a_stopped_ingester_settles_what_it_has_and_leaves_the_rest(
    nats_url: str, client: Client, sqlite: str
) -> None:
    ids = [str(number) for number in range(2_000)]
    await publish(client, *envelopes(ids))
    async with ingesting(namespace(nats_url, sqlite)) as ingester:
        running = asyncio.create_task(ingester.run())
        async with asyncio.timeout(SECONDS):
            while not ingester.counts.stored:
                await asyncio.sleep(0)
        ingester.stop()
        counts = await running
    assert counts.received == counts.stored
    rest = await ingest(namespace(nats_url, sqlite))
    assert counts.stored + rest.stored == 2_000
    assert rest.duplicates == 0
    assert stored(sqlite) == Counter(ids)


async def test_redis_streams_are_ingested_too(redis_url: str, sqlite: str) -> None:
    async with Redis.from_url(redis_url) as redis:
        for body in (envelope("1"), b"junk", envelope("2"), envelope("1")):
            await redis.xadd("acme", {"data": body})
    stream = RedisSource(url=redis_url, stream="acme", consumer_group=DURABLE, field="data")
    what = msgspec.structs.replace(namespace("", sqlite), source=stream)
    assert await ingest(what) == IngestCounts(received=4, stored=2, duplicates=1, skipped=1)
    assert stored(sqlite) == Counter(["1", "2"])
    assert await ingest(what) == IngestCounts()


async def test_the_command_ingests_what_a_namespace_file_says(
    nats_url: str, client: Client, tmp_path: Path
) -> None:
    await publish(client, *envelopes(["1", "2"]), b"junk")
    file = tmp_path / "namespaces.yaml"
    file.write_text(
        f"""
namespaces:
  - name: acme
    pattern: mailbox
    slots:
      message_source:
        backend: nats
        config:
          url: {nats_url}
          subject: acme.>
          consumer_group: archive
      storage:
        backend: sqlite
        config:
          database_path: {tmp_path}/store.db
"""
    )
    answer = await postroom("ingest", "--config", str(file), "--once", "--json")
    assert {name: answer[name] for name in ("received", "stored", "skipped")} == {
        "received": 3,
        "stored": 2,
        "skipped": 1,
    }
    assert stored(str(tmp_path / "store.db")) == Counter(["1", "2"])


async def test_the_command_ingests_what_flags_say(nats_url: str, client: Client, tmp_path: Path) -> None:
    await publish(client, *envelopes(["1"]))
    flags = ["--url", nats_url, "--subject", "acme.>", "--durable", "x", "--store", str(tmp_path / "s.db")]
    answer = await postroom("ingest", *flags, "--mailbox", MAILBOX, "--once", "--json")
    assert answer["stored"] == 1
    assert stored(str(tmp_path / "s.db")) == Counter(["1"])


async def postroom(*arguments: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("postroom"),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    return answer


async def test_what_a_database_can_not_hold_as_text_is_stored_all_the_same(
    nats_url: str, client: Client, store: str
) -> None:
    await publish(client, envelope("1", correlation_id="a\0b", principal="\0"), envelope("2"))
    assert await ingest(namespace(nats_url, store)) == IngestCounts(received=2, stored=2)


ANY = RecordMapping(topic=TopicTemplate("web.{kind}"))


async def test_with_a_topic_plain_json_text_and_bytes_are_archived_once(
    nats_url: str, client: Client, store: str
) -> None:
    bodies = [b'{"kind": "a"}', b"text", b"\xff\x00", b"text"]
    await publish(client, *bodies)
    what = namespace(nats_url, store, mapping=ANY)
    assert await ingest(what) == IngestCounts(received=4, stored=4)
    again = namespace(nats_url, store, mapping=ANY, consumer_group="again")
    assert await ingest(again) == IngestCounts(received=4, duplicates=4)
    with read_mailbox(store, MAILBOX) as reader:
        events = [each.event for each in reader.log.read() if isinstance(each.event, MessageSent)]
    assert [(each.topic, open_envelope(each.envelope).payload) for each in events] == [
        ("web.a", bodies[0]),
        *(("web", body) for body in bodies[1:]),
    ]


async def test_a_message_of_the_largest_size_of_the_broker_is_archived(
    nats_url: str, client: Client, store: str
) -> None:
    headers = {"tenant": "x" * 1_000}
    body = b"x" * (client.max_payload - 1_100)
    assert client.max_payload == 1 << 20
    await client.jetstream().publish(SUBJECT, bytes(client.max_payload))
    await client.jetstream().publish(SUBJECT, body, headers=headers)
    assert await ingest(namespace(nats_url, store, mapping=ANY)) == IngestCounts(received=2, stored=2)


async def test_an_ingester_whose_consumer_is_deleted_goes_on(
    nats_url: str, client: Client, store: str
) -> None:
    await publish(client, *envelopes(["1", "2"]))
    async with ingesting(namespace(nats_url, store)) as ingester:
        running = asyncio.create_task(ingester.run())
        await until(lambda: ingester.counts.stored == 2)
        await client.jetstream().delete_consumer(STREAM, DURABLE)
        await publish(client, *envelopes(["3"]))
        await until(lambda: ingester.counts.stored == 3)
        ingester.stop()
        await running
    assert stored(store) == Counter(["1", "2", "3"])
