"""What holds the folds to the reference notices a defect in them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import polars as pl
import pytest

from postroom.projections import fold as folds
from postroom.projections.log_reader import LogExtent
from postroom.projections.models import activity, backlog, messages
from postroom.projections.projection import load_projections
from tests.projections.folding import Logs, folded, lived
from tests.projections.histories import POISON, STORY, Receive, Settle, Step
from tests.projections.reference import fold
from tests.support.steps import Operate, Wait

SIZES = [3, 1, 7]
Patch = Callable[[pytest.MonkeyPatch], None]


def without(event: str) -> Patch:
    """Return a fold of messages that passes over an event."""
    whole = messages.fold
    return lambda patch: patch.setattr(
        messages, "fold", lambda records: whole(records.filter(pl.col("event") != event))
    )


def changed(
    module: Any, name: str, change: Callable[[pl.DataFrame], pl.DataFrame], *, before: bool = False
) -> Patch:
    """Return a function over frames whose first argument, or whose result, is changed."""
    whole = getattr(module, name)

    def defective(frame: pl.DataFrame, *others: Any) -> pl.DataFrame:
        made = whole(change(frame) if before else frame, *others)
        return made if before else change(made)

    return lambda patch: patch.setattr(module, name, defective)


def ignoring_time(patch: pytest.MonkeyPatch) -> None:
    whole = messages.finish
    late = 2**62
    patch.setattr(
        messages,
        "finish",
        lambda partials, extents: whole(
            partials,
            [LogExtent(extent.id, extent.name, extent.first, extent.last, late) for extent in extents],
        ),
    )


DEFECTS: dict[str, Patch] = {
    "redrives are passed over": without("MessageRedriven"),
    "requeues are passed over": without("MessageRequeued"),
    "extensions are passed over": without("MessageVisibilityExtended"),
    "expiries are passed over": without("MessageExpired"),
    "nothing is delayed": ignoring_time,
    "pieces are dropped": changed(messages, "merge", lambda rows: rows.head(len(rows) // 2), before=True),
    "pieces are merged from the last to the first": changed(
        messages, "merge", lambda rows: rows.with_columns(first_place=-pl.col("first_place")), before=True
    ),
    "rows that may still change are taken for complete": lambda patch: patch.setattr(
        messages, "is_complete", lambda: pl.col("id").is_not_null()
    ),
    "late events count twice": lambda patch: changed(
        folds, "_with_topic", lambda rows: pl.concat([rows, rows.filter(pl.col("event") != "MessageSent")])
    )(patch),
    "late events are left out": changed(
        folds, "_with_topic", lambda rows: rows.filter(pl.col("event") == "MessageSent")
    ),
    "dead-letterings before a redrive are forgotten": changed(
        messages,
        "finish",
        lambda rows: rows.with_columns(pl.col("dead_letterings").str.replace(r"^\[.*\},\{", "[{")),
    ),
}


@pytest.fixture(scope="module")
def logs() -> Logs:
    again: list[Step] = [
        Operate("redrive", "shop"),
        Receive("shop"),
        Settle("nack", 2),
        Wait(300),
        Receive("shop"),
    ]
    return lived([STORY, STORY, [*POISON, *again, Settle("nack", 3)]])


def test_without_a_defect_they_agree(logs: Logs) -> None:
    assert folded(logs, SIZES, 2) == fold(logs)


@pytest.mark.parametrize("defect", DEFECTS.values(), ids=DEFECTS)
def test_a_defect_in_the_fold_of_the_log_is_noticed(
    logs: Logs, defect: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    defect(monkeypatch)
    assert folded(logs, SIZES, 2) != fold(logs)


@pytest.mark.parametrize(
    ("model", "part", "defect"),
    [
        ("backlog", "derive", lambda rows: backlog.derive(rows.filter(pl.col("status") != "in_flight"))),
        (
            "backlog",
            "derive",
            lambda rows: backlog.derive(rows).with_columns(oldest_at=pl.lit(None, pl.Int64)),
        ),
        ("activity", "fold", lambda rows: activity.fold(rows.filter(pl.col("event") != "OwnershipTaken"))),
        ("activity", "fold", lambda rows: activity.fold(rows.with_columns(pl.col("at") + 3_600_000_000))),
    ],
)
def test_a_defect_in_the_fold_of_a_projection_is_noticed(
    logs: Logs, model: str, part: str, defect: Callable[[pl.DataFrame], pl.DataFrame]
) -> None:
    projections = load_projections()
    change: dict[str, Any] = {part: defect}
    projections[model] = replace(projections[model], **change)
    assert folded(logs, SIZES, 2, projections) != fold(logs)
