"""The meaning of the read models: folds in plain Python, record by record, which Spark's must agree with.

What each row says is defined once and readably by the `reference` of its projection;
`tests/properties/test_folds_agree.py` holds the folds over frames to it.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from postroom.domain.record import Record
from postroom.projections.cut import MailboxCut
from postroom.projections.models import messages
from postroom.projections.models.messages import Parked
from postroom.projections.projection import (
    EventProjection,
    MessageProjection,
    Projection,
    Row,
    checked_reference,
    merge_reference,
    projections,
)


class ReadModels(NamedTuple):
    """The rows of each read model by its name, in the order of its key, and what could not be folded."""

    rows: dict[str, list[Row]]
    parked: list[Parked]


def fold(
    logs: Mapping[MailboxCut, Iterable[Record]], wanted: Mapping[str, Projection] | None = None
) -> ReadModels:
    """Return the read models of mailbox logs, each read up to its cut.

    Arguments:
        wanted: which projections, all of them by default.

    Raises: BrokenProjection when the reference fold of one fails.
    """
    wanted = projections() if wanted is None else wanted
    read = {cut: list(records) for cut, records in logs.items()}
    of_messages: list[Row] = []
    parked: list[Parked] = []
    for cut, records in read.items():
        rows, left_out = messages.reference(cut, records)
        of_messages += rows
        parked += left_out
    placed_ = [pair for cut, records in read.items() for pair in placed(cut, records)]
    return ReadModels(
        {name: merge_reference(each, _rows(each, of_messages, placed_)) for name, each in wanted.items()},
        sorted(parked),
    )


def placed(
    cut: MailboxCut, records: Iterable[Record], known: Iterable[Row] = ()
) -> Iterator[tuple[MailboxCut, Record]]:
    """Yield records of the cut with topic and shard of their message's sending; without that, none.

    Records of messages whose type is unknown are left out: they are parked.

    Arguments:
        known: rows of messages that were sent before.
    """
    sent: dict[bytes, tuple[str, int]] = {row["stream"]: (row["topic"], row["shard"]) for row in known}
    for record in records:
        if not cut.first <= record.position <= cut.last:
            continue
        event = record.type.partition(".")[0]
        if event == messages.SENT:
            assert record.topic is not None
            assert record.shard is not None
            sent[record.stream] = record.topic, record.shard
        elif event.startswith("Message"):
            begun = sent.get(record.stream)
            if begun is None or event not in messages.KNOWN:
                continue
            record = record._replace(topic=begun[0], shard=begun[1])
        yield cut, record


def _rows(
    projection: Projection, of_messages: list[Row], placed: list[tuple[MailboxCut, Record]]
) -> Iterable[Row]:
    match projection:
        case EventProjection():
            return (
                row
                for cut, record in placed
                for row in checked_reference(projection, projection.reference, cut, record)
            )
        case MessageProjection():
            return (
                row
                for message in of_messages
                for row in checked_reference(projection, projection.reference, message)
            )
        case _:
            return of_messages
