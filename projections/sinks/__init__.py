"""Sinks: where read models are kept, versioned beside each other and flipped in one step.

A rebuild begins a version, its tasks write parts of it, and when it is complete it becomes the active one;
readers see the old version or the new one, whole. The one before stays for `roll_back`. The event log is
never written.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec
import polars as pl

from postroom.projections.cut import MailboxCut
from postroom.projections.fold import Folded

Done = Callable[[int, int], None]
"""Called with how much of how much is done."""


class Plan(msgspec.Struct, frozen=True):
    """Say what a version is built from; a rebuild that was killed goes on only with the same plan.

    Arguments:
        cuts: how far each mailbox log is read.
        models: the projections that are built; the others are taken over from the active version.
        positions: how many positions a part covers.
        buckets: into how many parts what is left over is divided.
        bodies: JSON of which payloads' words are searched (`postroom.projections.search_text`).
    """

    cuts: tuple[MailboxCut, ...]
    models: tuple[str, ...]
    positions: int
    buckets: int
    bodies: str = "[]"


class Writer(Protocol):
    """Write parts of a version from Spark's tasks; it is sent to them, so it holds no connection."""

    def is_done(self, part: str) -> bool:
        """Tell whether a part was written, and so needs no work any more."""

    def write(self, part: str, folded: Folded) -> None:
        """Write rows, pieces and parked records of a part, all or none; what was written before is not again."""

    def pieces(self, bucket: int) -> Mapping[str, pl.DataFrame]:
        """Return the pieces that all parts left of the messages in a bucket."""


class Build(Protocol):
    """One version as the process that builds it sees it."""

    version: int
    plan: Plan

    def writer(self) -> Writer:
        """Return what tasks write with."""

    def parts_done(self) -> frozenset[str]:
        """Return which parts were written, by this process or one that was killed."""

    def load(self, done: Done) -> dict[str, int]:
        """Bring to the tables what tasks could not write there, and return how many rows each model has."""

    def index(self, done: Done) -> None:
        """Build what is made from the loaded tables, such as their indexes."""

    def remove_truncated(self, before: int, after: int) -> None:
        """Remove messages that the log lost to retention meanwhile: places from `before`, below `after`."""

    def flip(self, counts: Mapping[str, int], seconds: Mapping[str, float]) -> None:
        """Make this version the active one, in one short transaction; the one before stays."""

    def fail(self, error: str) -> None:
        """Drop this version, and keep the reason."""


class Sink(Protocol):
    """Where the read models of a store are kept; every adapter passes `tests/conformance/sink.py`.

    Arguments:
        where: as it may be shown, without a password.
    """

    where: str

    def build(self, plan: Callable[[], Plan]) -> AbstractContextManager[Build]:
        """Begin a version, or go on with the one that a killed process left; drop what else such left.

        Arguments:
            plan: of a new version. A version that was begun goes on with its own.

        Raises: Unavailable when another process is building, or the read models can't be used.
        """

    def roll_back(self) -> int:
        """Make the version before the active one active again, and return its number.

        Raises: NotFound when there is none.
        """

    def rows(self, model: str, keys: Sequence[str] = ()) -> Iterator[pl.DataFrame]:
        """Yield the rows of the active version, in batches, sorted by `keys`."""
