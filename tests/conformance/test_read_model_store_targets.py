"""The sink conformance suite on what read models are built into for others to read."""

import json
import os
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from postroom.adapters.compose.queries import open_read_models
from postroom.adapters.sql.versions import Versions
from postroom.application.messages import NewMessage
from postroom.domain.errors import InvalidRequest, Unavailable
from postroom.projections.projection import load_projections
from tests.conformance.read_model_store import MAILBOX, OpenStore, ReadModelStoreConformance, fill
from tests.projections.histories import (
    Store,
    begin,
    finish,
    fold_all,
    model_target,
    reference,
    send,
)
from tests.support.stores import copy_store


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a past, to be copied and left alone."""
    path = tmp_path_factory.mktemp("past") / "store.db"
    fill(path)
    return path


@pytest.fixture
def store(past: Path, tmp_path: Path) -> Store:
    return copy_store(past, tmp_path)


@pytest.fixture
def into(tmp_path: Path) -> str:
    return f"parquet:{tmp_path / 'models'}"


@pytest.fixture
def open_models(store: Store, into: str) -> OpenStore:
    return lambda: model_target(into)


class TestTargets(ReadModelStoreConformance):
    pass


def test_a_pointer_names_the_files_of_what_is_served(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    pointer: dict[str, Any] = {}
    for version in (1, 2):
        build(store, f"parquet:{folder}")
        pointer = json.loads((folder / "_served.json").read_text())
        assert pointer == {
            "version": version,
            "tables": {name: f"{name}_v{version}" for name in load_projections()},
        }
    for name, expected in reference(store).rows.items():
        found = pl.read_parquet(folder / pointer["tables"][name] / "*.parquet")
        found = found.drop("envelope_blob", strict=False).sort(load_projections()[name].key)
        assert found.to_dicts() == expected
    build(store, f"parquet:{folder}")
    assert sorted(each.name for each in folder.glob("mailbox_v*")) == ["mailbox_v2", "mailbox_v3"]
    assert not [each for each in folder.iterdir() if "staging-v" in each.name]


def test_folders_of_others_in_the_folder_of_a_target_are_kept(
    store: Store, into: str, tmp_path: Path
) -> None:
    others = [tmp_path / "models" / f"orders_v{number}" / "part.parquet" for number in (1, 2)]
    for each in others:
        each.parent.mkdir(parents=True)
        each.touch()
    for _ in range(3):
        build(store, into)
    assert all(each.exists() for each in others)


def test_a_version_that_a_kill_left_unpublished_is_published_by_the_next_rebuild(
    store: Store, into: str, tmp_path: Path
) -> None:
    pointer = tmp_path / "models" / "_served.json"
    with begin(store, into=model_target(into)) as killed:
        fold_all(store, killed)
        killed.load(lambda done, total: None)
        killed.merge()
        killed.index(lambda done, total: None)
        # As if the process ended between the flip and what readers see of it.
        Versions(killed._versions.database).flip(killed.version, killed.plan, {}, {})  # type: ignore[attr-defined]
    assert not pointer.exists()
    with begin(store, into=model_target(into)):
        assert json.loads(pointer.read_text())["version"] == killed.version


@pytest.mark.parametrize("into", ["parquet:", "csv:x", "delta:models", "clickhouse:", "chdb:/", "nonsense"])
def test_what_is_no_target_is_refused(store: Store, into: str) -> None:
    with pytest.raises(InvalidRequest, match="name parquet:FOLDER, chdb:FOLDER"):
        model_target(into)


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("clickhouse://host:99999/x", "malformed: Port out of range"),
        ("clickhouse://[::1", "malformed: Invalid IPv6"),
        ("clickhouse:///x", "names no host"),
        ("chdb:a\0b", "must not contain"),
        ("chdb:\udcff", "address"),
        ("parquet:x", r"parquet:\.\.\. can't be queried"),
        (5, "address must be"),
    ],
)
def test_an_address_of_clickhouse_that_is_malformed_is_refused(
    store: Store, address: Any, problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        open_read_models(str(store), address)


def test_a_target_that_can_not_be_used_says_why_and_no_password(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match=r"file/deeper can't be used: Not a directory"):
        build(store, f"parquet:{tmp_path / 'file' / 'deeper'}")
    with pytest.raises(Unavailable, match=r"clickhouse://127\.0\.0\.1:1/db can't be used") as refused:
        build(store, "clickhouse://me:open-sesame@127.0.0.1:1/db")
    assert "open-sesame" not in str(refused.value)


def test_a_second_rebuild_into_a_target_is_refused_while_one_runs(store: Store, into: str) -> None:
    with (
        begin(store, into=model_target(into)),
        pytest.raises(Unavailable, match=f"being rebuilt by process {os.getpid()}"),
        begin(store, into=model_target(into)),
    ):
        pass


def test_what_differs_from_the_version_before_is_told(store: Store, into: str) -> None:
    build(store, into)
    with begin(store, into=model_target(into)) as same:
        fold_all(store, same)
        same.merge()
        assert same.differences() == []
    send(
        store, MAILBOX, [NewMessage(topic="later", payload=b"")]
    )  # and one that was delayed comes to be ready
    with begin(store, into=model_target(into), restart=True) as other:
        fold_all(store, other)
        other.merge()
        told = other.differences()
    assert any(
        each.startswith("mailbox: 1 added, 0 removed and")
        and "changed since version 1; the first row has" in each
        for each in told
    )


def build(store: Store, into: str) -> None:
    with begin(store, into=model_target(into), restart=True) as version:
        fold_all(store, version)
        finish(version)
