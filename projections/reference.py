"""The meaning of the read models: a plain fold over log records, which Spark's must agree with.

What each row says is defined here, once and readably; `messages`, `backlog` and `dead_letters` beside this
file compute the same at scale, and `tests/properties/test_spark_agrees_with_reference.py` holds them to it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from postroom.application.codec import to_events
from postroom.domain.errors import BrokenLog
from postroom.domain.message import MessageDeadLettered
from postroom.domain.names import message_id
from postroom.domain.record import Record
from postroom.projections.cut import MailboxCut
from postroom.projections.fingerprint import fingerprint
from postroom.projections.rows import (
    BACKLOG_COLUMNS,
    DEAD_LETTER_COLUMNS,
    HEADER_COLUMNS,
    MAILBOX_COLUMNS,
    STANDING_AFTER,
    Standing,
)

Row = dict[str, Any]


class ReadModels(NamedTuple):
    """The rows of the three read models, each in the order of its key."""

    mailbox: list[Row]
    backlog: list[Row]
    dead_letters: list[Row]


def fold(logs: Mapping[MailboxCut, Iterable[Record]]) -> ReadModels:
    """Return the read models of mailbox logs, each read up to its cut.

    Raises: BrokenLog when a record holds an event of unknown type.
    """
    rows = [row for cut, records in logs.items() for row in _mailbox(cut, records)]
    rows.sort(key=lambda row: row["id"])
    return ReadModels(
        [{name: row[name] for name in MAILBOX_COLUMNS} for row in rows],
        backlog(rows),
        [row["dead_letter"] for row in rows if row["dead_letter"] is not None],
    )


def backlog(mailbox: Iterable[Row]) -> list[Row]:
    """Return the backlog that mailbox rows amount to."""
    counts: dict[tuple[str, str, int], Row] = {}
    for row in mailbox:
        status = row["status"]
        if status not in ("ready", "delayed", "in_flight", "dead"):
            continue
        key = (row["mailbox"], row["topic"], row["shard"])
        count = counts.setdefault(key, dict(zip(BACKLOG_COLUMNS, (*key, 0, 0, 0, 0, None), strict=True)))
        count[status] += 1
        if status != "dead":
            oldest = count["oldest_at"]
            count["oldest_at"] = row["created_at"] if oldest is None else min(oldest, row["created_at"])
    return [counts[key] for key in sorted(counts)]


def _mailbox(cut: MailboxCut, records: Iterable[Record]) -> list[Row]:
    rows: dict[bytes, Row] = {}
    for record in records:
        if not cut.first <= record.position <= cut.last:
            continue
        event = record.type.partition(".")[0]
        if event == "MessageSent":
            rows[record.stream] = _sent(cut, record)
        elif event.startswith("Message"):
            if event not in STANDING_AFTER:
                raise BrokenLog(f"The log holds an event of unknown type {record.type}.", record.position)
            # Retention may have removed a message's beginning: then it is gone from the read models too.
            if record.stream in rows:
                _changed(rows[record.stream], event, record, cut)
    return list(rows.values())


def _sent(cut: MailboxCut, record: Record) -> Row:
    return {
        "id": cut.place(record.position),
        "message_id": message_id(record.stream, record.message_id),
        "topic": record.topic,
        **{name: getattr(record, name) for name in HEADER_COLUMNS},
        "created_at": record.at,
        "mailbox": cut.name,
        "position": record.position,
        "shard": record.shard,
        "status": Standing.ARCHIVED if record.due is None else _ready(record.due, cut),
        "attempts": 0,
        "redriven": 0,
        "changed_at": record.at,
        "envelope_blob": record.envelope,
        "redriven_at": None,
        "dead_letter": None,
    }


def _changed(row: Row, event: str, record: Record, cut: MailboxCut) -> None:
    standing = STANDING_AFTER[event]
    row["status"] = _ready(record.due, cut) if standing == Standing.READY else standing
    row["changed_at"] = record.at
    if record.attempt is not None:
        row["attempts"] = record.attempt
    if event == "MessageRedriven":
        row["attempts"] = 0
        row["redriven"] += 1
        row["redriven_at"] = record.at
    row["dead_letter"] = _dead_letter(row, record) if standing == Standing.DEAD else None


def _dead_letter(row: Row, record: Record) -> Row:
    died = next(to_events([record]))
    assert isinstance(died, MessageDeadLettered)
    values = (
        *(row[name] for name in ("id", "mailbox", "topic", "shard", "message_id")),
        *(died.reason, died.attempt, died.last_error, fingerprint(died.reason, died.last_error)),
        *(row["created_at"], died.at, row["redriven"], row["redriven_at"]),
    )
    return dict(zip(DEAD_LETTER_COLUMNS, values, strict=True))


def _ready(due: int | None, cut: MailboxCut) -> Standing:
    return Standing.DELAYED if due is not None and due > cut.at else Standing.READY
