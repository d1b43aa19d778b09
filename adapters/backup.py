"""The folder of a backup, which gets its name only when it is complete."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

from blake3 import blake3

from postroom.adapters.files import sync
from postroom.application.backup.manifest import BackupFile, Manifest, decode_manifest, encode_manifest
from postroom.domain.errors import IntegrityFailure, InvalidRequest, NotFound, Unavailable

MANIFEST = "manifest.json"
STORE = "store.db"
UNFINISHED = ".unfinished"
_CHUNK_BYTES = 8 << 20


@contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder, mode 0700, beside `target`; it is removed at the end, if it is still there.

    Folders that killed processes left for the same target are removed, too.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for each in target.parent.iterdir():
        if each.name.startswith(f".{target.name}.") and each.suffix == UNFINISHED:
            with suppress(OSError), _locked(each):
                shutil.rmtree(each)
    folder = Path(mkdtemp(UNFINISHED, f".{target.name}.", target.parent))
    try:
        with _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def new_backup(target: Path) -> Iterator[Path]:
    """Yield an empty folder, which `complete` renames to `target`; it is removed on an error.

    Raises: InvalidRequest when the target exists, Unavailable when it can't be written.
    """
    target = target.absolute()
    with writing(target):
        check_new(target)
        with temporary_folder(target) as folder:
            yield folder


def complete(folder: Path, target: Path, manifest: Manifest) -> None:
    """Sync the files of a new backup, add its manifest, and rename it to `target`."""
    target = target.absolute()
    with writing(target):
        path = folder / MANIFEST
        path.touch(0o600)
        path.write_bytes(encode_manifest(manifest))
        for path in (*folder.iterdir(), folder):
            sync(path)
        check_new(target)
        folder.rename(target)  # fails if another process created a backup there meanwhile
        sync(target.parent)


def check_new(target: Path) -> None:
    """Raise InvalidRequest unless `target` does not exist or is an empty folder."""
    if target.is_dir() and not any(target.iterdir()):
        return
    if os.path.lexists(target):
        raise InvalidRequest(
            f"{target} exists already; name a folder for the backup that does not exist yet."
        )


def describe_files(folder: Path) -> list[BackupFile]:
    """Return the files of a new backup with their hashes."""
    with writing(folder):
        return [BackupFile(path.name, path.stat().st_size, _hash(path)) for path in sorted(folder.iterdir())]


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a backup, verified.

    Raises: NotFound when there is no backup, IntegrityFailure when the manifest was altered.
    """
    try:
        text = (folder / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(
            f"There is no backup at {folder}: it has no {MANIFEST}. Name a folder that "
            "`postroom backup` wrote."
        ) from error
    except OSError as error:
        raise _unreadable(folder, error) from error
    return decode_manifest(text, str(folder))


def check_files(backup: Path, manifest: Manifest, copies: Path | None = None) -> None:
    """Compare the files of a backup with the hashes in its manifest.

    Arguments:
        copies: folder with copies of the files, which are read instead.

    Raises: IntegrityFailure when one is missing or was altered, Unavailable when one can't be read.
    """
    for file in manifest.files:
        path, read = backup / file.name, (copies or backup) / file.name
        try:
            is_intact = read.stat().st_size == file.bytes and _hash(read) == file.blake3
        except FileNotFoundError as error:
            raise _missing(path) from error
        except OSError as error:
            raise _unreadable(backup, error) from error
        if not is_intact:
            raise IntegrityFailure(f"The file {path} was altered; use another backup.")


def copy_from(backup: Path, name: str, target: Path) -> None:
    """Copy a file of a backup to a new file with mode 0600.

    Raises: IntegrityFailure when it is missing, Unavailable when it can't be read.
    """
    path = backup / name
    try:
        source = path.open("rb")
    except FileNotFoundError as error:
        raise _missing(path) from error
    except OSError as error:
        raise _unreadable(backup, error) from error
    with source:
        target.touch(0o600)
        with target.open("wb") as copy:
            shutil.copyfileobj(source, copy, _CHUNK_BYTES)


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Raise Unavailable in place of an OSError: nothing has changed at `target`."""
    try:
        yield
    except OSError as error:
        raise Unavailable(
            f"{target} can't be written: {error.strerror or error}. Check that its folder is writable and "
            "the disk has space. Nothing was changed."
        ) from error


def _hash(path: Path) -> str:
    hasher = blake3()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()


def _missing(path: Path) -> IntegrityFailure:
    return IntegrityFailure(f"The file {path} is missing; use another backup.")


def _unreadable(folder: Path, error: OSError) -> Unavailable:
    return Unavailable(
        f"The backup {folder} can't be read: {error.strerror or error}. Check its permissions."
    )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder that is in use; raise BlockingIOError when another process has locked it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
