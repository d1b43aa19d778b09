"""Port: advancing a version of the read models to later positions of the log.

The rows of a batch and the cursors are updated in one transaction, and only if the cursors are still those at
which the batch begins. So no record is applied twice, even by concurrent processes.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from threading import Event
from typing import Protocol

from postroom.projections.incremental.batch import Batch
from postroom.projections.incremental.cursors import Cursor, Head, Step, Version


class ReadModelUpdater(Protocol):
    """An updater of the read models of one store.

    All methods raise Unavailable when the store can't be used; the next call reconnects.

    Arguments:
        where: display name of the read models, without a password.
        rebuild_command: the command that rebuilds them.
    """

    where: str
    rebuild_command: str

    def leader_lock(self) -> AbstractContextManager[bool]:
        """Try to hold the lock of the one process that follows; yield whether it was acquired."""

    def active(self) -> Version | None:
        """Return the active version, or None."""

    def version(self, number: int) -> Version:
        """Return a version; raise NotFound when it does not exist."""

    def cursors(self, version: Version) -> dict[int, Cursor]:
        """Return the cursors of a version by mailbox id."""

    def heads(self, cursors: dict[int, Cursor]) -> list[Head]:
        """Return the heads of the mailbox logs in the order of ids; empty logs end at 0.

        Arguments:
            cursors: cursors by mailbox id, at whose positions the commits are looked up.
        """

    def apply(self, version: Version, steps: Sequence[Step], batch: Batch, stop: Event | None = None) -> bool:
        """Apply a batch; return False when the cursors or the version changed since it was read.

        Arguments:
            stop: undoes the batch when it is set meanwhile; the result is False, too.
        """

    def remove(self, version: Version, before: int, after: int) -> bool:
        """Remove messages that retention removed from the log, with places from `before` to below `after`.

        Returns: False when the version is no longer the same.
        """

    def close(self) -> None:
        """Close the connections; does nothing when already closed."""
