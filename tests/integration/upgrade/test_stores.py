"""Stores of the last release are upgraded with all that they hold; it refuses those of this version."""

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from postroom.adapters.compose.store import open_store
from postroom.adapters.postgres.migrate import migrate
from postroom.application.queries.verify import VerifyLog
from tests.integration.upgrade.conftest import WORKS, Refused, Version, outcome, refused
from tests.integration.upgrade.program import ORDERS

MAILBOX = "main@local"
USED = {"settled": [], "new": [], "result": "42", "redriven": 1, "altered": []}


def verify(store: str) -> None:
    """Compute every hash of the log again."""
    with closing(open_store(store).existing_log(MAILBOX)) as log:
        assert VerifyLog(log)().last > 0


def lost(before: Any, after: Any) -> Any:
    """Return what a version reads otherwise than the one that wrote it; what it adds is left out."""
    if isinstance(before, dict) and isinstance(after, dict):
        parts = {name: lost(value, after.get(name)) for name, value in before.items()}
        return {name: each for name, each in parts.items() if each} or None
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [each for each in map(lost, before, after) if each] or None
    return None if before == after else (before, after)


def check_upgrade(store: str, written: dict[str, Any], former: Version, present: Version) -> None:
    """Check that this version reads and uses all that the last release wrote."""
    verify(store)
    read = present.run("read", store)
    assert lost({name: each for name, each in written.items() if name in read}, read) is None
    assert len(read["messages"]) == len(ORDERS) + 7
    assert all(each["intact"] and each["history"] for each in read["messages"])
    used = present.run("use", store, written)
    assert used.items() >= USED.items()
    assert used["acked"] == len(used["received"]) == len(set(used["received"])) > 7
    verify(store)


def test_a_sqlite_store_is_upgraded_with_all_that_it_holds(
    former: Version, present: Version, tmp_path: Path
) -> None:
    store = tmp_path / "shop.db"
    written = former.run("write", store)
    before = store.read_bytes()
    verify(str(store))
    assert store.read_bytes() == before  # reading migrates nothing
    check_upgrade(str(store), written, former, present)
    assert outcome("SQLite store", "wrote it", "opens it") == WORKS
    with pytest.raises(Refused) as error:
        former.run("read", store)
    assert outcome("SQLite store", "opens it", "wrote it") == refused(error.value, store)
    code, printed = former.command("--store", store, "verify")
    assert (code, refused(printed, store)) == (2, refused(error.value, store))
    back = tmp_path / "back.db"
    shutil.copy(f"{store}-format-3", back)
    assert lost(written["messages"], former.run("read", back)["messages"]) is None
    assert outcome("copy `STORE-format-3`", "opens it", "made it") == WORKS


def test_a_postgresql_store_is_upgraded_by_migrate(
    former: Version, present: Version, empty_database: str
) -> None:
    store = empty_database
    assert former.command("migrate", "--store", store)[0] == 0
    written = former.run("write", store)
    with pytest.raises(Refused) as error:
        present.run("read", store)
    assert outcome("PostgreSQL store", "migrated it", "opens it") == refused(error.value, shown(store))
    migrate(store, "store")
    check_upgrade(store, written, former, present)
    assert outcome("PostgreSQL store", "wrote it", "migrates and opens it") == WORKS
    with pytest.raises(Refused) as error:
        former.run("read", store)
    assert outcome("PostgreSQL store", "opens it", "migrated it") == refused(error.value, shown(store))
    code, printed = former.command("migrate", "--store", store)
    assert (code, refused(printed, shown(store))) == (2, refused(error.value, shown(store)))


def shown(url: str) -> str:
    """Return a URL as messages have it, without what follows the path."""
    return url.partition("?")[0]
