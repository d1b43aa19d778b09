"""The notebook of docs/examples and the first lines of docs/spark-data.md run in Spark as they stand."""

import json
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from postroom import NewMessage, connect
from postroom.adapters.compose.archive import build_segments, open_archive
from postroom.spark import register
from tests.integration.spark.streams import repeat_until_connected

ROOT = Path(__file__).parents[3]
PROGRAM = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
STATEMENT = re.compile(r"^```sql\n(.*?)^```", re.MULTILINE | re.DOTALL)
NOTEBOOK = ROOT / "docs" / "examples" / "notebook" / "webhooks.ipynb"
PAGE = ROOT / "docs" / "spark-data.md"


def run(code: str, names: dict[str, Any]) -> str:
    """Run a cell, and return what it prints."""

    def execute() -> str:
        with redirect_stdout(StringIO()) as printed:
            exec(code, names)
        return printed.getvalue()

    return repeat_until_connected(execute)


@pytest.mark.extended
@pytest.mark.usefixtures("spark")  # the session of this run, as `getOrCreate` returns it
def test_each_cell_of_the_notebook_prints_what_is_stored_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(NOTEBOOK.parent)
    names: dict[str, Any] = {}
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        printed = run("".join(cell["source"]), names)
        if "varies" not in cell["metadata"].get("tags", ()):
            assert printed == "".join("".join(each["text"]) for each in cell["outputs"])
    assert len(cells) >= 8
    assert not names["folder"].exists()


@pytest.mark.extended
def test_the_first_twelve_lines_of_the_page_create_a_store_and_read_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    lines = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    assert len([line for line in lines.splitlines() if line]) == 12
    store = tmp_path / "orders.db"  # Spark's processes have another working folder than this test
    with redirect_stdout(StringIO()) as printed:
        exec(lines.replace("orders.db", str(store)), {})
    counts = re.findall(r"(\w+)\| +(\d+)\|$", printed.getvalue(), re.MULTILINE)
    assert sorted(counts) == [
        ("MailboxCreated", "1"),
        ("MessageAcked", "60"),
        ("MessageReceived", "60"),
        ("MessageSent", "100"),
        ("OwnershipTaken", "1"),
        ("acked", "60"),
        ("ready", "40"),
    ]


@pytest.mark.extended
def test_the_programs_and_the_sql_of_the_pages_run(spark: SparkSession, tmp_path: Path) -> None:
    """Those of docs/spark-data.md and docs/reports.md that have no output."""
    store, archive = str(tmp_path / "orders.db"), str(tmp_path / "archive")
    with connect(store) as mailbox:
        mailbox.send_batch([NewMessage("orders", b'{"id": 7, "lines": [{"article": "book"}]}')] * 5)
        for message in mailbox.receive_messages("orders", max_messages=3):
            message.reject("no stock")
    build_segments(store, "main@local", open_archive(archive), is_whole=True)

    def read(name: str) -> str:
        page = (ROOT / "docs" / name).read_text("utf-8")
        for shown, real in (
            ("/var/lib/orders.db", store),
            ("'orders.db'", f"'{store}'"),
            ('"orders.db"', f'"{store}"'),
            ('"archive"', f'"{archive}"'),
            ('"checkpoint"', f'"{tmp_path}/checkpoint"'),
            ('"per_minute"', f'"{tmp_path}/per_minute"'),
        ):
            page = page.replace(shown, real)
        return page

    page = read("spark-data.md")
    names: dict[str, Any] = {"spark": spark}
    register(spark)
    (_, segments, stream, payloads, messages) = PROGRAM.findall(page)
    assert "rejected|    3|" in run(segments, names)
    assert "|  7|   book|" in run(payloads, names)
    exec(messages, names)
    assert names["dead"].columns
    exec(stream, names)
    for query in spark.streams.active:
        query.processAllAvailable()
        query.stop()
    spark.sql(f"CREATE DATABASE pages LOCATION '{tmp_path}/pages'")
    spark.sql("USE pages")
    try:
        rows = [
            [spark.sql(each).collect() for each in statements.split(";") if each.strip()][-1]
            for statements in STATEMENT.findall(page)
        ]
    finally:
        spark.sql("USE default")
        spark.sql("DROP DATABASE pages CASCADE")
        spark.catalog.dropTempView("events")
    assert rows == [[("orders", 5)], [("rejected", 3)]]

    (frames,) = (each for each in PROGRAM.findall(read("reports.md")) if "report_frame" in each)
    exec(frames, names)
    assert {each: names[each].count() > 0 for each in ("latency", "sla", "whatif")}
