"""What ingestion can not store goes to the dead-letter subject, or is skipped."""

from nats.aio.client import Client

from postroom.application.ingest.namespace import IngestCounts
from tests.integration.ingest_world import (
    DEAD,
    DURABLE,
    STREAM,
    dead_letters,
    ingest,
    namespace,
    publish,
    unacked,
)
from tests.support.logs import capture_logs
from tests.support.stores import envelope


async def test_with_a_dead_letter_subject_they_go_there_as_they_came(
    nats_url: str, client: Client, sqlite: str
) -> None:
    orders = {"Nats-Rollup": "all", "trace": "abc", "Nats-Msg-Id": "7"}
    await client.jetstream().add_stream(name="ROLL", subjects=["roll.>"], allow_rollup_hdrs=True)
    await client.jetstream().publish("roll.up", b"\x00junk\xff", headers=orders)
    what = namespace(nats_url, sqlite, dead_letter_subject=DEAD, subject="roll.>", stream="ROLL")
    assert await ingest(what) == IngestCounts(received=1, dead_lettered=1)
    ((data, headers),) = await dead_letters(client)
    assert data == b"\x00junk\xff"
    assert headers["trace"] == "abc"
    assert "Nats-Rollup" not in headers
    assert headers["Nats-Msg-Id"].startswith(f"dlq:{DURABLE}:1:")
    assert headers["Postroom-Original-Msg-Id"] == "7"
    assert headers["Postroom-Original-Subject"] == "roll.up"
    assert headers["Postroom-Original-Sequence"] == "1"
    assert headers["Postroom-Consumer"] == DURABLE
    assert "not a PrismEnvelope" in headers["Postroom-Reason"]


async def test_an_envelope_of_a_stored_id_with_another_payload_is_a_dead_letter_that_names_it(
    nats_url: str, client: Client, sqlite: str
) -> None:
    await publish(client, envelope("order-1"), envelope("order-1", payload=b"other"), envelope("order-1"))
    counts = await ingest(namespace(nats_url, sqlite, dead_letter_subject=DEAD))
    assert counts == IngestCounts(received=3, stored=1, duplicates=1, dead_lettered=1)
    ((data, headers),) = await dead_letters(client)
    assert data == envelope("order-1", payload=b"other")
    assert "order-1 exists with another payload" in headers["Postroom-Reason"]


async def test_a_dead_letter_published_twice_is_there_once(
    nats_url: str, client: Client, sqlite: str
) -> None:
    await publish(client, b"junk")
    await ingest(namespace(nats_url, sqlite, dead_letter_subject=DEAD))
    await client.jetstream().delete_consumer(STREAM, DURABLE)
    counts = await ingest(namespace(nats_url, sqlite, dead_letter_subject=DEAD))
    assert counts == IngestCounts(received=1, dead_lettered=1)
    assert len(await dead_letters(client)) == 1


async def test_without_a_stream_for_dead_letters_they_stay_where_they_are(
    nats_url: str, client: Client, sqlite: str
) -> None:
    await publish(client, b"junk", envelope("1"))
    with capture_logs() as logs:
        counts = await ingest(namespace(nats_url, sqlite, dead_letter_subject="nobody.listens"))
    assert counts == IngestCounts(received=2, stored=1, deferred=1)
    (refused,) = [each for each in logs if each["event"] == "ingest.dead_letter_refused"]
    assert "No stream has the subject nobody.listens" in refused["error"]
    assert await unacked(client) == 1
