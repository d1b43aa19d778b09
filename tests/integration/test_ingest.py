"""Ingestion from a real JetStream stream into both stores: what is stored, refused and set aside."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nats.aio.client import Client
from nats.js.api import ConsumerConfig
from redis.asyncio import Redis
from structlog.testing import capture_logs

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.ingest import open_ingester
from postroom.adapters.nats.connection import NatsSettings
from postroom.adapters.nats.source import JetStreamSource, PullConsumer
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.adapters.system.clock import SystemClock
from postroom.application.engine import MailboxEngine
from postroom.application.ingest.batch import IngestSettings
from postroom.application.ingest.counts import Ingested
from postroom.application.ingest.dead_letters import DeadLetterSubject
from postroom.application.ingest.ingester import Ingester
from postroom.application.ingest.namespace import Namespace, PayloadSchema, RedisSource, SchemaFormat
from postroom.application.messages import Sent
from postroom.application.ports.publisher import Published
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.envelope.validation import ValidationMode
from postroom.domain.errors import Fenced, NotFound, Rejected, Saturated, Unavailable
from tests.integration.ingest_world import (
    DEAD,
    DURABLE,
    MAILBOX,
    STREAM,
    SUBJECT,
    envelopes,
    namespace,
    publish,
    stored,
    stream_of,
)
from tests.integration.stores import envelope

IDLE_MS = 300


@pytest.fixture
async def client(nats_url: str) -> AsyncIterator[Client]:
    async with stream_of(nats_url) as client:
        yield client


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "store.db")
    url: str = request.getfixturevalue("postgres_store")
    return url


@pytest.fixture
def sqlite(tmp_path: Path) -> str:
    return str(tmp_path / "store.db")


@asynccontextmanager
async def ingesting(what: Namespace) -> AsyncIterator[Ingester]:
    async with (
        open_mailbox(what.store, what.mailbox, mode="archive", durability="relaxed") as postroom,
        open_ingester(what, postroom) as ingester,
    ):
        yield ingester


async def ingest(what: Namespace) -> Ingested:
    async with ingesting(what) as ingester:
        return await ingester.run(idle_ms=IDLE_MS)


async def unacked(client: Client) -> int:
    info = await client.jetstream().consumer_info(STREAM, DURABLE)
    return (info.num_ack_pending or 0) + (info.num_pending or 0)


async def dead_letters(client: Client) -> list[tuple[bytes, dict[str, str]]]:
    stream = client.jetstream()
    last = (await stream.stream_info("DEAD")).state.last_seq
    found = [await stream.get_msg("DEAD", seq=number + 1) for number in range(last)]
    return [(each.data or b"", each.headers or {}) for each in found]


async def test_every_message_is_stored_once_and_acked(nats_url: str, client: Client, store: str) -> None:
    ids = [f"order-{number}" for number in range(500)]
    await publish(client, *envelopes(ids))
    assert await ingest(namespace(nats_url, store)) == Ingested(received=500, stored=500)
    assert stored(store) == Counter(ids)
    assert await unacked(client) == 0
    assert await ingest(namespace(nats_url, store)) == Ingested()


async def test_what_the_stream_has_twice_is_stored_once(nats_url: str, client: Client, store: str) -> None:
    await publish(client, *envelopes(["1", "2", "1"]))
    await publish(client, *envelopes(["2", "3"]))
    assert await ingest(namespace(nats_url, store)) == Ingested(received=5, stored=3, duplicates=2)
    assert stored(store) == Counter(["1", "2", "3"])


async def test_another_consumer_of_the_same_messages_adds_nothing(
    nats_url: str, client: Client, store: str
) -> None:
    await publish(client, *envelopes(["1", "2"]))
    await ingest(namespace(nats_url, store))
    counts = await ingest(namespace(nats_url, store, consumer_group="again"))
    assert counts == Ingested(received=2, duplicates=2)


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
        assert await ingest(namespace(nats_url, store)) == Ingested(received=4, stored=2, skipped=2)
    skipped = [each for each in logs if each["event"] == "ingest.skipped"]
    assert [(each["subject"], each["sequence"], each["log_level"]) for each in skipped] == [
        (SUBJECT, "2", "warning"),
        (SUBJECT, "3", "warning"),
    ]
    assert "not a PrismEnvelope" in skipped[0]["reason"]
    assert stored(store) == Counter(["1", "2"])
    assert await unacked(client) == 0


async def test_with_a_dead_letter_subject_they_go_there_as_they_came(
    nats_url: str, client: Client, sqlite: str
) -> None:
    orders = {"Nats-Rollup": "all", "trace": "abc", "Nats-Msg-Id": "7"}
    await client.jetstream().add_stream(name="ROLL", subjects=["roll.>"], allow_rollup_hdrs=True)
    await client.jetstream().publish("roll.up", b"\x00junk\xff", headers=orders)
    what = namespace(nats_url, sqlite, dead_letter_subject=DEAD, subject="roll.>", stream="ROLL")
    assert await ingest(what) == Ingested(received=1, dead_lettered=1)
    ((data, headers),) = await dead_letters(client)
    assert data == b"\x00junk\xff"
    assert headers["trace"] == "abc"
    assert "Nats-Rollup" not in headers
    assert headers["Nats-Msg-Id"].startswith(f"dlq:{DURABLE}:1:")
    assert headers["Postroom-Original-Subject"] == "roll.up"
    assert headers["Postroom-Original-Sequence"] == "1"
    assert headers["Postroom-Consumer"] == DURABLE
    assert "not a PrismEnvelope" in headers["Postroom-Reason"]


async def test_a_dead_letter_published_twice_is_there_once(
    nats_url: str, client: Client, sqlite: str
) -> None:
    await publish(client, b"junk")
    await ingest(namespace(nats_url, sqlite, dead_letter_subject=DEAD))
    await client.jetstream().delete_consumer(STREAM, DURABLE)
    counts = await ingest(namespace(nats_url, sqlite, dead_letter_subject=DEAD))
    assert counts == Ingested(received=1, dead_lettered=1)
    assert len(await dead_letters(client)) == 1


async def test_without_a_stream_for_dead_letters_they_stay_where_they_are(
    nats_url: str, client: Client, sqlite: str
) -> None:
    await publish(client, b"junk", envelope("1"))
    with capture_logs() as logs:
        counts = await ingest(namespace(nats_url, sqlite, dead_letter_subject="nobody.listens"))
    assert counts == Ingested(received=2, stored=1, set_aside=1)
    (refused,) = [each for each in logs if each["event"] == "ingest.dead_letter_refused"]
    assert "No stream listens at nobody.listens" in refused["error"]
    assert await unacked(client) == 1


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (ValidationMode.STRICT, Ingested(received=1, skipped=1)),
        (ValidationMode.WARN, Ingested(received=1, stored=1)),
        (ValidationMode.DISABLED, Ingested(received=1, stored=1)),
    ],
)
async def test_an_envelope_without_id_is_refused_stored_with_a_warning_or_just_stored(
    nats_url: str, client: Client, sqlite: str, mode: ValidationMode, expected: Ingested
) -> None:
    await publish(client, envelope(""))
    with capture_logs() as logs:
        assert await ingest(namespace(nats_url, sqlite, envelope_validation=mode)) == expected
    warned = [each["problem"] for each in logs if each["event"] == "ingest.problem"]
    assert len(warned) == (1 if mode == ValidationMode.WARN else 0)


async def test_a_newer_envelope_is_stored_byte_for_byte_with_a_warning(
    nats_url: str, client: Client, sqlite: str
) -> None:
    newer = PrismEnvelope.FromString(envelope("1"))
    newer.envelope_version = 2
    blob = newer.SerializeToString() + b"\xfa\x3f\x03new"  # a field that we don't know
    await publish(client, blob)
    with capture_logs() as logs:
        assert await ingest(namespace(nats_url, sqlite)) == Ingested(received=1, stored=1)
    (warned,) = [each for each in logs if each["event"] == "ingest.problem"]
    assert "version 2" in warned["problem"]
    async with open_mailbox(sqlite, MAILBOX) as postroom:
        assert postroom.get_message("1").item.envelope_blob == blob


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
    assert await ingest(what) == Ingested(received=3, stored=2, dead_lettered=1)
    assert stored(sqlite) == Counter(["good", "other"])
    ((_, headers),) = await dead_letters(client)
    assert "total" in headers["Postroom-Reason"]


async def test_a_consumer_with_few_deliveries_at_once_is_read_to_the_end(
    nats_url: str, client: Client, sqlite: str
) -> None:
    ids = [str(number) for number in range(100)]
    await publish(client, *envelopes(ids))
    counts = await ingest(namespace(nats_url, sqlite, max_ack_pending=7))
    assert counts == Ingested(received=100, stored=100)


async def test_a_consumer_that_gives_up_after_some_deliveries_is_warned_of(
    nats_url: str, client: Client, sqlite: str
) -> None:
    limited = ConsumerConfig(durable_name=DURABLE, max_deliver=3, filter_subject="acme.>")
    await client.jetstream().add_consumer(STREAM, limited)
    with capture_logs() as logs:
        await ingest(namespace(nats_url, sqlite))
    (warned,) = [each for each in logs if each["event"] == "ingest.deliveries_are_limited"]
    assert warned["max_deliver"] == 3


async def test_a_stopped_ingester_settles_what_it_has_and_leaves_the_rest(
    nats_url: str, client: Client, sqlite: str
) -> None:
    ids = [str(number) for number in range(2_000)]
    await publish(client, *envelopes(ids))
    async with ingesting(namespace(nats_url, sqlite)) as ingester:
        running = asyncio.create_task(ingester.run())
        while not ingester.counts.stored:
            await asyncio.sleep(0)
        ingester.stop()
        counts = await running
    assert counts.received == counts.stored
    rest = await ingest(namespace(nats_url, sqlite))
    assert counts.stored + rest.stored == 2_000
    assert rest.duplicates == 0
    assert stored(sqlite) == Counter(ids)


async def test_a_mailbox_taken_over_by_somebody_else_ends_the_ingester(
    nats_url: str, client: Client, sqlite: str
) -> None:
    async with ingesting(namespace(nats_url, sqlite)) as ingester:
        running = asyncio.create_task(ingester.run())
        await publish(client, envelope("1"))
        while not ingester.counts.stored:
            await asyncio.sleep(0.01)
        await take_over(sqlite)
        await publish(client, envelope("2"))
        with pytest.raises(Fenced, match="taken over"):
            await running
    assert await ingest(namespace(nats_url, sqlite)) == Ingested(received=1, stored=1)


async def take_over(store: str) -> None:
    """Open the mailbox as a process does that got its lock while we still believe to have it."""
    log = SqliteEventLog(store, MAILBOX)
    engine = MailboxEngine(log, SystemClock())
    await engine.open("somebody else", "archive")
    await engine.close()
    log.close()


async def test_a_stream_that_is_deleted_ends_the_ingester(nats_url: str, client: Client, sqlite: str) -> None:
    async with ingesting(namespace(nats_url, sqlite)) as ingester:
        running = asyncio.create_task(ingester.run())
        await asyncio.sleep(0.1)
        await client.jetstream().delete_stream(STREAM)
        with pytest.raises(NotFound, match="no stream EVENTS"):
            await running


# -- a store that makes trouble ---


class TroubledStore:
    """Stand before a mailbox, and fail as a store would."""

    def __init__(self, send_envelopes: Any) -> None:
        self._send = send_envelopes
        self.fail: Callable[[Sequence[bytes]], Exception | None] = lambda envelopes: None
        self.refuse: Callable[[bytes], Rejected | None] = lambda envelope: None
        self.calls = 0

    async def __call__(self, envelopes: Sequence[bytes], **options: Any) -> list[Sent | Rejected]:
        self.calls += 1
        error = self.fail(envelopes)
        if error is not None:
            raise error
        refused = {blob: rejection for blob in envelopes if (rejection := self.refuse(blob)) is not None}
        answers = iter(await self._send([blob for blob in envelopes if blob not in refused], **options))
        return [refused.get(blob) or next(answers) for blob in envelopes]


@pytest.fixture
async def troubled(
    nats_url: str, client: Client, sqlite: str, request: pytest.FixtureRequest
) -> AsyncIterator["Troubled"]:
    consumer = PullConsumer(durable=DURABLE, stream=STREAM, create=True)
    source = await JetStreamSource.open(NatsSettings(url=nats_url), consumer, prefetch=100)
    dead = DeadLetterSubject(StreamPublisher(client), DEAD, DURABLE) if request.param == "dlq" else None
    async with open_mailbox(sqlite, MAILBOX, mode="archive") as postroom:
        trouble = TroubledStore(postroom.send_envelopes)
        settings = IngestSettings(10, max_retries=1)
        yield trouble, lambda: Ingester(source, trouble, settings, dead_letters=dead)  # type: ignore[arg-type]
    await source.close()


class StreamPublisher:
    def __init__(self, client: Client) -> None:
        self._stream = client.jetstream()

    async def publish(self, subject: str, payload: bytes, headers: Any) -> Published:
        stored = await self._stream.publish(subject, payload, headers=dict(headers))
        return Published(stored.stream, stored.seq, bool(stored.duplicate))

    async def close(self) -> None:
        pass


Troubled = tuple[TroubledStore, Callable[[], Ingester]]
"""A store, and what makes an ingester of the same source into it."""


@pytest.mark.parametrize("troubled", ["dlq"], indirect=True)
async def test_a_store_that_is_down_is_waited_for_and_makes_no_dead_letters(
    client: Client, troubled: Troubled, sqlite: str
) -> None:
    store, make = troubled
    ingester = make()
    ids = [str(number) for number in range(60)]
    await publish(client, *envelopes(ids))
    store.fail = lambda _: Unavailable("down") if store.calls < 20 else None
    counts = await ingester.run(idle_ms=IDLE_MS)
    assert (counts.stored, counts.dead_lettered, counts.set_aside) == (60, 0, 0)
    assert counts.retries > 0
    assert stored(sqlite) == Counter(ids)
    assert await unacked(client) == 0


def is_poison(blob: bytes) -> bool:
    return PrismEnvelope.FromString(blob).metadata.message_id == "poison"


@pytest.mark.parametrize("troubled", ["dlq"], indirect=True)
async def test_a_message_that_fails_alone_while_others_are_stored_is_dead_lettered(
    client: Client, troubled: Troubled, sqlite: str
) -> None:
    store, make = troubled
    ingester = make()
    ids = [str(number) for number in range(30)]
    await publish(client, envelope("poison"), *envelopes(ids))
    store.fail = lambda blobs: Unavailable("does not compute") if any(map(is_poison, blobs)) else None
    running = asyncio.create_task(ingester.run(idle_ms=IDLE_MS))
    while not ingester.counts.dead_lettered:  # it takes others to show that the store works
        await publish(client, envelope(f"later-{store.calls}"))
        await asyncio.sleep(0.05)
    counts = await running
    assert counts.dead_lettered == 1
    assert stored(sqlite).keys() >= set(ids)
    assert set(stored(sqlite).values()) == {1}
    ((data, headers),) = await dead_letters(client)
    assert is_poison(data)
    assert headers["Postroom-Reason"] == "does not compute"
    assert await unacked(client) == 0


@pytest.mark.parametrize("troubled", ["none"], indirect=True)
async def test_without_a_dead_letter_subject_it_is_left_to_the_source(
    client: Client, troubled: Troubled, sqlite: str
) -> None:
    store, make = troubled
    ingester = make()
    await publish(client, envelope("poison"), *envelopes(["1", "2"]))
    store.fail = lambda blobs: Unavailable("does not compute") if any(map(is_poison, blobs)) else None
    running = asyncio.create_task(ingester.run(idle_ms=IDLE_MS))
    while not ingester.counts.set_aside:
        await publish(client, envelope(f"later-{store.calls}"))
        await asyncio.sleep(0.05)
    await running
    assert await unacked(client) == 1
    store.fail = lambda _: None
    await client.jetstream().delete_consumer(STREAM, DURABLE)  # or wait a minute
    assert "poison" not in stored(sqlite)


@pytest.mark.parametrize("troubled", ["none"], indirect=True)
async def test_a_full_mailbox_is_waited_for(client: Client, troubled: Troubled, sqlite: str) -> None:
    store, make = troubled
    ingester = make()
    await publish(client, *envelopes(["1", "2", "3"]))
    store.fail = lambda _: Saturated("many commands", 5) if store.calls < 3 else None
    store.refuse = lambda blob: Saturated("full", 5) if store.calls < 6 and b"2" in blob else None
    counts = await ingester.run(idle_ms=IDLE_MS)
    assert counts == Ingested(received=3, stored=3)
    assert stored(sqlite) == Counter(["1", "2", "3"])


@pytest.mark.parametrize("troubled", ["none"], indirect=True)
async def test_stopping_while_the_store_is_down_hands_the_messages_back(
    client: Client, troubled: Troubled
) -> None:
    store, make = troubled
    ingester = make()
    await publish(client, *envelopes(["1", "2"]))
    store.fail = lambda _: Unavailable("down")
    running = asyncio.create_task(ingester.run())
    while not ingester.counts.retries:
        await asyncio.sleep(0.01)
    ingester.stop()
    counts = await running
    assert counts.stored == 0
    store.fail = lambda _: None
    again = await make().run(idle_ms=IDLE_MS)
    assert again.stored == 2


async def test_redis_streams_are_ingested_too(redis_url: str, sqlite: str) -> None:
    async with Redis.from_url(redis_url) as redis:
        for body in (envelope("1"), b"junk", envelope("2"), envelope("1")):
            await redis.xadd("acme", {"data": body})
    stream = RedisSource(url=redis_url, stream="acme", consumer_group=DURABLE, field="data")
    what = msgspec.structs.replace(namespace("", sqlite), source=stream)
    assert await ingest(what) == Ingested(received=4, stored=2, duplicates=1, skipped=1)
    assert stored(sqlite) == Counter(["1", "2"])
    assert await ingest(what) == Ingested()


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
    assert await ingest(namespace(nats_url, store)) == Ingested(received=2, stored=2)
