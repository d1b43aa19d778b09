"""Views: the tables of the read models, versioned beside each other and flipped in one transaction.

A rebuild makes the tables of a new version, loads and indexes them, and then makes that version the active
one; readers look the active version up in the transaction they read in, so they see the old one or the new
one, whole. The version before stays for `roll_back`. The event log is never written.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from postroom.adapters.postgres.url import is_url
from postroom.domain.search import NO_BODIES, BodyRules
from postroom.projections.cut import MailboxCut


class Views(Protocol):
    """The read models of one store, as the one process that rebuilds them sees them.

    Arguments:
        where: what they are kept in, as it may be shown.
        staging: what the paths of folders begin with in which rows are staged for them.
    """

    where: str
    staging: Path

    def begin(self, cuts: Sequence[MailboxCut]) -> int:
        """Make the empty tables of a new version and return its number."""

    def load(
        self, table: str, version: int, batches: Iterator[pa.Table], loaded: Callable[[int], None]
    ) -> int:
        """Write rows into a table of a version, each batch in a transaction of its own.

        Arguments:
            loaded: called with the number of rows after every batch.

        Returns: how many rows were written.
        """

    def index(self, version: int, done: Callable[[int, int], None]) -> None:
        """Build what is made from the loaded tables, such as their indexes.

        Arguments:
            done: called with how many of how many statements are done.
        """

    def remove_truncated(self, version: int, before: int, after: int) -> None:
        """Remove what the log lost to retention during the rebuild: places from `before`, below `after`."""

    def flip(self, version: int, counts: dict[str, int], seconds: dict[str, float]) -> None:
        """Make a version the active one, in one short transaction; the one before stays for `roll_back`."""

    def fail(self, version: int, error: str) -> None:
        """Drop a version that could not be built, and keep the reason."""

    def drop_old(self) -> None:
        """Drop every version but the active one and the one before it."""


def open_views(store: str, bodies: BodyRules = NO_BODIES) -> AbstractContextManager[Views]:
    """Open the read models of a store for a rebuild, which no other process can begin until this one is done.

    What killed rebuilds left is dropped.

    Arguments:
        store: path of a SQLite store, or URL of a PostgreSQL one.
        bodies: whose bodies are searched for words.

    Raises: Unavailable when another rebuild is running or the read models can't be used.
    """
    if is_url(store):
        from postroom.projections.views.postgres import open_postgres_views

        return open_postgres_views(store, bodies)
    from postroom.projections.views.sqlite import open_sqlite_views

    return open_sqlite_views(store, bodies)


def roll_back(store: str) -> int:
    """Make the version before the active one active again, and return its number.

    Raises: NotFound when there is none.
    """
    if is_url(store):
        from postroom.projections.views.postgres import roll_back_postgres

        return roll_back_postgres(store)
    from postroom.projections.views.sqlite import roll_back_sqlite

    return roll_back_sqlite(store)
