"""Activity, the lineage of dead letters, and what waits in contexts, from the command line."""

from pathlib import Path

import pytest

from tests.conformance.test_read_models_activity import TWICE
from tests.e2e.conftest import Postroom
from tests.projections.histories import POISON, build_without_spark, live
from tests.support.outboxes import order_placed, record


@pytest.fixture
def filled(postroom: Postroom) -> Postroom:
    """A store in which a message died, was put back and died again."""
    live(postroom.store, "main@local", TWICE)
    build_without_spark(postroom.store)
    return postroom


def test_activity_is_counted_by_day_or_hour_and_topic(filled: Postroom) -> None:
    days = filled.ok("activity", "--topic", "sh*", "--json").json
    assert days["period"] == "day"
    counts = {each["event"]: each["events"] for each in days["items"]}
    assert (counts["MessageSent"], counts["MessageDeadLettered"], counts["MessageRedriven"]) == (1, 2, 1)
    assert {each["topic"] for each in days["items"]} == {"shop"}
    shown = filled.ok("activity", "hour").out
    assert "2025-06-15T15:00Z" in shown
    assert "OwnershipTaken" in shown
    page = filled.ok("activity", "--limit", "1", "--json").json
    rest = filled.ok("activity", "--cursor", page["next_cursor"], "--json").json
    assert page["items"] + rest["items"] == filled.ok("activity", "--json").json["items"]


def test_activity_that_there_is_none_of_ends_as_a_search_does_that_finds_nothing(filled: Postroom) -> None:
    assert filled("activity", "--since", "1h", "--json").code == filled("search", "--topic", "none").code != 0
    assert filled("activity", "--until", "2025-06-15", "--json").json["items"] == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("week",), "Unknown period 'week'; expected hour or day."),
        (("--since", "100"), "--since '100' is not a time"),
    ],
)
def test_wrong_usage_is_reported_in_one_sentence(
    filled: Postroom, arguments: tuple[str, ...], problem: str
) -> None:
    failed = filled("activity", *arguments, "--json")
    assert failed.code != 0
    assert problem in failed.error["message"]


def test_a_dead_letter_is_shown_with_where_it_came_from_and_what_it_died_of_before(filled: Postroom) -> None:
    shown = filled.ok("dlq", "show", "order-1", "--json").json
    assert shown["original_subject"] == "orders.placed"
    first, last = shown["dead_letterings"]
    assert (first["reason"], first["attempt"], first["last_error"]) == (
        "max_attempts",
        2,
        "timeout after 1 ms",
    )
    assert first["at"] < first["redriven_at"] < last["at"]
    assert last["redriven_at"] is None
    text = filled.ok("dlq", "show", "order-1").out
    assert "orders.placed" in text
    assert "max_attempts at attempt 2: timeout after 1 ms, redriven 2025-06-15T" in " ".join(text.split())


def test_dead_letters_are_grouped_by_their_errors(filled: Postroom) -> None:
    page = filled.ok("dlq", "groups", "TIMEOUT", "--topic", "sh*", "--bars", "2", "--json").json
    (group,) = page["items"]
    assert (group["topic"], group["reason"], group["count"]) == ("shop", "max_attempts", 1)
    assert (group["sample"]["message_id"], sum(group["trend"]), page["letters"]) == ("order-1", 1, 1)
    shown = filled.ok("dlq", "groups", "--by", "reason")
    assert "timeout after 3 ms" in shown.out
    assert "1 dead letter in 1 group." in shown.err


def test_what_waits_in_a_context_is_counted_and_kept(filled: Postroom, messaging_database: str) -> None:
    assert filled.ok("views", "contexts", "--json").json == {"contexts": []}
    record(messaging_database, order_placed("o-1", 1), order_placed("o-1", 2))
    there = ("--messaging", messaging_database, "--context", "sea")
    counted = filled.ok("views", "contexts", *there, "--json").json["contexts"]
    assert [(each["context"], each["box"], each["count"]) for each in counted] == [
        ("sea", "inbox", 0),
        ("sea", "outbox", 2),
    ]
    record(messaging_database, order_placed("o-2", 1))
    assert filled.ok("views", "contexts", "--json").json["contexts"] == counted
    (filled.folder / "postroom.toml").write_text(
        f'[messaging]\ndatabase = "{messaging_database}"\ncontext = "sea"\n'
    )
    _, outbox = filled.ok("views", "contexts", "--json").json["contexts"]
    assert outbox["count"] == 3


def test_following_keeps_the_context_of_the_settings_up_to_date(
    filled: Postroom, messaging_database: str
) -> None:
    record(messaging_database, order_placed("o-1", 1))
    settings = f'[messaging]\ndatabase = "{messaging_database}"\ncontext = "sea"\n'
    Path(filled.folder / "postroom.toml").write_text(settings)
    filled.ok("views", "follow", "--once")
    Path(filled.folder / "postroom.toml").unlink()
    _, outbox = filled.ok("views", "contexts", "--json").json["contexts"]
    assert (outbox["box"], outbox["count"]) == ("outbox", 1)


@pytest.mark.extended
def test_read_models_in_clickhouse_answer_like_those_of_the_store(filled: Postroom) -> None:
    filled.ok("views", "rebuild", "--into", "chdb:models")
    assert filled.ok("search", "--json", "--from", "chdb:models").out == filled.ok("search", "--json").out
    (shard,) = filled.ok("backlog", "shop", "--json", "--from", "chdb:models").json["shards"]
    assert (shard["topic"], shard["ready"], shard["dead"]) == ("shop", 0, 1)
    (letter,) = filled.ok("dlq", "list", "--json", "--from", "chdb:models").json["dead_letters"]
    assert (letter["message_id"], letter["redriven"]) == ("order-1", 1)
    live(filled.store, "other@local", POISON)
    filled.ok("views", "follow", "--once", "--into", "chdb:models")
    assert filled.ok("stats", "--json", "--from", "chdb:models").json["total_events"] == 2
    refused = filled("views", "follow", "--once", "--into", "parquet:models", "--json")
    assert "parquet:... can't be followed; name clickhouse://" in refused.error["message"]
    refused = filled("backlog", "--from", "chdb:models", "--at", "5", "--json")
    assert "omit --at and --archive" in refused.error["message"]
    refused = filled("search", "--from", "parquet:models", "--json")
    assert "parquet:... can't be queried; name clickhouse://" in refused.error["message"]


def test_a_search_for_words_says_whether_bodies_are_indexed_and_how_to_index_them(postroom):
    postroom.ok("send", "orders", "-", stdin=b"needle in the body")
    postroom.ok("views", "rebuild")
    missed = postroom("search", "--match", "needle")
    assert missed.code == 3
    note = missed.err.replace("\n", " ")
    assert "bodies are not indexed" in note
    assert 'set bodies = ["*"]' in note
    (postroom.folder / "postroom.toml").write_text('[search]\nbodies = ["*"]\n')
    still = postroom("search", "--match", "needle")  # the version was built without them
    assert "bodies are not indexed" in still.err.replace("\n", " ")
    postroom.ok("views", "rebuild")
    found = postroom.ok("search", "--match", "needle")
    assert "1 found" in found.err
    assert "indexed" not in found.err
