"""Plans: the inputs of a version of the read models, and the parts that its tasks fold."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import polars as pl

from postroom.domain.search import BodyRules
from postroom.projections.log_reader import LogExtent, Range, pack
from postroom.projections.projection import Projection, load_projections

PARTS = 16
POSITIONS = (50_000, 250_000)
"""Smallest and largest number of positions in a part; in large parts, few messages span two."""
POSITIONS_PER_BUCKET = 250_000
MAX_BUCKETS = 256

Truncated = tuple[tuple[int, int], ...]
"""Places that retention removed while the log was read: from the first of each pair, below the second."""


FORMAT = "2"
"""Format of the tables that this release builds and reads."""


class Plan(msgspec.Struct, frozen=True):
    """The inputs of a version; an interrupted rebuild is continued by one with the same request.

    Arguments:
        extents: the part of each mailbox log that is read.
        models: names of the projections to build; the others use the active version's tables.
        positions: number of positions in a part.
        buckets: number of buckets that the remaining pieces are divided into.
        bodies: JSON of `body_rules`.
        through: the `--to-position` arguments of the rebuild; empty for the end of every log.
        archive: folder of the log archive, if it is read.
        verify: whether tasks check the hashes of the log.
        allow_gaps: whether records may be missing.
        format: of the tables in SQL databases, `FORMAT` in this release.
        truncated: places that retention removed while the log was read; None until it has been read.
    """

    extents: tuple[LogExtent, ...] = msgspec.field(name="cuts")  # the catalog's name since the first release
    models: tuple[str, ...]
    positions: int
    buckets: int
    bodies: str = "{}"
    through: str = ""
    archive: str | None = None
    verify: bool = False
    allow_gaps: bool = False
    format: str = FORMAT
    truncated: Truncated | None = msgspec.field(name="removed", default=None)

    @property
    def request(self) -> tuple[object, ...]:
        """Return the fields that depend only on the user's request."""
        return self.models, self.bodies, self.through, self.archive, self.verify, self.allow_gaps

    @property
    def has_unique_ids(self) -> bool:
        """Return whether no two messages of a topic share an id; an archived id may be sent again."""
        return self.archive is None

    @property
    def body_rules(self) -> BodyRules:
        """Return the topics whose bodies are searched for words."""
        return msgspec.json.decode(self.bodies, type=BodyRules)

    def projections(self) -> dict[str, Projection]:
        """Return the projections to build, by name."""
        projections = load_projections()
        return {name: projections[name] for name in self.models}


class Part(NamedTuple):
    """The work of one task: ranges of the log, or a bucket of the remaining pieces of all ranges."""

    name: str
    ranges: tuple[Range, ...] = ()
    bucket: int | None = None

    @property
    def size(self) -> int:
        """Return the amount of work: the number of positions, or 1 for a bucket."""
        return sum(each.size for each in self.ranges) if self.bucket is None else 1


def log_parts(plan: Plan) -> list[Part]:
    """Return the parts that cover the log; small mailboxes share a part."""
    ranges = (Range(extent, extent.first, extent.last) for extent in plan.extents)
    return [
        Part(f"part-{number:06d}", tuple(group)) for number, group in enumerate(pack(ranges, plan.positions))
    ]


def bucket_parts(plan: Plan) -> list[Part]:
    """Return the parts that fold the pieces, a bucket each."""
    return [Part(f"rest-{number:03d}", bucket=number) for number in range(plan.buckets)]


def with_bucket(pieces: pl.DataFrame, buckets: int) -> pl.DataFrame:
    """Return pieces with a column `bucket`, ordered by it.

    The bucket is computed from the last byte of the stream id, which is practically random.
    """
    last = pl.col("stream").bin.slice(-1, 1).bin.reinterpret(dtype=pl.UInt8)
    return pieces.with_columns((last.cast(pl.Int64) % buckets).alias("bucket")).sort("bucket")


def make_plan(extents: Sequence[LogExtent], models: tuple[str, ...], **others: Any) -> Plan:
    """Return a plan that divides the work into parts of a suitable size.

    Arguments:
        others: further fields of the plan.
    """
    total = sum(extent.events for extent in extents)
    positions = min(max(-(-total // PARTS), POSITIONS[0]), POSITIONS[1])
    buckets = min(max(-(-total // POSITIONS_PER_BUCKET), 1), MAX_BUCKETS)
    return Plan(tuple(extents), models, positions, buckets, **others)
