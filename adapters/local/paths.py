"""Where the owner of a mailbox answers: the path of its Unix socket."""

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from postroom.domain.errors import Unavailable

_ADDRESS_BYTES = 107
MAX_PATH_BYTES = 100
"""Room in a socket's address, 107 bytes on Linux, for the path and the suffix of `bound_path`."""
_BY_FOLDER = "/proc/self/fd/{folder}/{name}"
MAX_NAME_BYTES = MAX_PATH_BYTES - len(_BY_FOLDER.format(folder=99_999, name=""))
"""Room in a socket's address for its name in the folder of a descriptor."""


def socket_path(store: str, mailbox: str, preferred: Path | None) -> Path:
    """Return the path of a mailbox's socket.

    Arguments:
        store: identity of the store.
        preferred: the path beside the store; None, or one with a name that is too long for a socket, is
            replaced by one in the runtime folder, named by a hash of store and mailbox.

    Raises: Unavailable when the runtime folder is not this user's alone, or its path is too long.
    """
    if preferred is not None and fits(preferred):
        return preferred
    name = sha256(f"{store}\0{mailbox}".encode("utf-8", "surrogateescape")).hexdigest()[:24]
    path = _runtime_folder() / f"{name}.socket"
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise Unavailable(
            f"The path {path} is too long for a socket; set XDG_RUNTIME_DIR to a folder with a shorter path."
        )
    return path


def bound_path(path: Path, incumbent: str | None) -> Path:
    """Return the path at which an owner creates its socket, before it renames it to `path`.

    The kernel tells it to whoever is connected to the socket, even if the owner hangs and the socket was
    replaced, so it says which ownership the socket is of.

    Arguments:
        incumbent: see `Ownership.incumbent`.
    """
    return path.with_name(f"{path.name}.{sha256((incumbent or '').encode()).hexdigest()[:6]}")


def fits(path: Path) -> bool:
    """Return whether a socket can be at a path: itself or, where there is /proc, its name is short enough."""
    has_short_name = len(os.fsencode(path.name)) <= MAX_NAME_BYTES and hasattr(os, "O_PATH")
    return has_short_name or len(os.fsencode(path)) <= MAX_PATH_BYTES


@contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """Yield an address for a socket's path, which names the folder by a descriptor if the path is long.

    Other processes may know the folder by another path, so each finds its own address of the same socket.

    Raises: OSError when the folder can't be opened.
    """
    if len(os.fsencode(path)) <= _ADDRESS_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield _BY_FOLDER.format(folder=folder, name=path.name)
    finally:
        os.close(folder)


def _runtime_folder() -> Path:
    """Return the folder for sockets of this user, created with mode 0700."""
    user = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "postroom" if runtime else Path(tempfile.gettempdir()) / f"postroom-{user}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise Unavailable(f"The runtime folder {folder} can't be used: {error.strerror}.") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != user or status.st_mode & 0o077:
        raise Unavailable(
            f"The runtime folder {folder} must be a folder of user {user} with mode 0700; set "
            "XDG_RUNTIME_DIR to such a folder."
        )
    return folder
