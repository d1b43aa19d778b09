"""The read model store conformance suite on chdb."""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import clickhouse_connect
import pytest

from tests.conformance.read_model_store import OpenStore, ReadModelStoreConformance, fill
from tests.projections.histories import Store, begin, finish, fold_all, model_target, reference
from tests.support.chdb import OpenFolder, open_folder
from tests.support.own_process import IS_OWN_PROCESS, run_own_process
from tests.support.stores import copy_store

if not IS_OWN_PROCESS:

    @pytest.mark.extended
    def test_chdb_does_what_the_suite_says() -> None:
        run_own_process(__file__)

else:

    @pytest.fixture(scope="module")
    def past(tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A store with a past, to be copied and left alone."""
        path = tmp_path_factory.mktemp("past") / "store.db"
        fill(path)
        return path

    @pytest.fixture(scope="module", autouse=True)
    def folder_of_chdb() -> Iterator[OpenFolder]:
        with open_folder() as opened:
            yield opened

    @pytest.fixture
    def store(past: Path, tmp_path: Path) -> Store:
        return copy_store(past, tmp_path)

    @pytest.fixture
    def into(tmp_path: Path) -> str:
        return f"chdb:{tmp_path / 'models'}"

    @pytest.fixture
    def open_models(store: Store, into: str) -> OpenStore:
        return lambda: model_target(into)

    class TestChdb(ReadModelStoreConformance):
        pass

    def test_clickhouse_readers_see_views_of_tables_by_topic_and_month(
        store: Store, into: str, tmp_path: Path
    ) -> None:
        for _ in range(2):
            with begin(store, into=model_target(into), restart=True) as version:
                fold_all(store, version)
                finish(version)
        path = str(tmp_path / "models")
        with closing(clickhouse_connect.get_client(interface="chdb", path=path)) as client:
            rows = reference(store).rows
            for name, expected in rows.items():
                assert client.command(f"SELECT count() FROM postroom.{name}") == len(expected)
            topics = client.query("SELECT topic, count() FROM postroom.mailbox GROUP BY topic").result_rows
            assert {row[0]: row[1] for row in topics} == Counter(row["topic"] for row in rows["mailbox"])
            found = client.query(
                "SELECT sorting_key, partition_key FROM system.tables WHERE name = 'mailbox_v2'"
            ).result_rows
            assert found[0][0] == "topic, timestamp, id"
            assert found[0][1].startswith("toYYYYMM")
