"""The user at the other end of a Unix socket."""

import os
import socket
import struct
from typing import Any

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
