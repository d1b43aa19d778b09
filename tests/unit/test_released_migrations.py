"""Released migrations are never edited: databases that have them would be refused, or differ."""

from hashlib import sha256
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("released_migrations.sha256")
RELEASED = {path: hash_ for hash_, path in (line.split("  ") for line in LIST.read_text().splitlines())}
"""Hashes by path, as `sha256sum` writes and checks them from the root of the repository."""


@pytest.mark.parametrize("path", sorted(RELEASED))
def test_a_released_migration_is_not_edited(path: str) -> None:
    assert sha256((ROOT / path).read_bytes()).hexdigest() == RELEASED[path], "Add another migration instead."


def test_every_migration_is_in_the_list() -> None:
    files = {str(file.relative_to(ROOT)) for file in ROOT.glob("adapters/*/migrations/*/*.sql")}
    assert files == set(RELEASED), f"Run: sha256sum adapters/*/migrations/*/*.sql > {LIST.relative_to(ROOT)}"
