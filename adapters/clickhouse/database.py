"""A database of ClickHouse: on a server, or embedded in this process by chdb.

Both are accessed with clickhouse-connect. Statements that read one revision read the same rows (ADR 0094).
"""

import sqlite3
import time
from base64 import b64decode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import gettempdir
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import clickhouse_connect
import polars as pl
import pyarrow as pa
from blake3 import blake3
from clickhouse_connect.driver.exceptions import ClickHouseError, OperationalError
from urllib3.exceptions import HTTPError

from postroom.adapters.sql.ddl import SQLITE, script
from postroom.adapters.sql.statements import statements
from postroom.adapters.sql.tables import chain_text
from postroom.application.text import pluralize
from postroom.domain.errors import InvalidRequest, Unavailable
from postroom.projections.projection import Projection

DEFAULT_DATABASE = "postroom"
CATALOG = "postroom_catalog"
CURSOR = "postroom_cursor"
PARKED = "postroom_parked"
STAGED = "postroom_staged_"
"""First part of the names of temporary tables, which end with the revision."""
NEWEST = (1 << 64) - 1
"""A revision after all others."""
SQL = statements("postroom.adapters.clickhouse", "tables.sql")
OPEN_SECONDS = 10.0
"""How long opening waits for another process that has a folder of chdb open."""
OPEN_PAUSE_SECONDS = 0.05
ANSWER_SECONDS = 60
"""How long a server may send nothing; during long queries it sends headers with their progress."""
BUSY = "EmbeddedServer: . "
"""Part of the error for a folder that another process has open; no reason is given."""
_SETTINGS = {
    # As in standard SQL, an outer join yields NULL, and so does the minimum of no rows.
    "join_use_nulls": 1,
    "aggregate_functions_null_for_empty": 1,
    # An insert may span many months.
    "max_partitions_per_insert_block": 0,
}
_READING = {"output_format_arrow_string_as_string": 0}  # bytes need not be text

Client = Any
"""A client of clickhouse-connect; HTTP and chdb clients have no common public type."""


def open_database(address: str) -> "ClickHouseDatabase":
    """Return the database at an address; nothing is opened or created yet.

    Arguments:
        address: `chdb:FOLDER`, which one process at a time can open, or
            `clickhouse://user:password@host:port/database`, with `clickhouses` for TLS.
    """
    kind, _, place = address.partition(":")
    return _embedded(place) if kind == "chdb" else _on_server(address)


def _embedded(folder: str) -> "ClickHouseDatabase":
    path = Path(folder).absolute()

    def connect() -> Client:
        deadline = time.monotonic() + OPEN_SECONDS
        while True:
            try:
                return clickhouse_connect.get_client(interface="chdb", path=str(path), settings=_SETTINGS)
            except ClickHouseError as error:
                if BUSY not in str(error):
                    raise
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"The ClickHouse folder {path} can't be opened: another process has it open, or it "
                        "is damaged. Retry when no other process uses it."
                    ) from None
            time.sleep(OPEN_PAUSE_SECONDS)

    staging = path.with_name(f"{path.name}-staging")
    return ClickHouseDatabase(connect, DEFAULT_DATABASE, str(path), f"chdb:{path}", staging, path.exists)


def _on_server(url: str) -> "ClickHouseDatabase":
    expected = "use clickhouse://user@host:8123/database"
    try:
        parts = urlsplit(url)
        where = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        port = parts.port
    except ValueError as error:
        raise InvalidRequest(f"The address of ClickHouse is malformed: {error}; {expected}.") from None
    if not parts.hostname:
        raise InvalidRequest(f"{where} names no host; {expected}.")
    is_secure = parts.scheme == "clickhouses"

    def connect() -> Client:
        return clickhouse_connect.get_client(
            interface="https" if is_secure else "http",
            host=parts.hostname,
            port=port or (8443 if is_secure else 8123),
            username=parts.username,
            password=parts.password or "",
            settings=_SETTINGS,
            send_receive_timeout=ANSWER_SECONDS,
            # A session would stay locked while the server ends a scan that the client gave up.
            autogenerate_session_id=False,
        )

    staging = Path(gettempdir(), f"postroom-{blake3(where.encode()).hexdigest(8)}-staging")
    return ClickHouseDatabase(
        connect, parts.path.strip("/") or DEFAULT_DATABASE, where, where, staging, lambda: True
    )


class Catalog(NamedTuple):
    """The catalog of versions.

    Arguments:
        number: how often it was saved.
        revision: the visible revision of the rows.
    """

    connection: sqlite3.Connection
    number: int
    revision: int


