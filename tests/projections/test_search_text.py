"""What messages are searched by, computed for many at once, is what the domain says of each."""

from typing import Any

import msgspec
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.domain.envelope.headers import MailboxItem, extract_mailbox_item
from postroom.domain.search import BodyRules, searchable_text, searchable_words
from postroom.domain.tokenizer import MAX_CHARS, MAX_WORD_CHARS
from postroom.projections.models.messages import PROJECTION
from postroom.projections.search_text import search_tables
from tests.support.envelopes import build_envelope

BODIES = BodyRules(topics=("open.*",))

texts = st.one_of(
    st.sampled_from(
        ["alice", "Bob 7", "STRASSE ß", "0f3a-77", "İstanbul", "", "x" * 300, "हिन्दी", "a_b", "ﬁn"]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)
items = st.builds(
    MailboxItem,
    message_id=texts,
    timestamp=st.integers(0, 9),
    topic=st.sampled_from(["open.a", "open.b", "closed", "Ünïcode.ÄRGER"]),
    content_type=st.none() | texts,
    schema_url=st.none() | texts,
    correlation_id=st.none() | texts,
    principal=st.none() | texts,
    span_id=st.none() | texts,
    custom_headers=st.dictionaries(texts, texts, max_size=3),
    envelope_blob=st.binary(max_size=5)
    | st.builds(
        lambda payload, type_, encryption: envelope(payload, content_type=type_, encryption=encryption),
        st.binary(max_size=10) | texts.map(str.encode),
        st.sampled_from([None, "text/plain", "application/json", "image/png"]),
        st.sampled_from([None, None, "aes"]),
    ),
)


def envelope(payload: bytes, **headers: Any) -> bytes:
    return build_envelope(
        message_id="m", topic="open.a", namespace="", published_at_us=0, payload=payload, attrs={}, **headers
    )


def rows_of(found: list[MailboxItem]) -> pl.DataFrame:
    """Return messages as rows of the `mailbox` table, with numbers for ids."""
    columns: dict[str, list[Any]] = {
        name: [getattr(item, name, None) for item in found] for name in PROJECTION.schema
    }
    columns["id"] = list(range(len(found)))
    columns["custom_headers"] = [
        msgspec.json.encode(item.custom_headers).decode() if item.custom_headers else None for item in found
    ]
    types = dict.fromkeys(("id", "timestamp"), pl.Int64()) | {"envelope_blob": pl.Binary()}
    return pl.DataFrame(columns, schema={name: types.get(name, pl.String()) for name in columns})


@given(st.lists(items, max_size=5))
def test_text_words_and_headers_are_those_of_the_domain(found: list[MailboxItem]) -> None:
    tables = search_tables(rows_of(found), BODIES)
    rows = tables["text"].to_pylist()
    assert [row["id"] for row in rows] == list(range(len(found)))
    assert [row["text"] for row in rows] == [searchable_text(item) for item in found]
    assert [row["words"].split() for row in rows] == [searchable_words(item, BODIES) for item in found]
    assert [tuple(row.values()) for row in tables["header"].to_pylist()] == [
        (name, value, item.timestamp, number)
        for number, item in enumerate(found)
        for name, value in item.custom_headers.items()
    ]


@pytest.mark.parametrize("principal", ["alice", "ÆGIR", "x" * 300, "a " * MAX_CHARS])
def test_blanks_stand_around_every_word(principal: str) -> None:
    item = MailboxItem(message_id="m", timestamp=1, topic="open.a", principal=principal, envelope_blob=b"")
    (row,) = search_tables(rows_of([item]), BODIES)["text"].to_pylist()
    assert row["words"][0] == row["words"][-1] == " "
    assert f" {principal[:MAX_WORD_CHARS].lower()} " in row["words"] or principal.startswith("a a")


def test_rows_in_pieces_are_searched_by_the_same_as_in_one() -> None:
    found = [
        MailboxItem(
            message_id=f"m{n}", timestamp=n, topic="open.a", principal=who, envelope_blob=envelope(b"hi")
        )
        for n, who in enumerate(["alice", "ÆGIR", None, "x" * 300, "b"])
    ]
    rows = rows_of(found)
    pieces = pl.concat([rows[:2], rows[2:]], rechunk=False)
    assert pieces.n_chunks() == 2
    assert search_tables(pieces, BODIES) == search_tables(rows, BODIES)
    assert search_tables(rows[2:], BODIES)["text"] == search_tables(rows, BODIES)["text"].slice(2)


def test_a_body_that_was_shredded_has_no_words() -> None:
    item = MailboxItem(message_id="m", timestamp=1, topic="open.a", envelope_blob=b"")
    shredded = rows_of([item]).with_columns(envelope_blob=pl.lit(None, pl.Binary()))
    (row,) = search_tables(shredded, BODIES)["text"].to_pylist()
    assert row["words"].split() == ["open", "a"]


def test_no_rows_have_nothing_to_be_searched_by() -> None:
    tables = search_tables(rows_of([]), BODIES)
    assert [(name, table.num_rows) for name, table in tables.items()] == [("header", 0), ("text", 0)]
    assert tables["header"].column_names == ["name", "value", "timestamp", "id"]
    assert tables["text"].column_names == ["id", "text", "words"]


def test_columns_that_search_does_not_know_are_left_alone() -> None:
    item = extract_mailbox_item(envelope(b"hello"))
    rows = rows_of([item]).with_columns(stream=pl.lit(b"1"), dead_letterings=pl.lit(1))
    assert search_tables(rows, BODIES) == search_tables(rows_of([item]), BODIES)
