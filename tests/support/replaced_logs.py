"""What an older copy of a store, or a cut, leaves of a log; beside it the read models are as before."""

import sqlite3
from contextlib import closing
from pathlib import Path

import psycopg


def run_sql(store: str | Path, *statements: str) -> list[tuple[int, ...]]:
    """Run statements on the tables of a store, and return the rows of the last one."""
    if str(store).startswith("postgresql:"):
        with psycopg.connect(str(store), options="-csearch_path=postroom") as database:
            cursors = [database.execute(statement.encode()) for statement in statements]
            return cursors[-1].fetchall() if cursors[-1].description else []
    with closing(sqlite3.connect(store)) as file, file:
        return [file.execute(statement).fetchall() for statement in statements][-1]


def cut(store: str | Path, through: int, mailbox: int = 1) -> None:
    """Remove all traces of the commits of a mailbox that end after a position, as if it was an older copy.

    Arguments:
        mailbox: its number in the store.
    """
    base = mailbox << 40
    is_own = f"place > {base} AND place < {base + (1 << 40)}"
    index = [
        f"DELETE FROM log_index WHERE mailbox = {mailbox} AND position > {through}",
        f"UPDATE log_index SET last = NULL WHERE mailbox = {mailbox} AND last > {through}",
    ]
    if str(store).startswith("postgresql:"):
        index = [f"DELETE FROM log_index WHERE {is_own} AND place > {base + through}"]
    run_sql(
        store,
        f"DELETE FROM log WHERE {is_own} AND last > {through}",
        *index,
        f"DELETE FROM snapshot WHERE {is_own}",
        f"DELETE FROM seal WHERE base = {base}",
    )


def commit_ends(store: str | Path) -> list[int]:
    """Return the positions at which commits end, of all logs."""
    return [last for (last,) in run_sql(store, "SELECT last FROM log ORDER BY place")]
