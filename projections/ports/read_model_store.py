"""Port: a store of read models in versions; one is active.

A rebuild begins a version, and its tasks write parts of it. When it is complete, it becomes active in one
transaction; the previous version is retained for `roll_back`. The event log is never written.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from threading import Event
from typing import Protocol

import msgspec
import polars as pl

from postroom.domain.errors import Unavailable
from postroom.projections.fold import FoldResult
from postroom.projections.incremental import Batch, Cursor, Head, Step, Version
from postroom.projections.plan import Plan, Truncated
from postroom.projections.projection import Projection

OnProgress = Callable[[int, int], None]
"""Called with the work done, and the total."""


class LockTimeout(Unavailable):
    """Another process held a lock on the read models for too long; a version under construction is kept."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"The read models {where} are locked by another process; end its transaction, and retry: a "
            "rebuild continues where it stopped.",
            10_000,
        )


class ActiveVersion(msgspec.Struct, frozen=True):
    """The version that readers see.

    Arguments:
        models: by model, the version whose table contains it.
        cursors: the last applied record of each mailbox, by mailbox id.
    """

    version: int
    models: dict[str, int]
    cursors: dict[int, Cursor]

    @property
    def positions(self) -> dict[str, int]:
        """Return the last applied position, by mailbox."""
        return {each.mailbox: each.position for each in self.cursors.values()}


class PartWriter(Protocol):
    """Writer of parts of a version, for tasks; it is pickled, so no connection stays open between calls."""

    @property
    def stores_envelopes(self) -> bool:
        """Tell whether the rows of messages have envelopes."""

    def is_done(self, part: str) -> bool:
        """Tell whether a part is already written."""

    def write(self, part: str, result: FoldResult) -> int:
        """Write the rows, pieces and parked records of a part atomically, and return the number of rows.

        A part that is already written is not written again.
        """

    def pieces(self, bucket: int) -> Mapping[str, pl.DataFrame]:
        """Return the pieces that all parts wrote for a bucket, as frames by name."""


class RowReader(Protocol):
    """Reader of rows of a version, for tasks; it is pickled, so no connection stays open between calls."""

    def rows(self, projection: Projection, where: str = "") -> pl.DataFrame:
        """Return the rows of a model, or those that match an SQL condition."""


class Build(Protocol):
    """A version while it is built."""

    version: int
    plan: Plan

    @property
    def is_loaded(self) -> bool:
        """Tell whether all rows are in their tables and indexed, by this or an interrupted rebuild."""

    def writer(self) -> PartWriter:
        """Return the writer for tasks."""

    def parts_done(self) -> frozenset[str]:
        """Return the names of the parts written by this or an interrupted rebuild."""

    def load(self, progress: OnProgress) -> None:
        """Load the rows that tasks have staged so far into the tables.

        It is called repeatedly while tasks run, and once after the last one.
        """

    def remove_truncated(self, truncated: Truncated) -> None:
        """Remove messages that retention removed from the log during the rebuild; record them in the plan."""

    def merge(self) -> None:
        """Merge the rows of each key into one."""

    def index(self, progress: OnProgress) -> None:
        """Build indexes and search tables from the loaded tables; then the version is loaded."""

    def counts(self) -> dict[str, int]:
        """Return the number of rows of each model."""

    def parked(self) -> int:
        """Return the number of records that could not be folded."""

    def differences(self) -> list[str]:
        """Return how this version differs from the active one, a sentence for each model that does."""

    def flip(self, counts: Mapping[str, int], seconds: Mapping[str, float]) -> None:
        """Make this version active in one short transaction; the previous one is retained.

        Raises: Unavailable when it shares models with a version that has advanced since it was built.
        """

    def fail(self, error: str) -> None:
        """Drop this version, and record the error."""


class ReadModelStore(Protocol):
    """The read models of one store; every adapter passes `tests/conformance/read_model_store.py`.

    Arguments:
        where: display name, without a password.
    """

    where: str

    def active_version(self) -> ActiveVersion | None:
        """Return the active version, or None."""

    def build(
        self, plan: Callable[[ActiveVersion | None], Plan], *, restart: bool = False
    ) -> AbstractContextManager[Build]:
        """Begin a version, or continue an unfinished one; drop other unfinished versions.

        Arguments:
            plan: returns the plan of a new version. An unfinished version with the same request is continued
                with its own plan.
            restart: always begin a new version.

        Raises: Unavailable when another process is building a version, or the read models can't be used.
        """

    def roll_back(self, to: int | None = None) -> int:
        """Make an earlier version active again, and return its number.

        Arguments:
            to: the version; None for the one before the active one.

        Raises: NotFound when it does not exist; Unavailable when it shares models that have advanced since.
        """

    def rows(self, model: str, columns: Sequence[str] = ()) -> Iterator[pl.DataFrame]:
        """Yield rows of a model of the active version in batches, in the order of its key.

        Arguments:
            columns: columns to read; all by default.
        """


class VerifiableStore(ReadModelStore, Protocol):
    """A store whose rows can be read in tasks, to verify them."""

    def row_reader(self, version: ActiveVersion) -> RowReader:
        """Return the reader of a version's rows, for tasks."""


class FollowedLog(Protocol):
    """The logs of one store, for the follower of read models that may be elsewhere.

    All methods raise Unavailable when the store can't be used; the next call reconnects.
    """

    def leader_lock(self, target: str = "") -> AbstractContextManager[bool]:
        """Try to hold the lock of the one process that follows; yield whether it was acquired.

        Arguments:
            target: name of the target that it follows into; empty for the store's own read models.
        """

    def heads(self, cursors: dict[int, Cursor]) -> list[Head]:
        """Return the heads of the mailbox logs in the order of ids; empty logs end at 0.

        Arguments:
            cursors: cursors by mailbox id, at whose positions the commits are looked up.
        """

    def wait_for_commit(self, seconds: float) -> bool | None:
        """Wait for the next commit of a log.

        Returns: whether one may have begun; None, at once, where nothing tells of commits.
        """

    def close(self) -> None:
        """Close the connections; does nothing when already closed."""


class ReadModelUpdater(FollowedLog, Protocol):
    """An updater of the read models of one store.

    All methods raise Unavailable when the store can't be used; the next call reconnects.

    Arguments:
        where: display name of the read models, without a password.
        rebuild_command: the command that rebuilds them.
        stores_envelopes: whether the rows of messages have envelopes.
    """

    where: str
    rebuild_command: str
    stores_envelopes: bool

    def active(self) -> Version | None:
        """Return the active version, or None."""

    def version(self, number: int) -> Version:
        """Return a version; raise NotFound when it does not exist."""

    def cursors(self, version: Version) -> dict[int, Cursor]:
        """Return the cursors of a version by mailbox id."""

    def apply(self, version: Version, steps: Sequence[Step], batch: Batch, stop: Event | None = None) -> bool:
        """Apply a batch; return False when the cursors or the version changed since it was read.

        Arguments:
            stop: undoes the batch when it is set meanwhile; the result is False, too.
        """

    def remove(self, version: Version, before: int, after: int) -> bool:
        """Remove messages that retention removed from the log, with places from `before` to below `after`.

        Returns: False when the version is no longer the same.
        """
