"""The meaning of the read models: folds in plain Python, record by record, which others are compared with."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from postroom.domain.names import message_id
from postroom.domain.record import Record
from postroom.projections.log_reader import LogExtent
from postroom.projections.models import activity, backlog, dead_letters, messages
from postroom.projections.models.messages import DeadLettering, MessageStatus, ParkedRecord
from postroom.projections.projection import Column, Projection, Row, load_projections
from tests.projections.log_rows import log_row


class ReadModels(NamedTuple):
    """The rows of each read model by its name, in the order of its key, and what could not be folded."""

    rows: dict[str, list[Row]]
    parked: list[ParkedRecord]


OfRecord = Callable[[Row], Iterable[Row]]
"""Returns the rows to which one row of the log adds."""
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
    read = [
        [log_row(extent, each) for each in records if extent.first <= each.position <= extent.last]
        for extent, records in logs.items()
    ]
    sent: list[Row] = []
    parked: list[ParkedRecord] = []
    for rows in read:
        messages_, left_out = messages_of(rows)
        sent += messages_
        parked += left_out
    placed_ = [row for rows in read for row in placed(rows)]
    made: dict[str, Iterable[Row]] = {
        "mailbox": sent,
        "activity": (row for each in placed_ for row in activity_of(each)),
        "backlog": (row for message in sent for row in backlog_of(message)),
        "dead_letters": (dead_letters.dead_letter(each) for each in sent if each["status"] == "dead"),
    }
    made |= {name: [row for record in placed_ for row in each(record)] for name, each in of_records.items()}
    made |= {name: [row for message in sent for row in each(message)] for name, each in of_messages.items()}
    models = load_projections()
    return ReadModels({name: merge(models[name], rows) for name, rows in made.items()}, sorted(parked))


def placed(records: Iterable[Row]) -> Iterator[Row]:
    """Yield rows of one log with topic and shard of their message's sending.

    Records of messages that were not sent in the extent, or of unknown types, are left out.
    """
    sent: dict[bytes, Row] = {}
    for record in records:
        event, stream = record["event"], record["stream"]
        if event == messages.SENT:
            sent[stream] = record
        elif event.startswith("Message"):
            if stream not in sent or event not in messages.EVENTS:
                continue
            record = record | {name: sent[stream][name] for name in ("topic", "shard")}
        yield record


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


def activity_of(record: Row) -> Iterator[Row]:
    """Yield what one record counts for: its hour and its day."""
    at = record["at"]
    for period, size in activity.PERIODS.items():
        yield {
            "mailbox": record["mailbox"],
            "period": period,
            "starts_at": at // size * size,
            "topic": record["topic"] or "",
            "event": record["event"],
            "events": 1,
            "first_at": at,
            "last_at": at,
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


def messages_of(records: Iterable[Row]) -> tuple[list[Row], list[ParkedRecord]]:
    """Return the rows of a mailbox's messages, folded record by record, and what could not be folded."""
    rows: list[Row] = []
    latest: dict[bytes, Row] = {}
    parked: list[ParkedRecord] = []
    for record in records:
        event, stream = record["event"], record["stream"]
        if event == messages.SENT:
            latest[stream] = _sent_row(record)
            rows.append(latest[stream])
        elif event in messages.STATUS_AFTER:
            # Retention may have removed a message's beginning: then it is gone from the read models too.
            if stream in latest:
                _change_row(latest[stream], record)
        elif event.startswith("Message"):
            parked.append(ParkedRecord(record["place"], event, f"An event of unknown type {event}."))
    for row in rows:
        row["dead_letterings"] = (
            msgspec.json.encode(row["dead_letterings"]).decode() if row["dead_letterings"] else None
        )
    return rows, parked


def _sent_row(record: Row) -> Row:
    due = record["due"]
    return {
        "id": record["place"],
        "message_id": message_id(record["stream"], record["message_id"]),
        "topic": record["topic"],
        **{name: record[name] for name in messages.HEADER_COLUMNS},
        "created_at": record["at"],
        "mailbox": record["mailbox"],
        "position": record["position"],
        "shard": record["shard"],
        "status": MessageStatus.ARCHIVED if due is None else _ready(record),
        "attempts": 0,
        "redriven": 0,
        "changed_at": record["at"],
        "due": due,
        "dead_letterings": [],
        "stream": record["stream"],
        "envelope_blob": messages.without_token(record["envelope"]),
    }


def _change_row(row: Row, record: Row) -> None:
    event, at, attempt = record["event"], record["at"], record["attempt"]
    status = messages.STATUS_AFTER[event]
    is_ready = status == MessageStatus.READY
    row["status"] = _ready(record) if is_ready else status
    row["due"] = record["due"] if is_ready else None
    row["changed_at"] = at
    if attempt is not None:
        row["attempts"] = attempt
    if event == "MessageDeadLettered":
        row["dead_letterings"].append(DeadLettering(at, record["reason"], attempt, record["last_error"]))
    if event == "MessageRedriven":
        row["attempts"] = 0
        row["redriven"] += 1
        if row["dead_letterings"]:
            row["dead_letterings"][-1].redriven_at = at


def _ready(record: Row) -> MessageStatus:
    due = record["due"]
    return MessageStatus.DELAYED if due is not None and due > record["as_of"] else MessageStatus.READY
