"""The lease tables port over a PostgreSQL database."""

from collections.abc import Sequence

from msgspec.structs import asdict

from postroom.adapters.postgres.database import Connection, Reconnecting, unavailable
from postroom.adapters.postgres.lease_store import TIMEOUT, open_session
from postroom.adapters.sql.statements import statements
from postroom.application.ports.lease_store import LeaseRow

_SQL = statements("postroom.adapters.postgres", "leases.sql")


class PostgresLeaseTables:
    """RFC-049's tables in a PostgreSQL database, in the schema `postroom`."""

    def __init__(self, url: str) -> None:
        """Take the database at `url`, which is opened at the first use."""
        self._url = url
        self._database = Reconnecting(self._open)

    def position(self) -> int:
        """Return the position up to which the tables are folded."""
        with unavailable(self._url), self._database.use() as connection:
            return _position(connection, "cursor")

    def apply(self, after: int, through: int, rows: Sequence[LeaseRow], removals: Sequence[str]) -> bool:
        """Apply changes, all or none; see `LeaseTables.apply`."""
        with unavailable(self._url), self._database.use() as connection, connection.transaction():
            if _position(connection, "lock_cursor") != after:
                return False
            leases = [asdict(row) for row in rows]
            ended = [{"mailbox": mailbox} for mailbox in removals]
            expired = [values for values in leases if values["status"] == "expired"]
            routed = [values for values in leases if values["status"] != "expired"]
            cursor = connection.cursor()
            cursor.executemany(_SQL["remove_route"], ended + expired)
            cursor.executemany(_SQL["remove_lease"], ended)
            cursor.executemany(_SQL["put_lease"], leases)
            cursor.executemany(_SQL["put_route"], routed)
            cursor.execute(_SQL["move_cursor"], {"position": through})
            return True

    def clear(self) -> None:
        """Remove all rows and return to position 0."""
        with unavailable(self._url), self._database.use() as connection, connection.transaction():
            _position(connection, "lock_cursor")
            connection.execute(_SQL["clear_routes"])
            connection.execute(_SQL["clear_leases"])
            connection.execute(_SQL["move_cursor"], {"position": 0})

    def mark_expiring(self, now: int) -> int:
        """Mark active leases as expiring whose TTL has ended at `now`; see `LeaseTables.mark_expiring`."""
        with unavailable(self._url), self._database.use() as connection:
            return connection.execute(_SQL["mark_expiring"], {"now": now}).rowcount

    def close(self) -> None:
        """Close the connection; closing twice is fine."""
        self._database.close()

    def _open(self) -> Connection:
        # The row of the cursor is locked while the tables change, also if the process is paused meanwhile.
        settings = {"idle_in_transaction_session_timeout": TIMEOUT}
        return open_session(self._url, "postroom, lease tables", settings)


def _position(connection: Connection, statement: str) -> int:
    (position,) = connection.execute(_SQL[statement]).fetchone() or (0,)
    return int(position)
