"""The meaning of the read models: folds in plain Python, record by record, which others are compared with."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from postroom.domain.names import message_id
from postroom.domain.record import Record
from postroom.projections.log_extent import LogExtent
from postroom.projections.models import activity, backlog, dead_letters, messages
from postroom.projections.models.messages import DeadLettering, MessageStatus, ParkedRecord
from postroom.projections.projection import Column, Projection, Row, load_projections


class ReadModels(NamedTuple):
    """The rows of each read model by its name, in the order of its key, and what could not be folded."""

    rows: dict[str, list[Row]]
    parked: list[ParkedRecord]


OfRecord = Callable[[LogExtent, Record], Iterable[Row]]
OfMessage = Callable[[Row], Iterable[Row]]


def fold(
    logs: Mapping[LogExtent, Iterable[Record]],
    of_records: Mapping[str, OfRecord] = {},
    of_messages: Mapping[str, OfMessage] = {},
) -> ReadModels:
    """Return the read models of mailbox logs, each read up to the end of its extent.

    Arguments:
        of_records, of_messages: references of projections that are not built in, by their names.
    """
    read = {extent: list(records) for extent, records in logs.items()}
    sent: list[Row] = []
    parked: list[ParkedRecord] = []
    for extent, records in read.items():
        rows, left_out = messages_of(extent, records)
        sent += rows
        parked += left_out
    placed_ = [pair for extent, records in read.items() for pair in placed(extent, records)]
    made: dict[str, Iterable[Row]] = {
        "mailbox": sent,
        "activity": (row for pair in placed_ for row in activity_of(*pair)),
        "backlog": (row for message in sent for row in backlog_of(message)),
        "dead_letters": (dead_letters.dead_letter(each) for each in sent if each["status"] == "dead"),
    }
    made |= {name: [row for pair in placed_ for row in each(*pair)] for name, each in of_records.items()}
    made |= {name: [row for message in sent for row in each(message)] for name, each in of_messages.items()}
    models = load_projections()
    return ReadModels({name: merge(models[name], rows) for name, rows in made.items()}, sorted(parked))


def placed(extent: LogExtent, records: Iterable[Record]) -> Iterator[tuple[LogExtent, Record]]:
    """Yield records of the extent with topic and shard of their message's sending.

    Records of messages that were not sent in the extent, or of unknown types, are left out.
    """
    sent: dict[bytes, tuple[str, int]] = {}
    for record in records:
        if not extent.first <= record.position <= extent.last:
            continue
        event = record.type.partition(".")[0]
        if event == messages.SENT:
            assert record.topic is not None
            assert record.shard is not None
            sent[record.stream] = record.topic, record.shard
        elif event.startswith("Message"):
            begun = sent.get(record.stream)
            if begun is None or event not in messages.EVENTS:
                continue
            record = record._replace(topic=begun[0], shard=begun[1])
        yield extent, record


def merge(projection: Projection, rows: Iterable[Row]) -> list[Row]:
    """Return one row a key, in the order of the keys; what `merge_rows` does, in plain Python."""
    merged: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = tuple(row[name] for name in projection.key)
        merged[key] = _merge(projection.columns, merged[key], row) if key in merged else row
    return [merged[key] for key in sorted(merged)]


def _merge(columns: Sequence[Column], earlier: Row, later: Row) -> Row:
    return {each.name: _merged(each, earlier[each.name], later[each.name]) for each in columns}


def _merged(column: Column, earlier: Any, later: Any) -> Any:
    if column.merge in ("key", "replace"):
        return later
    if earlier is None or later is None:
        return later if earlier is None else earlier
    how: dict[str, Callable[[Any, Any], Any]] = {"sum": lambda a, b: a + b, "min": min, "max": max}
    return how[column.merge](earlier, later)


def activity_of(extent: LogExtent, record: Record) -> Iterator[Row]:
    """Yield what one record counts for: its hour and its day."""
    for period, size in activity.PERIODS.items():
        yield {
            "mailbox": extent.name,
            "period": period,
            "starts_at": record.at // size * size,
            "topic": record.topic or "",
            "event": record.type.partition(".")[0],
            "events": 1,
            "first_at": record.at,
            "last_at": record.at,
        }


def backlog_of(message: Row) -> Iterator[Row]:
    """Yield what one message counts for."""
    status = message["status"]
    if status in backlog.STATUSES:
        yield {
            "mailbox": message["mailbox"],
            "topic": message["topic"],
            "shard": message["shard"],
            **{name: int(status == name) for name in backlog.STATUSES},
            "oldest_at": None if status == "dead" else message["created_at"],
        }


def messages_of(extent: LogExtent, records: Iterable[Record]) -> tuple[list[Row], list[ParkedRecord]]:
    """Return the rows of a mailbox's messages, folded record by record, and what could not be folded."""
    rows: list[Row] = []
    latest: dict[bytes, Row] = {}
    parked: list[ParkedRecord] = []
    for record in records:
        if not extent.first <= record.position <= extent.last:
            continue
        event = record.type.partition(".")[0]
        if event == messages.SENT:
            latest[record.stream] = _sent_row(extent, record)
            rows.append(latest[record.stream])
        elif event in messages.STATUS_AFTER:
            dead_lettering, error = (
                messages.dead_lettering_of(record) if event == "MessageDeadLettered" else (None, None)
            )
            if error is not None:
                parked.append(ParkedRecord(extent.place(record.position), record.type, error))
            # Retention may have removed a message's beginning: then it is gone from the read models too.
            if record.stream in latest:
                _change_row(latest[record.stream], event, record, dead_lettering, extent)
        elif event.startswith("Message"):
            place = extent.place(record.position)
            parked.append(ParkedRecord(place, record.type, f"An event of unknown type {record.type}."))
    for row in rows:
        row["dead_letterings"] = (
            msgspec.json.encode(row["dead_letterings"]).decode() if row["dead_letterings"] else None
        )
    return rows, parked


def _sent_row(extent: LogExtent, record: Record) -> Row:
    return {
        "id": extent.place(record.position),
        "message_id": message_id(record.stream, record.message_id),
        "topic": record.topic,
        **{name: getattr(record, name) for name in messages.HEADER_COLUMNS},
        "created_at": record.at,
        "mailbox": extent.name,
        "position": record.position,
        "shard": record.shard,
        "status": MessageStatus.ARCHIVED if record.due is None else _ready(record.due, extent),
        "attempts": 0,
        "redriven": 0,
        "changed_at": record.at,
        "due": record.due,
        "dead_letterings": [],
        "stream": record.stream,
        "envelope_blob": messages.without_token(record.envelope),
    }


def _change_row(
    row: Row, event: str, record: Record, dead_lettering: DeadLettering | None, extent: LogExtent
) -> None:
    status = messages.STATUS_AFTER[event]
    is_ready = status == MessageStatus.READY
    row["status"] = _ready(record.due, extent) if is_ready else status
    row["due"] = record.due if is_ready else None
    row["changed_at"] = record.at
    if record.attempt is not None:
        row["attempts"] = record.attempt
    if dead_lettering is not None:
        row["dead_letterings"].append(dead_lettering)
    if event == "MessageRedriven":
        row["attempts"] = 0
        row["redriven"] += 1
        if row["dead_letterings"]:
            row["dead_letterings"][-1].redriven_at = record.at


def _ready(due: int | None, extent: LogExtent) -> MessageStatus:
    return MessageStatus.DELAYED if due is not None and due > extent.at else MessageStatus.READY
