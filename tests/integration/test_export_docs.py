"""What docs/export.md shows works."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from postroom.adapters.compose.export import Format, export_messages
from postroom.application.messages import NewMessage
from postroom.domain.search import EventFilter
from tests.projections import histories

TOPICS = ["007", "a/b:c=%2F", "Ünïcode.ÄRGER", "shop", "shop"]
PAGE = (Path(__file__).parents[2] / "docs" / "export.md").read_text("utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    store = folder / "store.db"
    histories.send(store, "main@test", [NewMessage(topic=topic, payload=b"") for topic in TOPICS])
    histories.build_without_spark(store)
    names: dict[Format, str] = {"parquet": "messages.parquet", "json": "messages.json"}
    for format_, name in names.items():
        export_messages(str(store), EventFilter(), format_, folder / name)
    return folder


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.split()[1])
def test_every_message_of_an_export_is_read_with_its_topic(
    folder: Path, example: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if "pyspark" in example:
        request.getfixturevalue("spark")
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(example.replace('"messages.parquet"', f'"{folder}/messages.parquet"'), names)
    rows = names["rows"]
    topics = rows["topic"].to_list() if hasattr(rows, "columns") else [row["topic"] for row in rows]
    assert Counter(topics) == Counter(TOPICS)
    if "PARTITION_BY" in example:
        assert len(list(folder.glob("messages/day=*/topic=*/data_0.parquet"))) == len(set(TOPICS))


def test_the_page_shows_how_four_tools_read_exports() -> None:
    assert len(EXAMPLES) == 4
