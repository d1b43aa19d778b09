"""The user at the other end of a Unix socket."""

import os
import socket
import struct
from contextlib import suppress
from typing import Any

from postroom.domain.errors import Unavailable

_CREDENTIALS = struct.Struct("3i")


def is_own_or_root(connection: Any) -> bool:
    """Return whether the peer runs as this process's user or as root.

    Where the operating system does not report the peer's user, the permissions of the socket decide.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, user, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return user in (0, os.geteuid())


def check_socket_owner(path: str) -> None:
    """Check that a Unix socket belongs to this process's user or to root, before anything is sent to it.

    Raises: Unavailable if it belongs to another user, who could read what is sent.
    """
    with suppress(FileNotFoundError):  # which connecting reports
        if os.geteuid() and os.stat(path).st_uid not in (0, os.geteuid()):
            raise Unavailable(f"The socket {path} belongs to another user; name that of your own server.")
