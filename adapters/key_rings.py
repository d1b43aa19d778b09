"""The key ring port over a file, and in memory."""

import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from threading import Lock

import msgspec

from postroom.application.access.authority import rotate_keys
from postroom.domain.capability.token import RootKey
from postroom.domain.errors import InvalidRequest, Unavailable

MODE = 0o600
OTHERS = 0o077
MAX_BYTES = 1 << 20
SUFFIX = ".keys"
"""Suffix of the key file of a SQLite file."""


class _Key(msgspec.Struct, forbid_unknown_fields=True):
    """A key as it is stored; binary values in hexadecimal."""

    id: str
    secret: str
    created_at: int
    retire_at: int | None


class _Keys(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    keys: list[_Key]


class FileKeyRing:
    """Key ring in a JSON file of mode 0600; see `KeyRing`.

    Arguments:
        path: path of the file; the first `rotate` creates it.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._lock = Lock()
        self._read: tuple[tuple[int, ...], list[RootKey]] | None = None
        """The version of the file that was read last, and its keys."""

    def __repr__(self) -> str:
        return f"FileKeyRing({str(self._path)!r})"

    def root_keys(self) -> Sequence[RootKey]:
        """Return the keys, read again when the file has changed; see `KeyRing.root_keys`."""
        with self._lock, self._errors():
            return list(self._load())

    def rotate(self, key: RootKey, retire_at: int) -> None:
        """Replace the file by one with the new key; see `KeyRing.rotate`."""
        with self._lock, self._errors(), _locked(self._path.parent) as folder:
            self._store(rotate_keys(self._load(), key, retire_at), folder)

    def _load(self) -> list[RootKey]:
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return []
        try:
            status = os.fstat(descriptor)
            self._check(status)
            version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            if self._read is None or self._read[0] != version:
                with open(descriptor, "rb", closefd=False) as file:
                    self._read = (version, self._parse(file.read(MAX_BYTES)))
            return self._read[1]
        finally:
            os.close(descriptor)

    def _check(self, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise InvalidRequest(f"The key file {self._path} is not a file; name another path.")
        mode = status.st_mode & 0o7777
        if mode & OTHERS:
            raise InvalidRequest(
                f"Others may use the key file {self._path}, whose mode is {mode:04o}; run chmod 600 on it, "
                "and rotate the keys if somebody may have read them."
            )
        if status.st_uid not in (os.geteuid(), 0):
            raise InvalidRequest(
                f"The key file {self._path} belongs to another user; make the user of this process its owner."
            )

    def _parse(self, data: bytes) -> list[RootKey]:
        try:
            stored = msgspec.json.decode(data, type=_Keys)
            keys = [
                RootKey(bytes.fromhex(each.id), bytes.fromhex(each.secret), each.created_at, each.retire_at)
                for each in stored.keys
            ]
            if stored.version == 1 and keys:
                return [key.validate() for key in keys]
        except (msgspec.MsgspecError, ValueError, RecursionError, InvalidRequest):
            pass  # the error's text may quote the secret
        raise InvalidRequest(f"The key file {self._path} is malformed; restore a copy of it.")

    def _store(self, keys: Sequence[RootKey], folder: int) -> None:
        stored = _Keys(
            1, [_Key(key.id.hex(), key.secret.hex(), key.created_at, key.retire_at) for key in keys]
        )
        temporary = f".{self._path.name}.{token_hex(8)}"
        descriptor = os.open(
            temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, MODE, dir_fd=folder
        )
        try:
            with open(descriptor, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(stored)) + b"\n")
                file.flush()
                os.fsync(descriptor)
            os.rename(temporary, self._path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            raise
        os.fsync(folder)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Unavailable(
                f"The key file {self._path} can't be used: {error.strerror}. Check the path and permissions."
            ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Lock a folder against other processes that rotate keys in it; yield its descriptor."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # released when the descriptor is closed
        yield descriptor
    finally:
        os.close(descriptor)


class MemoryKeyRing:
    """A key ring that is lost at the end of the process; see `KeyRing`."""

    def __init__(self) -> None:
        self._keys: list[RootKey] = []

    def root_keys(self) -> Sequence[RootKey]:
        """Return the keys; see `KeyRing.root_keys`."""
        return list(self._keys)

    def rotate(self, key: RootKey, retire_at: int) -> None:
        """Add the key that signs from now on; see `KeyRing.rotate`."""
        self._keys = rotate_keys(self._keys, key, retire_at)