class ClickHouseDatabase:
    """A database of ClickHouse.

    Arguments:
        connect: returns a client.
        where: its name for messages, without a password.
        address: its address for `--into`, without a password.
        staging: prefix of the paths of a rebuild's temporary files and folders.
        may_exist: returns, without connecting, whether the database can exist.
    """

    def __init__(
        self,
        connect: Callable[[], Client],
        name: str,
        where: str,
        address: str,
        staging: Path,
        may_exist: Callable[[], bool],
    ) -> None:
        self.connect = connect
        self.name = name
        self.where = where
        self.address = address
        self.staging = staging
        self.may_exist = may_exist
        self._open_client: Client | None = None

    @contextmanager
    def client(self) -> Iterator[Client]:
        """Yield a client, the same inside the context, because connecting is slow.

        Raises: Unavailable when the database can't be used.
        """
        try:
            if self._open_client is not None:
                yield self._open_client
                return
            with closing(self.connect()) as client:
                self._open_client = client
                try:
                    yield client
                finally:
                    self._open_client = None
        except ClickHouseError as error:
            raise self.unavailable(error) from None

    def unavailable(self, error: object) -> Unavailable:
        """Return the error for callers, with the first line of its cause."""
        cause = error
        while isinstance(cause, BaseException) and cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, TimeoutError):
            return Unavailable(
                f"The ClickHouse database {self.where} did not answer within "
                f"{pluralize(ANSWER_SECONDS, 'second')}. Check that its server runs and is not overloaded, "
                "and retry."
            )
        # The client's own text for a failed connection contains the whole statement.
        reason = str(cause if isinstance(cause, OSError) else error).partition("\n")[0]
        return Unavailable(
            f"The ClickHouse database {self.where} can't be used: {reason}. Check its address and the user's "
            "privileges."
        )

    def table(self, name: str) -> str:
        """Return the qualified name of a table."""
        return f"{quoted(self.name)}.{quoted(name)}"

    def tables(self) -> list[str]:
        """Return the names of all tables."""
        with self.client() as client:
            rows = client.query(SQL["tables"], parameters={"database": self.name}).result_rows
        return [name for (name,) in rows]

    def command(self, name: str, **names: object) -> Any:
        """Run a statement with placeholders replaced by names, and return its value."""
        with self.client() as client:
            return client.command(SQL[name].format(**names))

    def insert(self, table: str, rows: pl.DataFrame) -> None:
        """Insert rows as one block, which becomes visible as a whole."""
        if rows.height:
            with self.client() as client:
                client.insert_arrow(table, rows.to_arrow(), database=self.name)

    def read(self, query: str, schema: pl.Schema | dict[str, pl.DataType]) -> Iterator[pl.DataFrame]:
        """Yield the rows of a query in batches."""
        with self.client() as client:
            yield from read_frames(client, query, schema)

    def live(
        self,
        table: str,
        projection: Projection,
        *,
        columns: Sequence[str] | None = None,
        revision: int = NEWEST,
        own: int = 0,
    ) -> str:
        """Return the query for the rows of a table at a revision; see `visible`."""
        return SQL["live"].format(
            columns=", ".join(map(quoted, columns or projection.schema)),
            table=self.table(table),
            ended=self.table(ended(table)),
            key=", ".join(map(quoted, projection.key)),
            since_visible=self.visible("since", revision, own),
            until_visible=self.visible("until", revision, own),
        )

    def visible(self, column: str, revision: int = NEWEST, own: int = 0) -> str:
        """Return the condition that a column has a visible revision.

        Arguments:
            revision: the last one.
            own: further revision to include, which is not visible yet.
        """
        return SQL["visible"].format(column=column, cursor=self.table(CURSOR), revision=revision, own=own)

    def read_catalog(self, client: Client, tables: Collection[str]) -> "Catalog":
        """Return the catalog with the follower's cursors; the caller closes it.

        Arguments:
            tables: the names of all tables; the catalog is empty before the first rebuild of this release.
        """
        if not {CATALOG, CURSOR, PARKED} <= {*tables}:
            connection = sqlite3.connect(":memory:", isolation_level=None)
            connection.executescript(script(SQLITE, "catalog.sql"))
            return Catalog(connection, 0, 0)
        rows = client.query(SQL["read_catalog"].format(table=self.table(CATALOG))).result_rows
        number, image = rows[0] if rows else (0, "")
        connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        if image:
            connection.deserialize(b64decode(image))
        connection.executescript(script(SQLITE, "catalog.sql"))
        return Catalog(connection, number, self.read_positions(client, connection))

    def read_positions(self, client: Client, catalog: sqlite3.Connection) -> int:
        """Read the follower's cursors and parked records into a catalog; return the visible revision."""
        cursors = [*client.query(SQL["read_cursors"].format(table=self.table(CURSOR))).named_results()]
        catalog.executemany(
            SQL["advance_cursor"],
            [
                row | {"chain": chain_text(row["position"], row.get("chain", ""))}
                for row in cursors
                if row["version"]
            ],
        )
        parked = SQL["read_parked"].format(table=self.table(PARKED), visible=self.visible("since"))
        catalog.executemany(SQL["add_parked"], client.query(parked).result_rows)
        return max((row["revision"] for row in cursors), default=0)


def read_frames(
    client: Client,
    query: str,
    schema: pl.Schema | dict[str, pl.DataType],
    parameters: Mapping[str, Any] | None = None,
    rows: int | None = None,
) -> Iterator[pl.DataFrame]:
    """Yield the rows of a query in batches, as they are computed.

    Arguments:
        parameters: values of `%(name)s` in the query.
        rows: maximum number of rows in a batch.

    Raises: ClickHouseError when the query fails, or its result ends early.
    """
    settings = _READING if rows is None else _READING | {"max_block_size": rows}
    try:
        with client.raw_stream(query, parameters, settings=settings, fmt="ArrowStream") as stream:
            for batch in pa.ipc.open_stream(stream):
                yield pl.DataFrame(batch).cast(schema)  # type: ignore[arg-type]
    except (HTTPError, OSError, pa.ArrowInvalid) as error:
        # The client itself reports only errors of the result's beginning.
        raise OperationalError(f"the result of a query ended early ({error})") from error


def ended(table: str) -> str:
    """Return the name of the table with the ended rows of a table."""
    return f"{table}_ended"


def quoted(name: str) -> str:
    """Return a quoted identifier."""
    return "`" + name.replace("\\", "\\\\").replace("`", "\\`") + "`"
