"""What other retry policies would have done to all messages of a store, beside simulations of each alone."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from postroom.adapters.compose.queries import read_mailbox
from postroom.adapters.compose.reports import make_report, whatif_report, write_page
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.application.queries.simulate_policy import Comparison, Figures, Simulation
from postroom.domain.errors import InvalidRequest
from postroom.domain.mailbox.events import OwnershipTaken, TopicPolicySet
from postroom.domain.names import mailbox_stream
from postroom.domain.policy import Changes, TopicPolicy
from postroom.domain.policy_grid import policy_grid
from postroom.domain.record import Event
from postroom.projections.reports import local
from postroom.projections.spark.options import LogSelection
from tests.conformance.records import append
from tests.projections.report_logs import BEGAN, BOXES, HOUR, past

ALL = LogSelection()
GRID = policy_grid(max_attempts=(1, 4), visibility_ms=(60_000, 7_200_000), backoff_base_ms=(500,))
FIGURES = ("settled", "dead", "removed", "waiting", "dead_lettered", "deliveries")
TIMES = ("queued_p50", "queued_p95", "queued_max")
COUNTS = ("messages", "unchanged", "avoided", "pending", "caused", "undecided", "more_deliveries")


def with_changes(mailbox: str, messages: int) -> list[Event]:
    """Return the past of a mailbox with takeovers and changes of policies in it."""
    id_ = mailbox_stream(mailbox)
    policy = TopicPolicy(max_attempts=2, backoff_base_ms=1_000)
    changes: list[Event] = [
        OwnershipTaken(id_, 2, BEGAN + HOUR, 1, "one", "boot", 1, clock_continues=True),
        TopicPolicySet(id_, 3, BEGAN + 2 * HOUR, "orders", policy),
        OwnershipTaken(id_, 4, BEGAN + 3 * HOUR, 1, "two", "boot", 1, clock_continues=False),
    ]
    return sorted([*past(mailbox, messages), *changes], key=lambda event: event.at)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store of two mailboxes."""
    path = str(tmp_path_factory.mktemp("whatif") / "store.db")
    for mailbox in BOXES:
        with closing(SqliteEventLog(path, mailbox, durability="relaxed")) as log:
            append(log, with_changes(mailbox, 120))
    return path


def rows_of(store: str, selection: LogSelection = ALL, **options: Any) -> list[dict[str, Any]]:
    report = whatif_report(store, GRID, selection=selection)
    rows = make_report(store, report, selection=selection, engine="local", **options)
    listed: list[dict[str, Any]] = rows.to_pylist()
    return listed


def simulated(store: str, changes: Changes, *topics: str) -> Comparison:
    simulation = Simulation(changes)
    for mailbox in BOXES:
        with read_mailbox(store, mailbox) as reader:
            reader.simulate_policy(simulation, topics=topics)
    return simulation.comparison()


def as_row(comparison: Comparison) -> dict[str, Any]:
    row: dict[str, Any] = {name: getattr(comparison, name) for name in COUNTS}
    return row | of_figures(comparison.best, "best") | of_figures(comparison.worst, "worst")


def of_figures(figures: Figures, case: str) -> dict[str, Any]:
    counts = {f"{name}_{case}": getattr(figures, name) for name in FIGURES}
    return counts | {f"{name}_{case}_ms": getattr(figures, f"{name}_ms") for name in TIMES}


def test_each_policy_has_the_figures_of_a_simulation_of_its_own(store: str) -> None:
    rows = rows_of(store)
    assert len(rows) == 1 + len(GRID)
    for row, changes in zip(rows[1:], GRID, strict=True):
        expected = as_row(simulated(store, changes))
        assert {name: row[name] for name in expected} == expected
    actual = of_figures(simulated(store, GRID[0]).observed, "best")
    assert {name: rows[0][name] for name in actual} == actual
    assert rows[0]["unchanged"] == rows[0]["messages"] > 200
    assert [row["attempts"] for row in rows] == [None, 1, 1, 4, 4]
    for name in ("caused", "undecided"):
        assert any(row[name] for row in rows), name
    assert rows[2]["dead_lettered_worst"] > rows[4]["dead_lettered_worst"]
    assert rows[2]["redeliveries_worst"] < rows[4]["redeliveries_worst"]


def test_figures_of_topics_are_those_of_simulations_of_their_messages(store: str) -> None:
    rows = rows_of(store, parameters={"by_topic": 1})
    for topic in ("orders", "it's"):
        (row,) = (
            each
            for each in rows
            if each["topic"] == topic and each["attempts"] == 4 and each["visibility_ms"] == 60_000
        )
        expected = as_row(simulated(store, GRID[2], topic))
        assert {name: row[name] for name in expected} == expected
    assert rows_of(store, topic="orders")[3] | {"topic": "orders"} == next(
        row for row in rows if row["topic"] == "orders" and row["attempts"] == 4
    )


def test_times_and_mailboxes_select_messages_by_sending(store: str) -> None:
    selection = LogSelection("acme@one", BEGAN + HOUR, BEGAN + 2 * HOUR)
    sent = [
        event
        for event in past("acme@one", 120)
        if getattr(event, "due", None) is not None
        and event.type_name == "MessageSent"
        and BEGAN + HOUR <= event.at < BEGAN + 2 * HOUR
    ]
    assert {row["messages"] for row in rows_of(store, selection)} == {len(sent)}
    assert len(sent) > 10


def test_messages_that_are_grouped_in_several_steps_have_the_same_figures(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = rows_of(store)
    monkeypatch.setattr(local, "EVENTS_PER_BUCKET", 100)
    assert rows_of(store) == at_once


def test_a_page_has_a_heat_map_of_each_figure_and_topic(store: str, tmp_path: Path) -> None:
    report = whatif_report(store, GRID)
    rows = make_report(store, report, selection=ALL, engine="local", parameters={"by_topic": 1})
    write_page(report, rows, str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 8 * len(report.charts)
    assert "<script" not in page
    assert "attempts 4" in page
    assert "visibility 60 s" in page


def test_a_grid_without_values_or_with_too_many_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="needs values of at least one field"):
        policy_grid()
    with pytest.raises(
        InvalidRequest, match="combine to 100 policies; leave some out, so that there are at most 60"
    ):
        policy_grid(max_attempts=range(1, 11), visibility_ms=range(1_000, 11_000, 1_000))
    assert len(policy_grid(max_attempts=(3, 3, 5))) == 2


def test_sixty_policies_have_a_row_each_and_more_are_refused(store: str) -> None:
    sixty = policy_grid(max_attempts=range(1, 61))
    rows = make_report(store, whatif_report(store, sixty), selection=ALL, engine="local").to_pylist()
    assert [row["attempts"] for row in rows] == [None, *range(1, 61)]
    assert len({row["messages"] for row in rows}) == 1
    with pytest.raises(InvalidRequest, match="There are 61 policies; pass at most 60"):
        whatif_report(store, [*sixty, Changes(max_attempts=61)])
    with pytest.raises(InvalidRequest, match=r"policies\[0\]"):
        whatif_report(store, [3])  # type: ignore[list-item]
