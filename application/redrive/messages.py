"""The messages of a redrive job with their outcomes, from the log."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from postroom.application.mailbox.codec import to_records
from postroom.application.messages import rfc3339
from postroom.application.ports.event_log import EventLogReader
from postroom.application.redrive_results import Outcome, RedriveMessage, RedriveMessages
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import MessageSent
from postroom.domain.names import message_id
from postroom.domain.record import Record
from postroom.domain.redrive.events import RedriveAdvanced, RedriveSkipped, RedriveUndoAdvanced
from postroom.domain.redrive.job import RedriveJob
from postroom.domain.redrive.spec import Action

EVENTS_AT_ONCE = 10
"""Number of a job's events whose commits are in memory at a time."""
_OUTCOMES: dict[Action, Outcome] = {"redrive": "redriven", "archive": "archived", "purge": "purged"}


class _Entry(msgspec.Struct, frozen=True):
    """A message of a job.

    Arguments:
        version: version of the job's event for the message.
        copy: stream id of the copy that was sent.
    """

    version: int
    stream: bytes
    outcome: Outcome
    reason: str | None
    copy: bytes | None
    at: int


def list_messages(
    log: EventLogReader, job: RedriveJob, outcome: Outcome | None, cursor: str | None, limit: int
) -> RedriveMessages:
    """Return a page of the messages of a job; see `Mailbox.list_redrive_messages`.

    Raises: InvalidRequest for a malformed cursor.
    """
    version, offset = _read_cursor(cursor)
    page: list[_Entry] = []
    next_cursor: str | None = None
    done = 0
    for entry in _entries(log, job, version, outcome):
        done = done + 1 if entry.version == version else 1
        is_before = entry.version == version and done <= offset
        if entry.version != version:
            version, offset = entry.version, 0
        if is_before or outcome not in (None, entry.outcome):
            continue
        if len(page) == limit:
            next_cursor = f"{version}.{done - 1}"
            break
        page.append(entry)
    sent = _first_events(log, page)
    return RedriveMessages([_describe(entry, sent.get(entry.stream)) for entry in page], next_cursor)


def _read_cursor(cursor: str | None) -> tuple[int, int]:
    """Return the version of a page's first event, and the number of its messages on earlier pages."""
    if cursor is None:
        return 0, 0
    version, _, offset = cursor.partition(".")
    if not (version.isascii() and version.isdigit() and offset.isascii() and offset.isdigit()):
        raise InvalidRequest(f"Invalid cursor {cursor[:40]!r}; use next_cursor of the previous page.")
    return int(version), int(offset)


def _entries(log: EventLogReader, job: RedriveJob, version: int, outcome: Outcome | None) -> Iterator[_Entry]:
    """Yield the messages of the job's events, starting at a version."""
    undone: dict[int, Record] = {}
    if job.undo_cursor:
        records = log.read_stream(job.job)
        undone = {each.event.cursor: each for each in records if isinstance(each.event, RedriveUndoAdvanced)}
    for record in _progress(log, job, version):
        event = record.event
        if isinstance(event, RedriveSkipped):
            yield _Entry(record.version, event.message, "skipped", event.reason, None, record.at)
        elif isinstance(event, RedriveAdvanced) and outcome != "skipped":
            yield from _changed(log, job, record, event, undone.get(record.version))


def _progress(log: EventLogReader, job: RedriveJob, version: int) -> Iterator[Record]:
    """Yield the records of the job, starting at a version; lazily, as a page needs few."""
    entries = sorted((each.version, each.position) for each in log.index_of([job.job]))
    positions = [position for number, position in entries if number >= version]
    for start in range(0, len(positions), EVENTS_AT_ONCE):
        yield from _read(log, positions[start : start + EVENTS_AT_ONCE]).values()


def _read(log: EventLogReader, positions: Sequence[int]) -> dict[int, Record]:
    """Return the records at positions, in the same order, without envelopes."""
    commits = log.commits_of(positions, envelopes=False)
    records = {each.position: each for commit in commits for each in to_records(commit)}
    return {position: records[position] for position in positions if position in records}


def _changed(
    log: EventLogReader, job: RedriveJob, record: Record, event: RedriveAdvanced, undo: Record | None
) -> Iterator[_Entry]:
    first = record.position - event.moved
    copies = event.moved if job.spec.sends_copies else 0
    records = _read(log, range(first - copies, record.position))
    restored: set[bytes] = set()
    if undo is not None and isinstance(undo.event, RedriveUndoAdvanced):
        positions = range(undo.position - undo.event.restored, undo.position)
        restored = {each.stream for each in _read(log, positions).values()}
    for position in range(first, record.position):
        if (changed := records.get(position)) is not None:
            outcome = "undone" if changed.stream in restored else _OUTCOMES[job.spec.action]
            copy = records.get(position - copies) if copies else None
            stream = None if copy is None else copy.stream
            yield _Entry(record.version, changed.stream, outcome, None, stream, record.at)


def _first_events(log: EventLogReader, page: Iterable[_Entry]) -> dict[bytes, MessageSent]:
    events = log.replay_first({entry.stream for entry in page})
    return {event.stream: event for event in events if isinstance(event, MessageSent)}


def _describe(entry: _Entry, sent: MessageSent | None) -> RedriveMessage:
    external = None if sent is None else sent.headers.message_id
    return RedriveMessage(
        message_id(entry.stream, external),
        None if sent is None else sent.topic,
        entry.outcome,
        entry.reason,
        None if entry.copy is None else message_id(entry.copy),
        rfc3339(entry.at) or "",
    )
