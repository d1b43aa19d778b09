"""A PgBouncer of the system's package, run as a process of ours, without its service."""

import os
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.servers.process import LOOPBACK, ServerProcess, free_port
from tests.support.servers.server import LoopbackServer, find_binary


class PgBouncer(LoopbackServer):
    """A PgBouncer on loopback in front of a PostgreSQL server, with a few server connections per database.

    Arguments:
        folder: directory of its configuration and log; created if missing.
        server: URL of the PostgreSQL server; any of its databases can be named.
        settings: settings that differ from transaction pooling with two server connections.

    Raises: Unavailable when there is no pgbouncer.
    """

    def __init__(self, folder: Path, server: str, **settings: str) -> None:
        binary = find_binary("pgbouncer", "install your system's package pgbouncer")
        folder.mkdir(parents=True, exist_ok=True)
        self._server = urlsplit(server)
        port = free_port()
        values = {
            "listen_addr": LOOPBACK,
            "listen_port": str(port),
            "unix_socket_dir": "",
            "auth_type": "any",
            "pool_mode": "transaction",
            "default_pool_size": "2",
        }
        if os.geteuid() == 0:
            values["user"] = "nobody"  # it refuses to run as root
        path = folder / "pgbouncer.ini"
        lines = [f"{name} = {value}\n" for name, value in (values | settings).items()]
        path.write_text(
            f"[databases]\n* = host={self._server.hostname} port={self._server.port} "
            f"user={self._server.username}\n[pgbouncer]\n{''.join(lines)}"
        )
        super().__init__(ServerProcess("pgbouncer", [binary, path], folder / "pgbouncer.log"), port)

    def url(self, database: str) -> str:
        """Return the URL of a database, given by its URL at the server, through this pooler."""
        return urlsplit(database)._replace(netloc=f"{self._server.username}@{LOOPBACK}:{self._port}").geturl()
