"""Parking: what a projection can't fold is left out and told, and the rest goes on."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import polars as pl

from postroom.domain.errors import BrokenProjection
from postroom.domain.record import Record
from postroom.projections.cut import MailboxCut
from postroom.projections.models.messages import Parked
from postroom.projections.projection import (
    EventProjection,
    MessageProjection,
    Projection,
    Row,
    checked,
    checked_reference,
)

_Frames = Callable[[pl.DataFrame], pl.DataFrame]


def parking(wanted: Mapping[str, Projection], parked: list[Parked]) -> dict[str, Projection]:
    """Return projections whose folds leave out what they raise at, and add it to `parked`.

    A fold over many records does not tell which of them it raised at: they are halved until it is found.
    """
    return {name: _parking(each, parked) for name, each in wanted.items()}


def _parking(projection: Projection, parked: list[Parked]) -> Projection:
    match projection:
        case EventProjection(fold=fold, reference=reference):
            reads = tuple(dict.fromkeys((*projection.reads, "place", "type")))

            def park_record(record: Mapping[str, Any], error: BrokenProjection) -> None:
                parked.append(Parked(record["place"], record["type"], str(error)))

            def of_record(cut: MailboxCut, record: Record) -> Iterator[Row]:
                place = cut.place(record.position)
                told = {"place": place, "type": record.type}
                try:
                    yield from checked_reference(projection, reference, cut, record)
                except BrokenProjection as error:
                    park_record(told, error)

            folded = _halving(projection, lambda frame: fold(frame.select(projection.reads)), park_record)
            return replace(projection, reads=reads, fold=folded, reference=of_record)
        case MessageProjection(derive=derive, reference=reference):

            def park_message(message: Mapping[str, Any], error: BrokenProjection) -> None:
                parked.append(Parked(message["id"], "MessageSent", str(error)))

            def of_message(message: Row) -> Iterator[Row]:
                try:
                    yield from checked_reference(projection, reference, message)
                except BrokenProjection as error:
                    park_message(message, error)

            return replace(
                projection, derive=_halving(projection, derive, park_message), reference=of_message
            )
        case _:
            return projection


def _halving(
    projection: Projection, fold: _Frames, park: Callable[[Mapping[str, Any], BrokenProjection], None]
) -> _Frames:
    def folded(rows: pl.DataFrame) -> pl.DataFrame:
        try:
            return checked(projection, fold, rows)
        except BrokenProjection as error:
            if rows.height <= 1:
                if rows.height:
                    park(rows.row(0, named=True), error)
                return pl.DataFrame(schema=projection.schema)
        half = rows.height // 2
        return pl.concat([folded(rows.head(half)), folded(rows.tail(rows.height - half))])

    return folded
