"""Stores whose read models are followed: versions built without Spark, and what is in their tables."""

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from postroom.projections.cut import MailboxCut
from postroom.projections.fold import columns_read, fold_pieces, fold_range
from postroom.projections.logs import open_log
from postroom.projections.logs.columns import arrow_schema
from postroom.projections.projection import Row, projections
from postroom.projections.sinks import Plan, buckets, open_sink, parts

POSITIONS = 1_000


def build(store: Path | str, cuts: Sequence[MailboxCut] = (), *, flip: bool = True) -> int:
    """Build a version of a store's read models up to cuts, of nothing unless they are given."""
    wanted = projections()
    plan = Plan(tuple(cuts), tuple(wanted), POSITIONS, 1)
    with open_sink(str(store)).build(lambda served: plan, restart=True) as begun:
        writer, log, columns = begun.writer(), open_log(str(store)), columns_read(wanted)
        for part in parts(plan):
            batches = log.read(part.ranges, columns)
            records = pl.DataFrame(arrow_schema(columns).empty_table()).vstack(
                pl.concat([pl.DataFrame(batch) for batch in batches])
            )
            writer.write(part.name, fold_range(records, wanted, cuts))
        for part in buckets(plan):
            assert part.bucket is not None
            writer.write(part.name, fold_pieces(writer.pieces(part.bucket), wanted, cuts))
        begun.load(lambda done, total: None)
        begun.remove_truncated(())
        counts = begun.merge()
        begun.index(lambda done, total: None)
        if flip:
            begun.flip(counts, {})
    return begun.version


def rows(store: Path | str) -> dict[str, list[Row]]:
    """Return the rows of each model of the active version, in the order of their keys."""
    sink = open_sink(str(store))
    return {
        name: [row for batch in sink.rows(name) for row in batch.iter_rows(named=True)]
        for name in projections()
    }
