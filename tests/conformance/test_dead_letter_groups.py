"""Groups of dead letters on SQLite and PostgreSQL."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from postroom.adapters.compose.queries import open_read_models
from postroom.application.ports.dead_letters import DeadLetterGroupFilter
from postroom.application.ports.read_models import ReadModels
from postroom.domain.errors import InvalidRequest
from tests.conformance.dead_letter_groups import DeadLetterGroupsConformance
from tests.support.dead_letters import fill
from tests.support.fixtures import CreateDatabase


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dead") / "store.db"
    fill(path)
    return path


@pytest.fixture(scope="module")
def database(create_shared_database: CreateDatabase, postgres_store_template: str) -> str:
    url = create_shared_database(postgres_store_template)
    fill(url)
    return url


class TestSqliteDeadLetterGroups(DeadLetterGroupsConformance):
    @pytest.fixture
    def models(self, file: Path) -> Iterator[ReadModels]:
        with closing(open_read_models(str(file))) as opened:
            yield opened


class TestPostgresDeadLetterGroups(DeadLetterGroupsConformance):
    @pytest.fixture
    def models(self, database: str) -> Iterator[ReadModels]:
        with closing(open_read_models(database)) as opened:
            yield opened


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("by", ()),
        ("by", ("topic", "topic")),
        ("by", ("shard",)),
        ("order", "oldest"),
        ("bars", -1),
        ("bars", 201),
        ("limit", 0),
        ("since", 1 << 62),
        ("until", True),
        ("text", ""),
        ("text", "x" * 1_001),
        ("text", "\ud800"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_filter_out_of_bounds_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest):
        DeadLetterGroupFilter(**{field: value})
