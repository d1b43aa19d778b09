"""Databases of Django: their addresses, for the owner of a mailbox, and the tables of the outbox."""

import os
from typing import Any
from urllib.parse import quote, urlencode

from django.db import connections

from postroom.adapters.sql.mailbox_outbox import create_table
from postroom.application.extras import explain_missing_extra
from postroom.domain.errors import InvalidRequest

SQLITE, POSTGRESQL = "sqlite", "postgresql"
_IN_AUTHORITY = ("user", "password", "dbname")
_OF_DJANGO = ("client_encoding", "context", "cursor_factory", "prepare_threshold", "server_side_binding")
"""Parameters that Django passes to the driver, and that a connection URL can't have."""


def address_of(connection: Any) -> str | None:
    """Return the path or the URL of the database of a connection; None if no other process can open it.

    Raises: InvalidRequest for a database that is neither SQLite nor PostgreSQL.
    """
    if connection.vendor == SQLITE:
        name = str(connection.settings_dict["NAME"])
        if connection.is_in_memory_db() or name.startswith("file:"):
            return None
        return os.path.abspath(name)
    if connection.vendor != POSTGRESQL:
        raise InvalidRequest(
            f"The database {connection.alias} is {connection.display_name}; tasks need SQLite or PostgreSQL."
        )
    ours = {key: value for key, value in connection.get_connection_params().items() if key not in _OF_DJANGO}
    values = {key: str(value) for key, value in ours.items() if isinstance(value, str | int) and value != ""}
    user = quote(values.get("user", ""), safe="")
    if "password" in values:
        user += f":{quote(values['password'], safe='')}"
    rest = {key: value for key, value in values.items() if key not in _IN_AUTHORITY}
    query = urlencode(rest, quote_via=quote)
    return (
        f"postgresql://{user}{'@' if user else ''}/{quote(values.get('dbname', ''), safe='')}"
        f"{'?' if query else ''}{query}"
    )


def is_of_tests(connection: Any) -> bool:
    """Return whether a database is the one in memory of `manage.py test`; nothing is sent from it."""
    return connection.vendor == SQLITE and str(connection.settings_dict["NAME"]).startswith("file:memorydb_")


def create_tables(connection: Any) -> None:
    """Create the tables of `postroom migrate --messaging` that a database lacks, in the caller's transaction.

    Raises: InvalidRequest when Django uses another driver than psycopg 3; what `migrate` raises.
    """
    if connection.vendor == SQLITE:
        create_table(connection)
    elif connection.vendor == POSTGRESQL:
        with explain_missing_extra("postgres"):
            import psycopg

            from postroom.adapters.postgres.migrate import apply_within
        connection.ensure_connection()
        if not isinstance(connection.connection, psycopg.Connection):
            raise InvalidRequest(
                f"The database {connection.alias} has another driver than psycopg 3; install psycopg."
            )
        apply_within(connection.connection, address_of(connection) or "", "messaging")


def end_transactions() -> list[str]:
    """Roll back the transactions of this thread that are open, with connections that are not used again.

    Returns: the aliases of their databases.
    """
    open_ = [each for each in connections.all(initialized_only=True) if each.in_atomic_block]
    for connection in open_:
        connection.close()  # within a transaction it stays closed, so it is not kept
        del connections[connection.alias]
    return [each.alias for each in open_]
