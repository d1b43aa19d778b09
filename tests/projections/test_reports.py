"""Reports in this process: their figures, their files, and hostile contents of a log."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree.ElementTree import fromstring

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroom.adapters.compose.reports import make_report, write_page, write_parquet
from postroom.domain.errors import InvalidRequest, Unavailable
from postroom.projections.reports.report import LATENCY, RETRIES, SLA, TRAFFIC, Report
from postroom.projections.spark.options import LogSelection
from tests.projections.report_logs import BEGAN, BOXES, HOUR, figures, past, write
from tests.support.examples import examples

REPORTS = (LATENCY, RETRIES, TRAFFIC, SLA)
ALL = LogSelection()


@pytest.fixture(scope="module")
def logs() -> dict[str, Any]:
    """The events of two mailboxes."""
    return {mailbox: past(mailbox, 150) for mailbox in BOXES}


@pytest.fixture(scope="module")
def store(logs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A store with the two logs."""
    path = tmp_path_factory.mktemp("reports") / "store.db"
    write(str(path), logs)
    yield str(path)
    shutil.rmtree(path.parent)


def report(store: str, report: Report, selection: LogSelection = ALL, **options: Any) -> list[dict[str, Any]]:
    """Return the rows of a report, with times in µs."""
    return with_micros(make_report(store, report, selection=selection, engine="local", **options))


def with_micros(rows: pa.Table) -> list[dict[str, Any]]:
    """Return rows with their first column in µs."""
    micros = rows["start"].cast(pa.timestamp("us")).cast(pa.int64())
    listed: list[dict[str, Any]] = rows.set_column(0, "start", micros).to_pylist()
    return listed


@pytest.mark.parametrize("name", ["latency", "retries", "traffic", "sla"])
def test_figures_are_those_of_a_plain_computation(name: str, store: str, logs: dict[str, Any]) -> None:
    (made,) = (each for each in REPORTS if each.name == name)
    bound = HOUR // 2 if name == "sla" else 0
    rows = report(store, made, parameters={"bound": bound} if bound else {})
    expected = figures(name, logs, bound)
    assert len(rows) > 20
    assert [row | {"x": None} for row in rows] == [pytest.approx(row | {"x": None}) for row in expected]


@settings(max_examples=examples(10))
@given(
    chance=st.randoms(use_true_random=False),
    messages=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    bound=st.sampled_from((1, HOUR // 4, 5 * HOUR)),
)
def test_figures_of_any_log_are_those_of_a_plain_computation(
    chance: Random, messages: tuple[int, int], bound: int
) -> None:
    logs = {mailbox: past(mailbox, count, chance) for mailbox, count in zip(BOXES, messages, strict=True)}
    with TemporaryDirectory() as folder:
        store = str(Path(folder) / "store.db")
        write(store, logs)
        for made in REPORTS:
            rows = report(store, made, parameters={"bound": bound} if made is SLA else {})
            expected = figures(made.name, logs, bound)
            assert [row | {"x": None} for row in rows] == [
                pytest.approx(row | {"x": None}) for row in expected
            ]


def test_times_select_messages_by_sending_and_follow_them_to_the_end(
    store: str, logs: dict[str, Any]
) -> None:
    selection = LogSelection("acme@one", BEGAN + HOUR, BEGAN + 2 * HOUR)
    rows = report(store, LATENCY, selection, topic="ord*")
    sent = [
        event
        for event in logs["acme@one"]
        if getattr(event, "topic", "") == "orders" and event.due is not None
    ]
    selected = [event for event in sent if BEGAN + HOUR <= event.at < BEGAN + 2 * HOUR]
    assert sum(row["messages"] for row in rows) == len(selected) > 0
    assert {row["topic"] for row in rows} == {"orders"}


@pytest.mark.parametrize("made", REPORTS, ids=lambda each: each.name)
def test_a_log_without_messages_makes_an_empty_report(made: Report, tmp_path: Path) -> None:
    store = str(tmp_path / "empty.db")
    write(store, {"acme@one": past("acme@one", 0)})
    rows = make_report(store, made, selection=ALL, engine="local")
    assert rows.num_rows == 0
    write_page(made, rows, str(tmp_path / "page.html"))
    assert "No rows." in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("made", REPORTS, ids=lambda each: each.name)
def test_a_page_runs_no_script_and_names_no_host(made: Report, store: str, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text("former")
    write_page(made, make_report(store, made, selection=ALL, engine="local"), str(file))
    page = file.read_text()
    assert "\x00" not in page
    assert "\x1b" not in page
    assert "<script" not in page
    assert "<b>" not in page
    assert "<i>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "default-src 'none'" in page
    assert page.replace("http://www.w3.org/2000/svg", "").count("://") == 0
    drawings = [f"<svg{part.partition('</svg>')[0]}</svg>" for part in page.split("<svg")[1:]]
    assert len(drawings) == len(made.charts)
    for drawing in drawings:
        fromstring(drawing)
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]


def test_a_parquet_folder_is_replaced_only_where_it_is_a_report(store: str, tmp_path: Path) -> None:
    rows = make_report(store, TRAFFIC, selection=ALL, engine="local")
    folder = tmp_path / "traffic"
    write_parquet(TRAFFIC, rows, str(folder))
    assert pq.read_table(folder / "report.parquet").to_pylist() == rows.to_pylist()
    with pytest.raises(InvalidRequest, match="already contains a report; add --overwrite"):
        write_parquet(TRAFFIC, rows, str(folder))
    write_parquet(TRAFFIC, rows.slice(0, 1), str(folder), overwrite=True)
    assert pq.read_table(folder / "report.parquet").num_rows == 1
    (folder / "own.txt").write_text("own")
    with pytest.raises(InvalidRequest, match=r"other files, such as own\.txt"):
        write_parquet(TRAFFIC, rows, str(folder), overwrite=True)
    with pytest.raises(InvalidRequest, match="is a folder; name a file"):
        write_page(TRAFFIC, rows, str(folder))
    with pytest.raises(Unavailable, match="Check that the folder exists"):
        write_page(TRAFFIC, rows, str(tmp_path / "none" / "page.html"))


def test_a_report_has_the_parameters_of_its_text_and_no_others(store: str) -> None:
    with pytest.raises(InvalidRequest, match="latency has no parameter 'bound'; it has period, since, until"):
        make_report(store, LATENCY, selection=ALL, engine="local", parameters={"bound": 1})
    with pytest.raises(InvalidRequest, match="x reads a column 'payload'; postroom_events has mailbox"):
        Report("x", "x", "SELECT 1", reads=("payload",))
