"""The folder of an export: there it is whole, or it is not there."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

import msgspec

from postroom.application.ports.export import Source
from postroom.domain.errors import InvalidRequest, Unavailable

SUCCESS = "_SUCCESS"
"""The file that tells tools a folder is complete; ours says what the export was made from."""
UNFINISHED, REPLACED = ".unfinished", ".replaced"


class Manifest(msgspec.Struct, frozen=True):
    """Describe an export (RFC 8259 JSON in its file `_SUCCESS`)."""

    postroom_export: str
    source: Source
    files: int
    bytes: int


@contextmanager
def whole_folder(target: Path, kind: str, overwrite: bool) -> Iterator[Path]:
    """Yield an empty folder that becomes `target` when the context ends, and vanishes when that fails.

    It is readable by its owner only. What a killed process left half-written beside it is removed.

    Arguments:
        kind: the format. overwrite: replace an export of the same format.

    Raises: InvalidRequest when something else is there, Unavailable when files can't be written there.
    """
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        _clean_up(target)
        _check(target, kind, overwrite)
        folder = Path(mkdtemp(UNFINISHED, f".{target.name}.", target.parent))
        try:
            with _locked(folder):
                yield folder
                _sync(folder)
                _check(target, kind, overwrite)
                _put(folder, target)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Raise Unavailable for what the file system refuses."""
    try:
        yield
    except OSError as error:
        raise Unavailable(
            f"The export {target} can't be written: {error.strerror or error}. Check the folder, its "
            "permissions and its disk; nothing of the export was kept."
        ) from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Say in a folder that it is complete."""
    (folder / SUCCESS).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")


def _check(target: Path, kind: str, overwrite: bool) -> None:
    """See that an export may be put there."""
    if target.exists() and not target.is_dir():
        raise InvalidRequest(f"{target} is a file; name a folder for the export.")
    names = sorted(each.name for each in target.iterdir()) if target.exists() else []
    if not names:
        return
    held = _held(target)
    strange = [name for name in names if name != SUCCESS and not name.startswith("day=")]
    if held is None or strange:
        raise InvalidRequest(
            f"The folder {target} holds more than an export as {kind}, such as {(strange or names)[0]}; name "
            "one that is empty or not there yet."
        )
    if held != kind:
        raise InvalidRequest(f"The folder {target} holds an export as {held}; name another for {kind}.")
    if not overwrite:
        raise InvalidRequest(
            f"The folder {target} holds an export already; add --overwrite to replace it, or name another."
        )


def _held(target: Path) -> str | None:
    """Return the format of the export in a folder; None when there is none."""
    with suppress(FileNotFoundError, msgspec.MsgspecError):
        return msgspec.json.decode((target / SUCCESS).read_bytes(), type=Manifest).postroom_export
    return None


def _put(folder: Path, target: Path) -> None:
    """Give a folder the name of `target`, and remove what had it."""
    if not (target / SUCCESS).exists():
        folder.rename(target)
        _sync_one(target.parent)
        return
    aside = Path(mkdtemp(REPLACED, f".{target.name}.", target.parent))
    with _locked(target):
        target.rename(aside)
        try:
            folder.rename(target)
        except BaseException:
            aside.rename(target)
            raise
        _sync_one(target.parent)
        shutil.rmtree(aside, ignore_errors=True)


def _clean_up(target: Path) -> None:
    """Remove what killed processes left, and put back what one had only just set aside."""
    for each in target.parent.iterdir():
        if not each.name.startswith(f".{target.name}.") or each.suffix not in (UNFINISHED, REPLACED):
            continue
        with suppress(BlockingIOError), _locked(each):
            if each.suffix == REPLACED and not target.exists() and _held(each) is not None:
                each.rename(target)
            else:
                shutil.rmtree(each)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder so that no process takes it for abandoned; raise BlockingIOError if one holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _sync(folder: Path) -> None:
    for at, _, files in os.walk(folder):
        for name in (*files, ""):
            _sync_one(Path(at, name))


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
