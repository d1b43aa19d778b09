"""Where the owner of a mailbox answers: the path of its Unix socket."""

import os
import stat
import tempfile
from hashlib import sha256
from pathlib import Path

from postroom.domain.errors import Unavailable

MAX_PATH_BYTES = 100
"""Room in a socket's address, 107 bytes on Linux, for the path and the suffix of `bound_path`."""


def socket_path(store: str, mailbox: str, preferred: Path | None) -> Path:
    """Return the path of a mailbox's socket.

    Arguments:
        store: identity of the store.
        preferred: the path beside the store; None, or one that is too long for a socket, is replaced by one
            in the runtime folder, named by a hash of store and mailbox.

    Raises: Unavailable when the runtime folder is not this user's alone, or its path is too long.
    """
    if preferred is not None and len(os.fsencode(preferred)) <= MAX_PATH_BYTES:
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
