"""A rebuild whose driver is killed at any step is finished by the next one, as if nothing had happened."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from postroom.projections.rebuild import RebuildReport
from tests.conformance.read_model_store import MAILBOX, fill, rows
from tests.conformance.test_read_model_store import all_tables, rest
from tests.projections.histories import VARIED, Store, live, model_store, rebuild, reference
from tests.support.fixtures import OpenReadModels

POSITIONS, POSITIONS_PER_BUCKET = 40, 60
DRIVER = f"""
import os, signal, sys
from postroom.adapters.compose.projections import rebuild_projections
from postroom.projections import plan
from postroom.projections.spark import session
plan.POSITIONS = ({POSITIONS}, {POSITIONS})
plan.POSITIONS_PER_BUCKET = {POSITIONS_PER_BUCKET}
from tests.projections.local_runner import LocalRunner

store, phase, unit, done, is_on_spark = sys.argv[1:]
# So that nothing is loaded before all is folded, or else that no part goes unseen.
session.POLL_SECONDS = 60 if phase == "load" else 0.01

def die_at(at):
    if (at.phase, unit) in ((phase, at.unit), (phase, "")) and at.done >= int(done):
        os.kill(os.getpid(), signal.SIGKILL)

rebuild_projections(
    store, progress=die_at, engine="spark", runner=None if int(is_on_spark) else LocalRunner()
)
os.kill(os.getpid(), signal.SIGKILL)
"""
STEPS = {
    "before it begins": ("start", "", 0),
    "when it has begun": ("fold", "events", 0),
    "between parts": ("fold", "events", 1),
    "when all parts are folded": ("fold", "buckets", 0),
    "between buckets": ("fold", "buckets", 1),
    "when all is folded": ("load", "parts", 0),
    "while parts are loaded": ("load", "parts", 1),
    "when all is loaded": ("index", "indexes", 0),
    "between indexes": ("index", "indexes", 5),
    "before the flip": ("flip", "", 0),
    "after the flip": ("never", "", 0),
}
# While its tasks run, Spark's processes outlive the driver; at the other steps there are none, and a driver
# without Spark dies as well.
ON_SPARK = {"between parts", "between buckets", "while parts are loaded"}
# In PostgreSQL tasks load the parts. Steps at which the same is resumed are tried once, in one of the stores.
IN_POSTGRES = [
    "when it has begun",
    "between parts",
    "between buckets",
    "when all is folded",
    "between indexes",
    "before the flip",
    "after the flip",
]
IN_SQLITE = ["before it begins", "while parts are loaded", "when all is loaded", "before the flip"]

pytestmark = [pytest.mark.extended, pytest.mark.usefixtures("spark", "small_parts")]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts as small as those of the driver that is killed."""
    monkeypatch.setattr("postroom.projections.plan.POSITIONS", (POSITIONS, POSITIONS))
    monkeypatch.setattr("postroom.projections.plan.POSITIONS_PER_BUCKET", POSITIONS_PER_BUCKET)


@pytest.mark.parametrize("step", IN_POSTGRES)
def test_a_rebuild_killed_in_postgresql_is_finished_by_the_next_one(
    postgres_store: str, read_models: OpenReadModels, step: str
) -> None:
    assert_finished(postgres_store, read_models, step)


@pytest.mark.parametrize("step", IN_SQLITE)
def test_a_rebuild_killed_in_sqlite_is_finished_by_the_next_one(
    tmp_path: Path, read_models: OpenReadModels, step: str
) -> None:
    assert_finished(tmp_path / "store.db", read_models, step)


def assert_finished(store: Store, read_models: OpenReadModels, step: str) -> None:
    fill(store)
    before = reference(store).rows
    kill_at(store, step)
    if step == "after the flip":
        assert rows(model_store(store)) == before
    else:
        assert model_store(store).active_version() is None
    live(store, MAILBOX, VARIED)  # the log grows before somebody looks after it
    report = rebuild(store)
    assert rows(model_store(store)) == reference(store).rows
    assert_resumed(report, step)
    shown = read_models(store).status().versions
    assert [each.status for each in shown] == ["active", "retired"][: len(shown)]
    assert rest(store) == []
    kept = {f"_v{each.version}" for each in shown}
    assert {name for name in all_tables(store) if "_v" in name and not name.endswith(tuple(kept))} <= shadows(
        store
    )


def kill_at(store: Store, step: str) -> None:
    """Run a rebuild in a process of its own, and kill it."""
    killed = subprocess.run(
        [sys.executable, "-c", DRIVER, str(store), *map(str, STEPS[step]), str(int(step in ON_SPARK))],
        env={**os.environ, "PYSPARK_SUBMIT_ARGS": "--master local[1] pyspark-shell"},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL


def assert_resumed(report: RebuildReport, step: str) -> None:
    """See that no part was done again that had been done."""
    order = list(STEPS)
    if step == "after the flip":
        assert (report.version, report.resumed) == (2, 0)
    elif order.index(step) >= order.index("when all parts are folded"):
        assert (report.version, report.resumed) == (1, report.parts)
    elif step == "between parts":
        assert report.version == 1
        assert 0 < report.resumed <= report.parts
    else:
        assert (report.version, report.resumed) == (1, 0)


def shadows(store: Store) -> set[str]:
    """Return the tables that SQLite keeps for indexes of text."""
    return {name for name in all_tables(store) if "_index_v" in name}
