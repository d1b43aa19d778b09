import sys
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from postroom.adapters.cli.output import Id, Output, Prose, Time, render, time_or_text

ID = Id("01a1f9d9-6291-712a-9b82-dba09c321a4e")
NOW = datetime(2026, 1, 31, 8, tzinfo=UTC)


def lines(columns, rows, width=80):
    return list(render(columns, rows, width))


def test_an_id_stays_whole_and_the_longest_text_beside_it_is_shortened():
    table = lines(("message", "topic", "error"), [(ID, "orders", "x" * 200)])

    assert max(map(len, table)) == 80
    assert table[-1] == f"{ID}  orders  {'x' * 33}…"


def test_an_id_longer_than_the_terminal_stays_whole():
    long = Id("order-" + "7" * 120)

    assert lines(("message", "topic"), [(long, "orders.created")]) == [
        "message",
        "topic",
        "─" * 14,
        long,
        "orders.created",
    ]


def test_ids_are_above_their_rows_if_they_leave_too_little_room():
    columns = ("message", "topic", "copy", "outcome")

    assert lines(columns, [(ID, "orders", ID, "redriven"), (ID, "orders", None, "skipped")]) == [
        "message",
        "topic   copy                                  outcome",
        f"{'─' * 6}  {'─' * 36}  {'─' * 8}",
        ID,
        f"orders  {ID}  redriven",
        ID,
        f"orders  {' ' * 36}  skipped",
    ]


@pytest.mark.parametrize("width", [20, 40, 80])
def test_facts_are_wrapped_beside_their_names_and_ids_stay_whole(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", f"{width}")
    Output(as_json=False).facts(
        [("message", ID), ("日" * 30, "本 " * 60), ("empty", None), ("n" * 90, "v" * 90)]
    )

    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if cell_len(line) > width] == ([ID] if width < 40 else [])
    assert "".join(shown.split()) == f"message{ID}{'日' * 30}{'本' * 60}{'n' * 90}{'v' * 90}"


def test_facts_are_one_line_each_in_wide_output(capsys):
    Output(as_json=False, wide=True).facts([("a", "x " * 100), ("bb", 1_234)])

    assert capsys.readouterr().out == f"a   {('x ' * 100).rstrip()}\nbb  1,234\n"


def test_times_are_ages_and_full_in_wide_tables():
    row = (Time("2026-01-31T07:55:00.123456Z", NOW), "y" * 200)

    assert lines(("age", "text"), [row])[-1].startswith("4m   yyy")
    assert lines(("age", "text"), [row], None)[-1] == f"2026-01-31T07:55:00.123456Z  {'y' * 200}"


@pytest.mark.parametrize(
    ("delta", "age"),
    [
        (timedelta(0), "0s"),
        (timedelta(seconds=59), "59s"),
        (timedelta(minutes=59, seconds=59), "59m"),
        (timedelta(hours=23), "23h"),
        (timedelta(days=364), "364d"),
        (timedelta(days=800), "2y"),
        (timedelta(minutes=-5), "in 5m"),
    ],
)
def test_an_age_is_a_whole_number_of_its_largest_unit(delta, age):
    assert Time(NOW - delta, NOW).age == age


def test_text_from_others_that_is_no_time_is_shown_as_it_is():
    assert time_or_text("yesterday") == "yesterday"
    assert str(time_or_text("2026-01-31T08:00:00Z")) == "2026-01-31T08:00:00Z"


def test_prose_continues_on_the_next_line():
    table = lines(("position", "facts"), [(7, Prose("a=1, " * 30 + "b" * 100))])

    assert max(map(len, table)) <= 80
    assert "".join(line[10:] for line in table[2:]).replace(" ", "") == "a=1," * 30 + "b" * 100


def test_numbers_are_grouped_and_aligned_to_the_right():
    table = lines(("name", "count"), [("a", 5), ("b", 1_234_567)])

    assert table[2:] == ["a             5", "b     1,234,567"]


def test_a_cell_stays_on_its_line_and_controls_no_terminal():
    assert lines(("a",), [("x\ny\t\x1b[31m\u202ez",)])[-1] == "x\\ny\\t\\x1b[31m\\u202ez"


@given(
    st.lists(st.tuples(st.text(), st.text(), st.integers(0, 10**9), st.text().map(Prose)), min_size=1),
    st.integers(60, 120),
)
def test_every_line_of_a_table_fits_the_terminal_whatever_the_text(rows, width):
    columns = ("message", "topic", "reason", "attempts", "facts")
    shown = lines(columns, [(ID, *row) for row in rows], width)

    assert len(shown) > len(rows)
    for line in shown:
        assert cell_len(line) <= width


def test_columns_for_wide_tables_only_are_left_out_of_others(capsys):
    for wide in (False, True):
        Output(as_json=False, wide=wide).table(("a", "b"), [("1", "2")], only_wide=("b",))

    narrow, _, _, wide_header, *_ = capsys.readouterr().out.splitlines()
    assert (narrow, wide_header) == ("a", "a  b")


def test_the_width_of_a_table_is_that_of_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    Output(as_json=False).table(("a",), [("x" * 200,)])

    assert {len(line) for line in capsys.readouterr().out.splitlines()[1:]} == {40}


@pytest.mark.parametrize(("cursor", "shown"), [("kgHNA-g", "kgHNA-g"), ("acme@one 17", "'acme@one 17'")])
def test_the_cursor_of_the_next_page_can_be_pasted_into_a_shell(
    cursor: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Output(as_json=False).note_more(cursor)
    assert capsys.readouterr().err == f"There is more; continue with --cursor {shown}.\n"


def test_a_terminal_is_told_how_to_explain_the_code_of_an_error_unless_the_text_says_all(capsys, monkeypatch):
    error = {"code": "E_STORE", "message": "The store is of another version."}
    Output(as_json=False).error(error)
    assert capsys.readouterr().err == "postroom: The store is of another version.\n"

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    Output(as_json=False).error(error)
    assert capsys.readouterr().err.splitlines()[1:] == ["`postroom explain E_STORE` says more."]
    Output(as_json=False).error({"code": "E_SCHEMA", "message": "The limit must be at least 1."})
    Output(as_json=True).error(error)
    assert "explain" not in capsys.readouterr().err
