"""Parking: records that a projection can't fold are set aside and reported; the others are folded."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import polars as pl

from postroom.domain.errors import BrokenProjection
from postroom.projections.models.messages import ParkedRecord
from postroom.projections.projection import EventProjection, Fold, MessageProjection, Projection, run_checked


def with_parking(projections: Mapping[str, Projection], parked: list[ParkedRecord]) -> dict[str, Projection]:
    """Return projections whose folds append records that make them raise to `parked`, and leave these out.

    An error does not identify the record that caused it, so the records are bisected.
    """
    return {name: _with_parking(each, parked) for name, each in projections.items()}


def _with_parking(projection: Projection, parked: list[ParkedRecord]) -> Projection:
    match projection:
        case EventProjection(fold=fold, reads=columns):

            def park_record(record: Mapping[str, Any], error: BrokenProjection) -> None:
                parked.append(ParkedRecord(record["place"], record["event"], str(error)))

            bisecting = _bisecting(projection, lambda frame: fold(frame.select(columns)), park_record)
            reads = tuple(dict.fromkeys((*columns, "place", "event")))
            return replace(projection, reads=reads, fold=bisecting)
        case MessageProjection(derive=derive):

            def park_message(message: Mapping[str, Any], error: BrokenProjection) -> None:
                parked.append(ParkedRecord(message["id"], "MessageSent", str(error)))

            return replace(projection, derive=_bisecting(projection, derive, park_message))
        case _:
            return projection


def _bisecting(
    projection: Projection, fold: Fold, park: Callable[[Mapping[str, Any], BrokenProjection], None]
) -> Fold:
    def fold_or_park(rows: pl.DataFrame) -> pl.DataFrame:
        try:
            return run_checked(projection, fold, rows)
        except BrokenProjection as error:
            if rows.height <= 1:
                if rows.height:
                    park(rows.row(0, named=True), error)
                return pl.DataFrame(schema=projection.schema)
        half = rows.height // 2
        return pl.concat([fold_or_park(rows.head(half)), fold_or_park(rows.tail(rows.height - half))])

    return fold_or_park
