"""The read models conformance suites on chdb, and what only ClickHouse can promise."""

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from postroom.adapters.compose.queries import open_read_models
from postroom.application.ports.read_models import ReadModels
from postroom.projections.projection import Row
from tests.conformance.dead_letter_groups import DeadLetterGroupsConformance
from tests.conformance.read_models import BODIES, TOLD, Build, ReadModelsConformance, SendOne
from tests.conformance.read_models_activity import ActivityConformance
from tests.conformance.search_statistics import SearchStatisticsConformance
from tests.conformance.test_read_models_activity import fill as fill_activity
from tests.projections import histories
from tests.projections.histories import STORY, VARIED, Receive, Send, build_without_spark, live, reference
from tests.support.chdb import OpenFolder, open_folder
from tests.support.dead_letters import fill as fill_dead_letters
from tests.support.own_process import IS_OWN_PROCESS, run_own_process
from tests.support.stores import copy_store

if not IS_OWN_PROCESS:

    @pytest.mark.extended
    def test_chdb_does_what_the_suites_say() -> None:
        run_own_process(__file__)

else:

    @pytest.fixture(scope="module", autouse=True)
    def folder_of_chdb() -> Iterator[OpenFolder]:
        with open_folder() as opened:
            yield opened

    @pytest.fixture(scope="module")
    def past(tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A store with a past and read models in chdb, to be copied and left alone."""
        store = tmp_path_factory.mktemp("past") / "store.db"
        live(store, "box0@test", [*STORY, *VARIED, *map(Send, TOLD), Receive("shop")])
        live(store, "box1@test", [*STORY, *VARIED])
        build_without_spark(store, BODIES, into=into(store))
        return store

    @pytest.fixture
    def store(request: pytest.FixtureRequest, past: Path, tmp_path: Path, folder_of_chdb: OpenFolder) -> Path:
        if not {"send", "build"} & {*request.fixturenames}:
            return past  # the test only reads
        folder_of_chdb.close()
        copied = copy_store(past, tmp_path)
        shutil.copytree(folder(past), folder(copied), symlinks=True)
        return copied

    @pytest.fixture
    def models(store: Path) -> Iterator[ReadModels]:
        with closing(open_read_models(str(store), into(store))) as opened:
            yield opened

    @pytest.fixture
    def build(store: Path) -> Build:
        return lambda: build_without_spark(store, BODIES, into=into(store))

    @pytest.fixture
    def send(store: Path) -> SendOne:
        return lambda message: histories.send(store, "box0@test", [message])

    class TestReadModels(ReadModelsConformance, SearchStatisticsConformance):
        pass

    @pytest.fixture(scope="module")
    def dead_letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
        path = tmp_path_factory.mktemp("dead") / "store.db"
        fill_dead_letters(path)
        build_without_spark(path, into=into(path))
        return path

    class TestDeadLetterGroups(DeadLetterGroupsConformance):
        @pytest.fixture
        def models(self, dead_letters: Path) -> Iterator[ReadModels]:
            with closing(open_read_models(str(dead_letters), into(dead_letters))) as opened:
                yield opened

    @pytest.fixture(scope="module")
    def activity(tmp_path_factory: pytest.TempPathFactory) -> Path:
        path = tmp_path_factory.mktemp("activity") / "store.db"
        fill_activity(path)
        build_without_spark(path, into=into(path))
        return path

    class TestActivity(ActivityConformance):
        @pytest.fixture
        def models(self, activity: Path) -> Iterator[ReadModels]:
            with closing(open_read_models(str(activity), into(activity))) as opened:
                yield opened

        @pytest.fixture
        def rows(self, activity: Path) -> list[Row]:
            return reference(activity).rows["activity"]


def folder(store: Path) -> Path:
    """Return the folder of a store's read models in chdb."""
    return store.with_name("models")


def into(store: Path) -> str:
    """Return the address of a store's read models in chdb."""
    return f"chdb:{folder(store)}"
