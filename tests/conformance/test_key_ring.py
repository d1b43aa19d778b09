"""The key ring conformance suite on every adapter, and what is particular to the file."""

import os
from pathlib import Path

import pytest

from postroom.adapters.compose.access import open_key_ring
from postroom.adapters.key_rings import FileKeyRing, MemoryKeyRing
from postroom.domain.errors import InvalidRequest, Unavailable
from tests.conformance.key_ring import KeyRingConformance, key


class TestMemoryKeyRing(KeyRingConformance):
    @pytest.fixture
    def keys(self) -> MemoryKeyRing:
        return MemoryKeyRing()


class TestFileKeyRing(KeyRingConformance):
    @pytest.fixture
    def keys(self, tmp_path: Path) -> FileKeyRing:
        return FileKeyRing(tmp_path / "orders.db.keys")


def test_the_keys_of_a_file_store_are_beside_it(tmp_path: Path) -> None:
    open_key_ring(str(tmp_path / "orders.db")).rotate(key(1), 0)
    assert [each.name for each in tmp_path.iterdir()] == ["orders.db.keys"]
    with pytest.raises(InvalidRequest, match="key file is missing"):
        open_key_ring("postgresql://localhost/orders")


def test_all_names_of_a_store_have_the_same_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "orders.db").touch()
    (tmp_path / "folder" / "link.db").symlink_to(tmp_path / "orders.db")
    monkeypatch.chdir(tmp_path)
    relative = open_key_ring("orders.db")
    relative.rotate(key(1), 0)
    monkeypatch.chdir(tmp_path / "folder")
    for keys in (relative, open_key_ring("link.db"), open_key_ring("link.db", "../orders.db.keys")):
        assert list(keys.root_keys()) == [key(1)]


def test_a_key_file_is_read_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    umask = os.umask(0)
    try:
        FileKeyRing(path).rotate(key(1), 0)
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o7777 == 0o600
    for mode in (0o640, 0o604, 0o660, 0o620):
        path.chmod(mode)
        for use in (FileKeyRing(path).root_keys, lambda: FileKeyRing(path).rotate(key(2), 0)):
            with pytest.raises(InvalidRequest, match="chmod 600"):
                use()
    path.chmod(0o400)
    assert list(FileKeyRing(path).root_keys()) == [key(1)]


def test_a_rotation_elsewhere_is_noticed(tmp_path: Path) -> None:
    reader, other = FileKeyRing(tmp_path / "keys"), FileKeyRing(tmp_path / "keys")
    other.rotate(key(1), 0)
    assert [each.id for each in reader.root_keys()] == [key(1).id]
    other.rotate(key(2), 9_000)
    assert [each.id for each in reader.root_keys()] == [key(1).id, key(2).id]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "not json",
        '{"version":1,"keys":[]}',
        '{"version":2,"keys":[{"id":"0101010101010101","secret":"SECRET","created_at":1,"retire_at":null}]}',
        '{"version":1,"keys":[{"id":"01","secret":"SECRET","created_at":1,"retire_at":null}]}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:20] or "empty",
)
def test_a_malformed_key_file_is_refused_without_its_content(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    secret = "65" * 32
    path.write_text(text.replace("SECRET", secret))
    path.chmod(0o600)
    for use in (FileKeyRing(path).root_keys, lambda: FileKeyRing(path).rotate(key(2), 0)):
        with pytest.raises(InvalidRequest, match="malformed") as error:
            use()
        assert secret not in str(error.value)
        assert error.value.__cause__ is None
    assert path.read_text() == text.replace("SECRET", secret)


def test_a_key_file_that_cannot_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        FileKeyRing(tmp_path / "missing" / "keys").rotate(key(1), 0)
    (tmp_path / "folder").mkdir()
    with pytest.raises(InvalidRequest, match="not a file"):
        FileKeyRing(tmp_path / "folder").root_keys()
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]
