"""What docs/projections.md says of the projections is so, and the one that it adds works."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from postroom.projections.projection import MODULES, Projection, Row, load_projections
from tests.projections.histories import STORY, build_without_spark, live, model_store, reference

DOCUMENTATION = (Path(__file__).parents[2] / "docs/projections.md").read_text()
_COLUMN = re.compile(r"^\| `(\w+)`(\*?) \| (\w+) \| ?(.*) \|$", re.MULTILINE)


def sections() -> dict[str, str]:
    """Return what is said of each projection."""
    built_in = DOCUMENTATION.split("## Adding a projection")[0]
    return dict(re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", built_in, re.MULTILINE | re.DOTALL))


def retries(record: Row) -> Iterator[Row]:
    """Yield the row of the documented projection for a row of the log."""
    if record["event"] == "MessageRequeued":
        yield {name: record[name] for name in ("mailbox", "topic")} | {"retries": 1, "last_at": record["at"]}


def test_every_projection_has_its_section() -> None:
    assert sorted(sections()) == sorted(load_projections())


@pytest.mark.parametrize("projection", load_projections().values(), ids=load_projections())
def test_every_column_is_documented_as_it_is(projection: Projection) -> None:
    documented = _COLUMN.findall(sections()[projection.name])
    assert [(name, type_, star == "*") for name, star, type_, _ in documented] == [
        (column.name, column.type, column.is_required) for column in projection.columns
    ]
    if projection.name in ("backlog", "activity"):
        merges = [re.split(r"\W", what)[0] for *_, what in documented]
        assert merges == [column.merge for column in projection.columns]


def test_the_projection_that_is_added_there_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENTATION, re.DOTALL)
    (tmp_path / "our_retries.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(MODULES, "our_retries")
    store = tmp_path / "store.db"
    live(store, "main@test", STORY)
    build_without_spark(store)
    served = [row for frame in model_store(store).rows("retries") for row in frame.to_dicts()]
    assert served == reference(store, of_records={"retries": retries}).rows["retries"]
    assert sum(row["retries"] for row in served) > 1
    sys.modules.pop("our_retries")
