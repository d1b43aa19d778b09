"""What a person with access to its disk can do to the commits of a store."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Literal

import psycopg

from postroom.application.mailbox.codec import compress, decompress

Part = Literal["events", "envelopes"]
Change = Callable[[bytes], bytes]


def alter(store: str | Path, part: Part, change: Change) -> None:
    """Change a part of each commit of a store, none of whose hashes is computed again.

    Arguments:
        store: path of a SQLite file, or URL of a PostgreSQL database.
        change: called with the part, decompressed; at least one must change.
    """
    if str(store).startswith("postgresql:"):
        with psycopg.connect(str(store), autocommit=True, options="-csearch_path=postroom") as database:
            read = f"SELECT place, {part} FROM log"  # of two constants
            changed = _changed(database.execute(read.encode()).fetchall(), change)
            for row in changed:
                database.execute(f"UPDATE log SET {part} = %s WHERE place = %s".encode(), row)  # as above
    else:
        with closing(sqlite3.connect(store)) as file, file:
            changed = _changed(file.execute(f"SELECT place, {part} FROM log").fetchall(), change)  # as above
            file.executemany(f"UPDATE log SET {part} = ? WHERE place = ?", changed)  # as above
    assert changed, f"no {part} were changed"


def _changed(rows: list[tuple[int, bytes]], change: Change) -> list[tuple[bytes, int]]:
    parts = [(place, decompress(part, place)) for place, part in rows]
    return [(compress(change(part)), place) for place, part in parts if change(part) != part]
