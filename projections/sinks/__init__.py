"""Sinks: where read models are kept, versioned beside each other and flipped in one step.

A rebuild begins a version, its tasks write parts of it, and when it is complete it becomes the active one;
readers see the old version or the new one, whole. The one before stays for `roll_back`. The event log is
never written.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import msgspec
import polars as pl

from postroom.adapters.postgres.url import is_url
from postroom.projections.cut import MailboxCut, Range
from postroom.projections.fold import Folded

Done = Callable[[int, int], None]
"""Called with how much of how much is done."""

Removed = tuple[tuple[int, int], ...]
"""Places that retention removed while the log was read: from the first of each pair, below the second."""


class Plan(msgspec.Struct, frozen=True):
    """Say what a version is built from; a rebuild that was killed goes on only with the same request.

    Arguments:
        cuts: how far each mailbox log is read.
        models: the projections that are built; the others are taken over from the active version.
        positions: how many positions a part covers.
        buckets: into how many parts what is left over is divided.
        bodies: JSON of which payloads' words are searched (`postroom.domain.search.BodyRules`).
        through: up to which position, of which mailbox, was asked for; empty for all there is.
        archive: folder of what retention removed, if it is read.
        removed: what retention removed while the log was read; None until it has been read.
    """

    cuts: tuple[MailboxCut, ...]
    models: tuple[str, ...]
    positions: int
    buckets: int
    bodies: str = "{}"
    through: str = ""
    archive: str | None = None
    removed: Removed | None = None

    @property
    def request(self) -> tuple[object, ...]:
        """Return what was asked for, whenever it was."""
        return self.models, self.bodies, self.through, self.archive


class Served(msgspec.Struct, frozen=True):
    """Tell about the active version.

    Arguments:
        models: the models it has, each with the version whose table it is in.
        positions: how far each mailbox has been read.
    """

    version: int
    models: dict[str, int]
    positions: dict[str, int]


class Part(NamedTuple):
    """What one task folds: ranges of the log, or a bucket of what the ranges left over."""

    name: str
    ranges: tuple[Range, ...] = ()
    bucket: int | None = None


def parts(plan: Plan) -> list[Part]:
    """Return the parts that cover the log up to the cuts; small mailboxes share one."""
    shared: list[list[Range]] = []
    room = 0
    for cut in plan.cuts:
        first = cut.first
        while first <= cut.last:
            if room == 0:
                shared.append([])
                room = plan.positions
            last = min(first + room - 1, cut.last)
            shared[-1].append(Range(cut, first, last))
            room -= last - first + 1
            first = last + 1
    return [Part(f"part-{number:06d}", tuple(ranges)) for number, ranges in enumerate(shared)]


def buckets(plan: Plan) -> list[Part]:
    """Return the parts that take what the ranges left over."""
    return [Part(f"rest-{number:03d}", bucket=number) for number in range(plan.buckets)]


def with_bucket(pieces: pl.DataFrame, buckets: int) -> pl.DataFrame:
    """Return pieces with the bucket that each belongs to, in the order of the buckets.

    The last byte of a stream's id is as good as random.
    """
    last = pl.col("stream").bin.slice(-1, 1).bin.reinterpret(dtype=pl.UInt8)
    return pieces.with_columns((last.cast(pl.Int64) % buckets).alias("bucket")).sort("bucket")


class Writer(Protocol):
    """Write parts of a version from Spark's tasks; it is sent to them, so it holds no connection."""

    def is_done(self, part: str) -> bool:
        """Tell whether a part was written, and so needs no work any more."""

    def write(self, part: str, folded: Folded) -> int:
        """Write rows, pieces and parked records of a part, all or none, and return how many rows.

        What was written before is not written again.
        """

    def pieces(self, bucket: int) -> Mapping[str, pl.DataFrame]:
        """Return the pieces that all parts left of the messages in a bucket, one frame a name."""


class Build(Protocol):
    """One version as the process that builds it sees it."""

    version: int
    plan: Plan

    @property
    def is_loaded(self) -> bool:
        """Tell whether all rows are in their tables and indexed; a killed process may have come that far."""

    def writer(self) -> Writer:
        """Return what tasks write with."""

    def parts_done(self) -> frozenset[str]:
        """Return which parts were written, by this process or one that was killed."""

    def load(self, done: Done) -> None:
        """Bring to the tables what tasks have written by now and could not write there.

        It is called now and then while they work, and once more when all are done.
        """

    def remove_truncated(self, removed: Removed) -> None:
        """Remove messages that the log lost to retention while it was read, and note that in the plan."""

    def merge(self) -> None:
        """Make one row of all rows of a key."""

    def index(self, done: Done) -> None:
        """Build what is made from the loaded tables, such as their indexes; the version is loaded then."""

    def counts(self) -> dict[str, int]:
        """Return how many rows each model has."""

    def parked(self) -> int:
        """Return how many records could not be folded."""

    def differences(self) -> list[str]:
        """Return how this version differs from the active one, a sentence for each model that does."""

    def flip(self, counts: Mapping[str, int], seconds: Mapping[str, float]) -> None:
        """Make this version the active one, in one short transaction; the one before stays.

        Raises: Unavailable when models are shared with a version that has read on meanwhile.
        """

    def fail(self, error: str) -> None:
        """Drop this version, and keep the reason."""


class Sink(Protocol):
    """Where the read models of a store are kept; every adapter passes `tests/conformance/sink.py`.

    Arguments:
        where: as it may be shown, without a password.
    """

    where: str

    def served(self) -> Served | None:
        """Tell about the active version; None when there is none."""

    def build(
        self, plan: Callable[[Served | None], Plan], *, restart: bool = False
    ) -> AbstractContextManager[Build]:
        """Begin a version, or go on with the one that a killed process left; drop what else such left.

        Arguments:
            plan: of a new version. A version that was begun goes on with its own, if the request is the same.
            restart: begin anew in any case.

        Raises: Unavailable when another process is building, or the read models can't be used.
        """

    def roll_back(self, to: int | None = None) -> int:
        """Make an earlier version active again, and return its number.

        Arguments:
            to: which; None for the one before.

        Raises: NotFound when there is none. Unavailable when it shares models that have read on since.
        """

    def rows(self, model: str, columns: Sequence[str] = ()) -> Iterator[pl.DataFrame]:
        """Yield rows of a model of the active version in batches, in the order of its key.

        Arguments:
            columns: which; all of the projection's by default.
        """


def open_sink(store: str, into: str | None = None) -> Sink:
    """Return where the read models of a store are kept, or another place to build them into.

    Arguments:
        store: path of a SQLite store, or URL of a PostgreSQL one.
        into: see `open_target`.
    """
    if into is not None:
        from postroom.projections.sinks.targets import open_target

        return open_target(into)
    if is_url(store):
        from postroom.projections.sinks.postgres import PostgresSink

        return PostgresSink(store)
    from postroom.projections.sinks.sqlite import SqliteSink

    return SqliteSink(store)
