"""What a projection has to be, and what is said of one that is not."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from postroom.domain.errors import BrokenProjection, InvalidRequest
from postroom.projections.fold import check_folds
from postroom.projections.projection import (
    MODULES,
    Column,
    EventProjection,
    MessageProjection,
    load_projections,
    merge_rows,
    run_fold,
)
from tests.projections.reference import merge

COUNTS = EventProjection(
    "counts",
    (
        Column("name", "text", "key"),
        Column("events", "int", "sum"),
        Column("first", "int", "min"),
        Column("last", "int", "max"),
    ),
)
ROW = {"name": "a", "events": 1, "first": 3, "last": 3}

DECLARED = """
from postroom.projections.projection import Column, EventProjection, MessageProjection
NAME = Column("name", "text", "key")
"""


def test_the_messages_come_first_and_the_built_in_ones_are_all_there() -> None:
    assert list(load_projections()) == ["mailbox", "activity", "backlog", "dead_letters"]


@pytest.mark.parametrize(
    ("declared", "problem"),
    [
        ("PROJECTION = 7", "is not a Projection; make it one"),
        ("1 / 0", "can't be loaded: division by zero"),
        ("PROJECTION = EventProjection('Größe', (NAME,))", "has the name 'Größe'; write up to 40"),
        ("PROJECTION = EventProjection('x; DROP TABLE log', (NAME,))", "write up to 40 lower-case letters"),
        ("PROJECTION = EventProjection('counts', (Column('a b', 'text', 'key'),))", "has the name 'a b'"),
        (
            "PROJECTION = EventProjection('topic_counts', (NAME,))",
            "has the name topic_counts, which is reserved",
        ),
        ("PROJECTION = EventProjection('activity', (NAME,))", "Two projections are named activity"),
        ("PROJECTION = EventProjection('counts', (NAME, NAME))", "has two columns with the same name"),
        ("PROJECTION = MessageProjection('counts', (Column('n', 'int', 'sum'),))", "has no key"),
        (
            "PROJECTION = EventProjection('counts', (NAME,), indexes=(('age',),))",
            "indexes age, which is not one of its columns",
        ),
        (
            "PROJECTION = EventProjection('counts', (NAME,), reads=('colour',))",
            "reads colour, but the log only has",
        ),
        ("PROJECTION = EventProjection('counts', (NAME, Column('n')))", "columns without merge"),
    ],
)
def test_a_projection_that_is_none_is_told_with_its_module_and_what_to_do(
    declared: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ours.py").write_text(DECLARED + declared)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(MODULES, "ours")
    sys.modules.pop("ours", None)
    with pytest.raises(InvalidRequest) as told:
        load_projections()
    assert problem in str(told.value)
    sys.modules.pop("ours", None)


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (lambda _: [ROW], "returned a list instead of a polars DataFrame"),
        (lambda _: pl.DataFrame([{"name": "a"}]), "returned the columns name;"),
        (lambda _: pl.DataFrame([ROW | {"more": 1}]), "returned the columns name, events, first, last, more"),
        (lambda _: pl.DataFrame([ROW | {"last": "x"}]), "returned the column last as String"),
        (lambda _: pl.DataFrame([ROW | {"events": 1.5}]), "returned the column events as Float64"),
        (lambda _: pl.DataFrame([ROW | {"name": None}]), "returned nulls in the column name"),
        (lambda _: pl.DataFrame([ROW | {"events": None}]), "returned nulls in the column events"),
        (lambda frame: frame.select("nothing"), "failed with ColumnNotFoundError"),
    ],
)
def test_a_fold_that_makes_other_rows_than_declared_is_told_by_name(
    made: Callable[[pl.DataFrame], pl.DataFrame], problem: str
) -> None:
    with pytest.raises(BrokenProjection, match=r"The fold of the projection counts") as told:
        run_fold(COUNTS, made, pl.DataFrame())
    assert problem in str(told.value)


def test_counts_may_be_unsigned_texts_categories_and_rows_of_one_key_many() -> None:
    frame = pl.DataFrame([ROW, ROW | {"first": 1, "last": 9}, ROW | {"name": "b", "first": None}])
    loose = frame.with_columns(pl.col("name").cast(pl.Categorical), pl.col("events").cast(pl.UInt32))
    rows = run_fold(COUNTS, lambda frame: frame, loose)
    assert rows.schema == pl.Schema(COUNTS.schema)
    assert rows.sort("name").to_dicts() == merge(COUNTS, frame.to_dicts())
    assert rows.sort("name").to_dicts() == [
        {"name": "a", "events": 2, "first": 1, "last": 9},
        {"name": "b", "events": 1, "first": None, "last": 3},
    ]


def test_rows_merge_in_frames_as_they_do_one_by_one() -> None:
    latest = MessageProjection("latest", (Column("name", "text", "key"), Column("last")))
    rows: list[dict[str, Any]] = [
        {"name": "a", "last": "x"},
        {"name": "a", "last": None},
        {"name": "b", "last": "y"},
    ]
    merged = merge_rows(latest, pl.DataFrame(rows)).sort("name").to_dicts()
    assert merged == merge(latest, rows) == [{"name": "a", "last": None}, {"name": "b", "last": "y"}]


def test_folds_are_tried_on_nothing_before_work_begins() -> None:
    check_folds(load_projections())
    broken = EventProjection("counts", COUNTS.columns, reads=("at",), fold=lambda records: records)
    with pytest.raises(BrokenProjection, match=r"projection counts returned the columns"):
        check_folds({**load_projections(), "counts": broken})
    undeclared = replace(broken, fold=lambda records: records.select("place"))
    with pytest.raises(BrokenProjection, match="failed with ColumnNotFoundError"):
        check_folds({**load_projections(), "counts": undeclared})
