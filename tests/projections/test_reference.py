"""The reference fold, which says what the read models mean, held against the engine that ran the history."""

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from postroom.application.messages import NewMessage
from tests.projections.histories import POISON, STORY, Send, Step, live, reference, steps
from tests.support.examples import examples
from tests.support.steps import Operate, Wait

MAILBOX = "main@test"


@settings(max_examples=examples(60))
@given(st.lists(steps, max_size=60))
def test_the_backlog_is_what_the_live_engine_counts(history: list[Step]) -> None:
    with TemporaryDirectory() as folder:
        store = Path(folder) / "store.db"
        counted = live(store, MAILBOX, history)
        rows = [
            {"mailbox": MAILBOX, **{name: getattr(each, name) for name in each.__struct_fields__}}
            for each in counted
        ]
        assert reference(store).rows["backlog"] == rows


def test_the_story_leaves_messages_standing_everywhere(tmp_path: Path) -> None:
    live(tmp_path / "store.db", MAILBOX, STORY)
    standings = {row["status"] for row in reference(tmp_path / "store.db").rows["mailbox"]}
    assert standings == {"ready", "delayed", "in_flight", "acked", "dead", "expired"}


def test_a_redriven_message_starts_its_attempts_again(tmp_path: Path) -> None:
    live(tmp_path / "store.db", MAILBOX, [*POISON, Operate("redrive", "shop")])
    rows = reference(tmp_path / "store.db").rows["mailbox"]
    assert [(row["status"], row["attempts"], row["redriven"]) for row in rows] == [("ready", 0, 1)]


def test_a_message_is_delayed_until_its_mailbox_has_seen_its_time(tmp_path: Path) -> None:
    delayed: list[Step] = [Send(NewMessage(topic="shop", payload=b"", deliver_after_ms=500))]
    live(tmp_path / "early.db", MAILBOX, delayed)
    live(tmp_path / "late.db", MAILBOX, [*delayed, Wait(600), Send(NewMessage(topic="other", payload=b""))])
    assert reference(tmp_path / "early.db").rows["mailbox"][0]["status"] == "delayed"
    assert reference(tmp_path / "late.db").rows["mailbox"][0]["status"] == "ready"


def test_a_message_of_an_archive_is_archived_and_no_backlog(tmp_path: Path) -> None:
    live(tmp_path / "store.db", MAILBOX, [Send(NewMessage(topic="shop", payload=b""))], mode="archive")
    models = reference(tmp_path / "store.db")
    assert [row["status"] for row in models.rows["mailbox"]] == ["archived"]
    assert models.rows["backlog"] == []
