"""Lineage of messages: the redrive jobs that changed them, and the copies that jobs sent."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec

from postroom.application.ingest.redrive import ORIGINAL_SUBJECT
from postroom.application.mailbox.codec import to_records
from postroom.application.ports.event_log import EventLogReader
from postroom.application.query_results import MessageDetail
from postroom.domain.envelope.build import open_envelope
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import (
    MessageDeadLettered,
    MessageExpired,
    MessageRedriven,
    MessageRescheduled,
    MessageSent,
)
from postroom.domain.names import message_id
from postroom.domain.record import Record
from postroom.domain.redrive.job import RedriveAdvanced, RedriveUndoAdvanced

SENDS_AFTER = 2
"""Number of commits after a copy in which the progress of its job may be, if their envelopes are large."""

_CHANGES = (MessageRedriven, MessageExpired, MessageDeadLettered, MessageRescheduled)


class RedriveLink(msgspec.Struct, frozen=True):
    """Relation of a redrive job to an event of a message.

    Arguments:
        job: id of the job.
        copy: id of the copy that the job sent, if the event is the dead-lettering of the original.
        original: id of the copied message, if this is the copy's first event.
    """

    job: str
    copy: str | None = None
    original: str | None = None


def find_redrive(log: EventLogReader, record: Record) -> RedriveLink | None:
    """Return the job that caused an event of a message; None if it was no job."""
    event = record.event
    cause = _cause(event) if isinstance(event, MessageSent) else None
    if cause is None and not isinstance(event, _CHANGES):
        return None
    before: dict[int, bytes] = {}
    for each in _commits_with(log, record):
        before[each.position] = each.stream
        progress = each.event
        if each.position <= record.position or not isinstance(
            progress, RedriveAdvanced | RedriveUndoAdvanced
        ):
            continue
        # The events of a job stand before its progress: of copies first, then of the messages it selected.
        job = message_id(progress.stream)
        count = progress.moved if isinstance(progress, RedriveAdvanced) else progress.restored
        distance = each.position - record.position
        if isinstance(event, MessageSent):
            is_copy = isinstance(progress, RedriveAdvanced) and count < distance <= 2 * count
            return RedriveLink(job, original=cause) if is_copy else None
        if distance <= count:
            is_original = isinstance(event, MessageDeadLettered) and isinstance(progress, RedriveAdvanced)
            copy = before.get(record.position - count) if is_original else None
            return RedriveLink(job, None if copy is None else message_id(copy))
        is_copy = isinstance(event, MessageExpired) and isinstance(progress, RedriveUndoAdvanced)
        return RedriveLink(job) if is_copy and distance <= 2 * count else None
    return None


def _cause(sent: MessageSent) -> str | None:
    try:
        return open_envelope(sent.envelope).causality_parent
    except InvalidRequest:  # altered
        return None


def _commits_with(log: EventLogReader, record: Record) -> Iterator[Record]:
    """Yield the records of an event's commit, and of others that may belong to the same job's step."""
    last: Record | None = None
    for commit in log.commits_of([record.position], envelopes=False):
        for last in to_records(commit):
            yield last
    if last is not None and isinstance(last.event, MessageSent):
        for commit in islice(log.commits(last.position, envelopes=False), SENDS_AFTER):
            yield from to_records(commit)


class DeadLettering(msgspec.Struct):
    """A dead-lettering: time, reason, attempt, error, and time of the redrive; None while it is dead."""

    at: str
    reason: str
    attempt: int
    last_error: str | None
    redriven_at: str | None = None


class Lineage(msgspec.Struct, frozen=True):
    """The origin of a message and its dead-letterings, oldest first.

    Arguments:
        original_subject: subject it was ingested from; its topic when it was sent directly.
    """

    original_subject: str
    dead_letterings: list[DeadLettering]


def lineage_of(detail: MessageDetail) -> Lineage:
    """Return the lineage of a message, from its history."""
    dead_letterings: list[DeadLettering] = []
    for entry in detail.history:
        facts: dict[str, Any] = entry.facts
        if entry.event == "MessageDeadLettered":
            dead_letterings.append(
                DeadLettering(entry.at, facts["reason"], facts["attempt"], facts.get("last_error"))
            )
        elif entry.event == "MessageRedriven" and dead_letterings:
            dead_letterings[-1].redriven_at = entry.at
    return Lineage(detail.item.custom_headers.get(ORIGINAL_SUBJECT, detail.topic), dead_letterings)
