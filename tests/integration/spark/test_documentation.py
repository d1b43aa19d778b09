"""The notebook of docs/examples and the first lines of docs/spark-data.md run in Spark as they stand."""

import json
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.integration.spark.streams import repeat_until_connected

ROOT = Path(__file__).parents[3]
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
