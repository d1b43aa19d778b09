"""Odd records: what senders may write breaks no fold, and what can't be read is parked beside the rest."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from postroom.application.messages import NewMessage
from postroom.domain.message import Headers, MessageSent
from postroom.domain.names import mailbox_stream
from postroom.domain.record import Record, StoredEvent
from postroom.projections.fold import columns_read
from postroom.projections.projection import load_projections
from tests.projections.folding import fold_frames, folded, frame_schema, lived, log_of
from tests.projections.histories import (
    POISON,
    STORY,
    Receive,
    Send,
    Settle,
    Step,
    Store,
    live,
    log_reader,
    read_range,
    reference,
    take_extents,
)
from tests.projections.reference import fold
from tests.support.examples import examples
from tests.support.steps import Operate

MAILBOX = "main@test"
INT64 = 2**63 - 1
ODD_TEXTS = [
    "",
    "\x00",
    "a\x00b",
    "\x1a",
    "\\N",
    "NULL",
    "\r\n\t",
    "'; DROP TABLE log; --",
    "%_\\",
    "\ufeff ",
    "😀\u202e",
]
ODD_TOPICS = ["a.(.+)|%_$^{}", "';--", '"', "\\", "😀", "NULL"]

odd_text = st.sampled_from([None, *ODD_TEXTS, "x" * 100_000]) | st.text(max_size=20)
odd_int = st.sampled_from([0, -1, INT64, -INT64 - 1]) | st.integers(-INT64 - 1, INT64)
TEXTS = (
    "content_type",
    "schema_url",
    "schema_version",
    "encryption",
    "correlation_id",
    "principal",
    "trace_id",
)


@settings(max_examples=examples(40))
@given(st.data())
def test_headers_of_any_text_and_times_at_the_edges_fold_as_they_are(data: st.DataObject) -> None:
    odd = [_odd(record, data) for record in STORY_RECORDS]
    logs = log_of("box0@test", odd)
    assert folded(logs, [7], 2) == fold(logs)


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_odd_messages_are_read_from_a_store_and_folded_as_they_were_sent(
    database: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    store: Store = (
        tmp_path / "store.db" if database == "sqlite" else request.getfixturevalue("postgres_store")
    )
    sent: list[Step] = [Send(NewMessage(topic=topic, payload=b"\x00\xff")) for topic in ODD_TOPICS]
    for text in ODD_TEXTS:
        sent.append(Send(NewMessage(topic="t", payload=b"", attrs={"header": text, "name " + text: ""})))
        sent.append(Send(NewMessage(topic="t", payload=b"", principal=text)))
        sent.append(Send(NewMessage(topic="t", payload=b"", message_id=text)))
    sent.append(
        Send(NewMessage(topic="t", payload=b"", attrs={f"header{n}": "x" * 1_000 for n in range(50)}))
    )
    die: list[Step] = [Receive(ODD_TOPICS[0]), Settle("nack", 0), Receive(ODD_TOPICS[0]), Settle("nack", 1)]
    live(store, MAILBOX, [*sent, *die])
    expected = reference(store)
    assert len(expected.rows["mailbox"]) > len(ODD_TOPICS) + len(ODD_TEXTS)
    assert [row["topic"] for row in expected.rows["dead_letters"]] == [ODD_TOPICS[0]]
    models = fold_frames([read_frame(store)], take_extents(store))
    for row in models.rows["mailbox"]:
        del row["envelope_blob"]
    assert models == expected


def test_an_id_that_is_the_stream_of_another_mailbox_names_a_message_like_any_other() -> None:
    id_ = str(UUID(bytes=mailbox_stream("box0@test")))
    logs = lived([POISON, [Send(NewMessage(topic="shop", payload=b"", message_id=id_))]])
    for size in (1, 2, 1_000):
        models = folded(logs, [size], 2)
        assert models == fold(logs)
        assert id_ in [row["message_id"] for row in models.rows["mailbox"]]
        assert {row["topic"] for row in models.rows["activity"] if row["event"] == "OwnershipTaken"} == {""}


def test_an_envelope_that_was_shredded_breaks_nothing() -> None:
    logs = log_of("box0@test", [_changed(each, envelope=b"") for each in STORY_RECORDS])
    models = folded(logs, [7], 2)
    assert models == fold(logs)
    assert models.parked == []
    assert {row["envelope_blob"] for row in models.rows["mailbox"]} == {b""}


def test_what_cannot_be_folded_is_left_out_and_told() -> None:
    records = list(STORY_RECORDS)
    received = next(each for each in records if each.type == "MessageReceived")
    was = received.event
    event = StoredEvent(was.stream, was.version, was.at, "MessageFolded", b"")
    records[received.position - 1] = received._replace(event=event)
    logs = log_of("box0@test", records)
    ((extent, _),) = logs.items()
    models = folded(logs, [5])
    assert models == fold(logs)
    assert models.parked == [
        (extent.place(received.position), "MessageFolded", "An event of unknown type MessageFolded.")
    ]
    assert "MessageFolded" not in {row["event"] for row in models.rows["activity"]}
    assert "order-1" in [row["message_id"] for row in models.rows["dead_letters"]]


def test_nothing_folds_to_nothing() -> None:
    nothing = pl.DataFrame(schema=frame_schema())
    models = fold_frames([nothing, nothing], [])
    assert models == fold({})
    assert not any(models.rows.values())


def test_very_many_dead_letters_in_one_range_fold_to_what_few_do() -> None:
    ((extent, records),) = lived([[*POISON, Operate("redrive", "shop"), *POISON[1:]]]).items()
    head, life = records[:2], records[2:]
    many = [*head]
    for number in range(5_000):
        stream = number.to_bytes(16)
        many += [
            each._replace(
                position=len(many) + index,
                event=replace(_changed(each, message_id=f"order-{number}").event, stream=stream),
            )
            for index, each in enumerate(life, 1)
        ]
    logs = log_of(extent.name, many)
    models = folded(logs, [20_000], 4)
    assert models == fold(logs)


STORY_RECORDS: Sequence[Record] = next(iter(lived([STORY]).values()))


def read_frame(store: Store) -> pl.DataFrame:
    """Return all records of a store as Spark's tasks read them."""
    log, wanted = log_reader(store), columns_read(load_projections())
    return pl.concat(
        pl.DataFrame(batch)
        for extent in take_extents(store)
        for batch in read_range(log, extent, extent.first, extent.last, wanted)
    )


def _odd(record: Record, data: st.DataObject) -> Record:
    if record.type != "MessageSent":
        return record
    texts: dict[str, Any] = {name: data.draw(odd_text) for name in TEXTS}
    return _changed(
        record,
        **texts,
        timestamp=data.draw(odd_int),
        topic=data.draw(odd_text) or "",
        envelope=data.draw(st.binary(max_size=3)),
    )


def _changed(record: Record, **changes: Any) -> Record:
    """Return a record with other fields or headers of its message, if it is a `MessageSent`."""
    sent = record.event
    if not isinstance(sent, MessageSent):
        return record
    headers = {name: changes.pop(name) for name in Headers.__struct_fields__ if name in changes}
    return record._replace(event=replace(sent, headers=replace(sent.headers, **headers), **changes))
