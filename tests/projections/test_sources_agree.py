"""What the Spark data sources say of a message is what the live engine says, in every kind of store."""

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from postroom import NewMessage, TopicPolicy, open_mailbox
from postroom.adapters.compose.spark import SOURCES
from postroom.adapters.parquet.log_archive import ParquetLogArchive
from postroom.application.messages import rfc3339
from postroom.application.query_results import MessageDetail
from tests.projections.stored_logs import move, open_event_log, rows

MAILBOX = "acme@one"
HEADERS: tuple[str, ...] = (
    "content_type",
    "schema_url",
    "schema_version",
    "encryption",
    "correlation_id",
    "principal",
)
HEADERS += ("namespace", "trace_id", "span_id")
EVENTS, MESSAGES, PAYLOADS = SOURCES


async def send_and_settle(store: str) -> dict[str, MessageDetail]:
    """Send messages that end in every way, and return what the mailbox says of them."""
    async with open_mailbox(store, MAILBOX, durability="relaxed") as mailbox:
        policy = TopicPolicy(max_attempts=2, backoff_base_ms=1, backoff_max_ms=1)
        await mailbox.set_topic_policy("shop", policy)
        shop = [
            NewMessage(topic="shop", payload=b"%d" % n, attrs={"n": f"{n}"}, principal=f"p{n}")
            for n in range(6)
        ]
        others = [
            NewMessage(topic="mail", payload=b"{}", message_id="ext-1", content_type="application/json"),
            NewMessage(topic="mail", payload=b"later", deliver_after_ms=3_600_000, correlation_id="c"),
            NewMessage(topic="left", payload=b"", priority=9, idem_key="once", published_at_us=1_500),
        ]
        ids = [(await mailbox.send_message(each)).message_id for each in (*shop, *others)]
        received = await mailbox.receive_messages(
            "shop", max_messages=5, consumer="worker", visibility_ms=60_000
        )
        await mailbox.ack_messages([received[0].receipt])
        await mailbox.nack_messages([each.receipt for each in received[1:4]], reason="first", delay_ms=0)
        again = await mailbox.receive_messages("shop", max_messages=2, consumer="b", visibility_ms=60_000)
        await mailbox.nack_messages([each.receipt for each in again], reason="again", delay_ms=0)
        await mailbox.redrive_dead_letters("shop", limit=1)
        (external,) = await mailbox.receive_messages("mail")
        await mailbox.extend_visibility([external.receipt], 60_000)
        await mailbox.ack_messages([external.receipt])
        return {each: await mailbox.get_message(each) for each in ids}


def read(source: type[Any], **options: str) -> list[dict[str, Any]]:
    """Return all rows and columns of a data source, as Spark's tasks read them."""
    opened = source(options | {"columns": "*", "driver": "python"})
    reader = opened.reader(opened.schema())
    return [row for part in reader.partitions() for row in rows(reader.read(part))]


def text(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat(timespec="microseconds").replace("+00:00", "Z")


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "jetstream", "archive"])
async def test_events_messages_and_payloads_are_those_of_the_live_engine(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    is_file = kind in ("sqlite", "archive")
    store = str(tmp_path / "live.db") if is_file else request.getfixturevalue(f"{kind}_store")
    details = await send_and_settle(store)
    options = {"path": store}
    if kind == "archive":
        log = open_event_log(store, MAILBOX)
        move(log, ParquetLogArchive(tmp_path / "archive"), list(log.read()), 12)
        log.close()
        options["archive"] = str(tmp_path / "archive")

    by_message: dict[str, list[dict[str, Any]]] = {}
    for row in read(EVENTS, **options):
        by_message.setdefault(row["message_id"], []).append(row)
    own_events = by_message.pop(None)  # type: ignore[call-overload]  # events of the mailbox
    assert {row["topic"] for row in own_events} <= {None, "shop"}
    assert by_message.keys() == details.keys()
    for id_, events in by_message.items():
        detail = details[id_]
        assert {(row["topic"], row["shard"]) for row in events} == {(detail.topic, detail.shard)}
        for row, entry in zip(events, detail.history, strict=True):
            assert (row["position"], row["event"], row["epoch"]) == (entry.position, entry.event, entry.epoch)
            assert text(row["at"]) == entry.at
            for name, fact in entry.facts.items():
                value = row[name]
                assert (text(value) if isinstance(value, datetime) else value) == fact, (name, row)

    messages = {row["message_id"]: row for row in read(MESSAGES, **options)}
    assert messages.keys() == details.keys()
    assert {row["status"] for row in messages.values()} == {"acked", "dead", "ready", "in_flight", "delayed"}
    for id_, row in messages.items():
        detail, item = details[id_], details[id_].item
        assert row["mailbox"] == MAILBOX
        assert (row["topic"], row["shard"], row["status"]) == (detail.topic, detail.shard, detail.status)
        assert (row["attempts"], row["redriven"]) == (detail.attempt, detail.redriven)
        assert (text(row["sent_at"]), text(row["changed_at"])) == (
            detail.history[0].at,
            detail.history[-1].at,
        )
        assert text(row["timestamp"]) == rfc3339(item.timestamp * 1_000)
        assert dict(row["custom_headers"] or ()) == item.custom_headers
        assert {name: row[name] for name in HEADERS} == {name: getattr(item, name) for name in HEADERS}
        assert row["envelope"] == item.envelope_blob

    payloads = {row["message_id"]: row for row in read(PAYLOADS, **options)}
    assert payloads.keys() == messages.keys()
    for id_, row in payloads.items():
        assert row["data"] == details[id_].item.reconstruct_envelope().payload.value
        assert (row["payload"], row["reason"]) == (row["data"].decode(), None)
        assert {name: row[name] for name in ("position", "sent_at", *HEADERS)} == {
            name: messages[id_][name] for name in ("position", "sent_at", *HEADERS)
        }


async def test_messages_are_those_as_of_a_position_or_a_time(tmp_path: Path) -> None:
    store = str(tmp_path / "live.db")
    await send_and_settle(store)
    async with open_mailbox(store, MAILBOX) as mailbox:
        events = read(EVENTS, path=store)
        for row in events[::5]:
            position = row["position"]
            backlog = await mailbox.get_backlog(at=position)
            as_of = read(MESSAGES, path=store, as_of=str(position))
            statuses = [each["status"] for each in as_of]
            for name in ("ready", "in_flight", "delayed", "dead"):
                assert statuses.count(name) == sum(getattr(each, name) for each in backlog.shards), (
                    name,
                    position,
                )
            sent = [each for each in events if each["event"] == "MessageSent" and each["at"] <= row["at"]]
            at = read(MESSAGES, path=store, as_of=row["at"].isoformat())
            assert sorted(each["message_id"] for each in at) == sorted(each["message_id"] for each in sent)
