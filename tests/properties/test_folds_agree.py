"""The folds over frames make the same rows as the reference and the live engine, however the log is split."""

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from postroom.application.messages import NewMessage, rfc3339
from postroom.application.queries.get_message import GetMessage
from postroom.domain.record import Record
from postroom.projections.log_reader import LogExtent
from postroom.projections.projection import Row
from tests.projections.folding import Logs, folded, lived, log_of
from tests.projections.histories import POISON, STORY, VARIED, Send, Step, steps
from tests.projections.reference import ReadModels, fold
from tests.properties.pasts import Seen
from tests.properties.pasts import histories as pasts
from tests.properties.pasts import live as live_past
from tests.support.examples import examples
from tests.support.stores import MAILBOX, memory_place

histories = st.lists(st.lists(steps, max_size=80), min_size=1, max_size=3)
_sizes = st.lists(st.integers(1, 60), min_size=1, max_size=8)


@given(histories, _sizes, st.integers(1, 4))
@example([STORY, STORY], [3, 1, 7], 2)
@example([STORY], [1], 1)
@example([VARIED, STORY], [1_000], 1)
def test_ranges_folded_apart_amount_to_the_reference(
    taken: list[list[Step]], sizes: list[int], buckets: int
) -> None:
    logs = lived(taken)
    assert folded(logs, sizes, buckets) == fold(logs)


@settings(max_examples=examples(30))
@given(histories, st.data())
def test_any_stretch_of_a_log_folds_to_what_the_reference_makes_of_it(
    taken: list[list[Step]], data: st.DataObject
) -> None:
    logs: Logs = {}
    for extent, records in lived(taken).items():
        first = data.draw(st.integers(1, extent.last))  # retention removed what was before
        last = data.draw(st.integers(first, extent.last))
        logs[LogExtent(extent.id, extent.name, first, last, records[last - 1].at)] = records
    assert folded(logs, [10], 2) == fold(logs)


@settings(max_examples=examples(50))
@given(pasts, _sizes)
def test_the_folds_tell_what_the_live_engine_told_at_the_same_position(
    taken: list[Any], sizes: list[int]
) -> None:
    past = live_past(memory_place(), taken)
    records = list(past.log.read())
    # Retention takes the past away as a whole: of what was seen before, only the last can be told.
    moments = past.seen if records[0].position == 1 else past.seen[-1:]
    for seen in [*moments[:: 1 + len(moments) // 3], moments[-1]]:
        if seen.position == 0:
            continue
        logs = log_of(MAILBOX, [record for record in records if record.position <= seen.position])
        models = folded(logs, sizes, 2)
        assert models == fold(logs)
        assert models.rows["backlog"] == live_backlog(seen)
        assert dead_letters(models) == live_dead_letters(seen)
    models = folded(log_of(MAILBOX, records), sizes, 2)  # retention may have gone on after what was seen last
    get_message = GetMessage(past.log, lambda: records[-1].at)
    for row in models.rows["mailbox"]:
        detail = get_message(row["message_id"])
        assert (row["status"], row["attempts"], row["redriven"]) == (
            detail.status,
            detail.attempt,
            detail.redriven,
        )
        assert (row["topic"], row["shard"]) == (detail.topic, detail.shard)


@settings(max_examples=examples(30))
@given(st.lists(steps, max_size=30), st.lists(steps, max_size=30), _sizes)
@example(POISON, POISON, [4])
@example(STORY, STORY, [1])
@example(STORY, STORY, [1_000])
def test_an_id_sent_again_after_retention_forgot_it_begins_another_life(
    before: list[Step], after: list[Step], sizes: list[int]
) -> None:
    # As archive and live log are read together: the same ids twice in one mailbox.
    lives = [records for history in (before, after) for records in lived([history]).values()]
    records = renumbered([*lives[0], *lives[1]])
    logs = log_of("box0@test", records)
    models = folded(logs, sizes, 2)
    assert models == fold(logs)
    assert len(models.rows["mailbox"]) == sum(each.type == "MessageSent" for each in records)


def test_an_id_that_two_mailboxes_know_names_two_messages() -> None:
    sent = Send(NewMessage(topic="shop", payload=b"x", message_id="0193a5b0-0000-7000-8000-000000000001"))
    dead = [sent, *STORY[1:5]]
    logs = lived([[sent], [sent], dead])
    assert folded(logs, [1_000], 1) == fold(logs)
    assert folded(logs, [2], 1) == fold(logs)


def renumbered(records: Sequence[Record]) -> list[Record]:
    """Return records at the positions 1, 2, 3, ..., each later than the one before."""
    start = records[0].at
    return [
        record._replace(
            position=position,
            event=msgspec.structs.replace(record.event, at=max(record.at, start) + position),
        )
        for position, record in enumerate(records, 1)
    ]


def live_backlog(seen: Seen) -> list[Row]:
    """Return what the engine counted, as rows of the backlog."""
    return [{"mailbox": MAILBOX, **msgspec.structs.asdict(row)} for row in seen.at_last_event]


_SHOWN = ("topic", "shard", "message_id", "reason", "attempt", "last_error", "redriven")


def dead_letters(models: ReadModels) -> list[Row]:
    """Return what both the read model and the engine tell of dead letters, the first sent first."""
    return [
        {name: row[name] for name in _SHOWN}
        | {name: rfc3339(row[name]) for name in ("first_seen", "last_seen")}
        for row in models.rows["dead_letters"]
    ]


def live_dead_letters(seen: Seen) -> list[Row]:
    """Return the same of what the engine told."""
    shown = (*_SHOWN, "first_seen", "last_seen")
    return [{name: getattr(letter, name) for name in shown} for letter in seen.dead]
