"""The folder of an export, which becomes visible only when it is complete."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

import msgspec

from postroom.adapters.files.durable import sync
from postroom.application.ports.export import ExportSource
from postroom.domain.errors import InvalidRequest, Unavailable

SUCCESS = "_SUCCESS"
"""Marker file of a complete folder, as Hadoop and Spark write it; ours contains the `Manifest`."""
UNFINISHED, REPLACED = ".unfinished", ".replaced"


class Manifest(msgspec.Struct, frozen=True):
    """The content of an export's `_SUCCESS` file, as JSON (RFC 8259)."""

    postroom_export: str
    source: ExportSource
    files: int
    bytes: int


@contextmanager
def whole_folder(target: Path, kind: str, overwrite: bool) -> Iterator[Path]:
    """Yield an empty folder that is renamed to `target` when the context ends, and removed on an error.

    Its mode is 0700, and its files have the mode 0600. Incomplete folders of killed processes are removed.

    Arguments:
        kind: the format.
        overwrite: replace an export of the same format.

    Raises: InvalidRequest when the target contains anything else, Unavailable when it can't be written.
    """
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        _clean_up(target)
        _check(target, kind, overwrite)
        folder = Path(mkdtemp(UNFINISHED, f".{target.name}.", target.parent))
        try:
            with _locked(folder):
                yield folder
                make_private(folder)
                _sync_all(folder)
                _check(target, kind, overwrite)
                _replace(folder, target)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Raise Unavailable in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise Unavailable(
            f"The export {target} can't be written: {error.strerror or error}. Check that the folder is "
            "writable and its disk has space. No partial export remains."
        ) from error


def make_private(folder: Path) -> None:
    """Give all files in a folder the mode 0600, and the folders in it 0700, whatever the umask is."""
    for at, folders, files in os.walk(folder):
        for name in folders:
            os.chmod(Path(at, name), 0o700)
        for name in files:
            os.chmod(Path(at, name), 0o600)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Mark a folder as complete."""
    (folder / SUCCESS).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")


def _check(target: Path, kind: str, overwrite: bool) -> None:
    """Raise `InvalidRequest` unless an export may be written to the folder."""
    if target.exists() and not target.is_dir():
        raise InvalidRequest(f"{target} is a file; name a folder for the export.")
    names = sorted(each.name for each in target.iterdir()) if target.exists() else []
    if not names:
        return
    existing = _export_kind(target)
    others = [name for name in names if name != SUCCESS and not name.startswith("day=")]
    if existing is None or others:
        raise InvalidRequest(
            f"The folder {target} contains files of other origin, such as {(others or names)[0]}; name "
            "an empty folder or one that does not exist yet."
        )
    if existing != kind:
        raise InvalidRequest(
            f"The folder {target} contains an export as {existing}; name another folder for {kind}."
        )
    if not overwrite:
        raise InvalidRequest(
            f"The folder {target} already contains an export; add --overwrite to replace it, or name another "
            "folder."
        )


def _export_kind(target: Path) -> str | None:
    """Return the format of the export in a folder, or None without one."""
    with suppress(FileNotFoundError, msgspec.MsgspecError):
        return msgspec.json.decode((target / SUCCESS).read_bytes(), type=Manifest).postroom_export
    return None


def _replace(folder: Path, target: Path) -> None:
    """Rename a folder to `target`, and remove the export that it replaces."""
    if not (target / SUCCESS).exists():
        folder.rename(target)
        sync(target.parent)
        return
    aside = Path(mkdtemp(REPLACED, f".{target.name}.", target.parent))
    with _locked(target):
        target.rename(aside)
        try:
            folder.rename(target)
        except BaseException:
            aside.rename(target)
            raise
        sync(target.parent)
        shutil.rmtree(aside, ignore_errors=True)


def _clean_up(target: Path) -> None:
    """Remove the temporary folders of killed processes; restore an export whose replacement was cut short."""
    for each in target.parent.iterdir():
        if not each.name.startswith(f".{target.name}.") or each.suffix not in (UNFINISHED, REPLACED):
            continue
        with suppress(BlockingIOError), _locked(each):
            if each.suffix == REPLACED and not target.exists() and _export_kind(each) is not None:
                each.rename(target)
            else:
                shutil.rmtree(each)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder that is in use; raise BlockingIOError when another process has locked it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _sync_all(folder: Path) -> None:
    for at, _, files in os.walk(folder):
        for name in (*files, ""):
            sync(Path(at, name))
