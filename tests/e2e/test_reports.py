"""Reports on the command line: what they print and write, and a report of a user."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, SCRIPT, TIMEOUT_SECONDS, Postroom

EXAMPLE = ROOT / "docs" / "examples" / "reports" / "ack_times.py"


def test_a_report_is_a_table_json_a_parquet_file_and_a_page(postroom: Postroom) -> None:
    assert postroom("report", "traffic").code == 3
    postroom.ok("send", "<b>orders</b>", "hello", "--principal", "me")
    files = ("--html", "page.html", "--parquet", "rows")
    done = postroom.ok("report", "traffic", "--json", *files)
    (row,) = done.json["rows"]
    assert done.json["computed_by"]["engine"] == "local"
    assert (row["topic"], row["principal"], row["messages"], row["bytes"]) == ("<b>orders</b>", "me", 1, 5)
    assert row["start"].endswith(":00:00Z")
    assert "&lt;b&gt;orders&lt;/b&gt;" in (postroom.folder / "page.html").read_text()
    assert (postroom.folder / "rows" / "report.parquet").is_file()
    table = postroom.ok("report", "latency", "--by", "day", COLUMNS="80").out
    assert all(len(line) <= 80 for line in table.splitlines())
    assert "total_p95" in table


def test_a_process_that_makes_a_report_prints_no_warning_when_it_ends(postroom: Postroom) -> None:
    postroom.ok("send", "orders", "hello")
    # Not a fork, which ends in another way.
    command = [str(SCRIPT), "--store", str(postroom.store), "report", "traffic"]
    done = subprocess.run(command, capture_output=True, check=False, timeout=TIMEOUT_SECONDS)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"orders" in done.stdout


def test_the_report_of_the_page_computes_median_and_p95_by_topic_and_hour(postroom: Postroom) -> None:
    assert EXAMPLE.read_text() in (ROOT / "docs" / "reports.md").read_text()
    postroom.ok("send", "orders", "hello")
    receipt = json.loads(postroom.ok("recv", "orders", "--json").out)["receipt"]
    postroom.ok("ack", receipt)
    path = str(Path(EXAMPLE).parent)
    (row,) = postroom.ok("report", "run", "ack_times", "--json", PYTHONPATH=path).json["rows"]
    assert row["topic"] == "orders"
    assert row["median_ms"] == row["p95_ms"] > 0


def test_a_grid_of_policies_is_a_table_that_fits_with_ranges(postroom: Postroom) -> None:
    postroom.ok("send", "orders", "hello")
    receipt = json.loads(postroom.ok("recv", "orders", "--json").out)["receipt"]
    postroom.ok("nack", receipt, "--delay", "0")
    grid = ("--attempts", "1,3", "--visibility", "5s,1m", "--backoff", "1s", "--backoff-max", "1h")
    whatif = ("report", "whatif", *grid)
    table = postroom.ok(*whatif, "--html", "page.html", COLUMNS="80").out
    assert all(len(line) <= 80 for line in table.splitlines())
    assert "dead letters" in table
    assert "actual" in table
    rows = postroom.ok(*whatif, "--json").json["rows"]
    assert [row["dead_lettered_worst"] for row in rows] == [0, 1, 1, 0, 0]
    assert rows[1]["visibility_ms"] == 5_000
    assert "visibility 60 s" in (postroom.folder / "page.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("latency", "--by", "week"), "Unknown --by 'week'; expected hour or day."),
        (("latency", "--engine", "duck"), "Unknown --engine 'duck'; expected auto, local or spark."),
        (("traffic", "--since", "12"), "--since '12' is not a time"),
        (("sla", "--within", "soon"), "'soon' is not a duration"),
        (("whatif",), "Pass at least one of --attempts, --backoff, --backoff-max and --visibility."),
        (("whatif", "--attempts", "3,,5"), "--attempts '3,,5' has an empty value"),
        (("whatif", "--attempts", "3,many"), "--attempts: 'many' is not a number of deliveries"),
        (("whatif", "--attempts", "0"), "max_attempts"),
        (("whatif", "--visibility", "soon"), "'soon' is not a duration"),
        (("run", "nowhere"), "The report nowhere can't be loaded"),
        (("run", "json"), "The report json can't be loaded"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else None,
)
def test_options_that_can_not_be_are_refused(
    postroom: Postroom, arguments: tuple[str, ...], problem: str
) -> None:
    done = postroom("report", *arguments, "--json")
    assert done.code != 0
    assert problem in done.error["message"]
