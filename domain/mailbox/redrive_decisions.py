"""Decisions of redrive jobs."""

from collections.abc import Callable, Sequence
from typing import Any

from postroom.domain.errors import IdempotencyConflict, InvalidRequest, NotFound, Saturated
from postroom.domain.event import Event
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.message import MS, READY, Message, MessageDeadLettered, MessageRedriven
from postroom.domain.message_decisions import expire
from postroom.domain.names import message_id
from postroom.domain.policy import SATURATED_RETRY_MS
from postroom.domain.redrive.commands import (
    AdvanceRedrive,
    ChangeRedrive,
    RedriveCommand,
    StartRedrive,
    UndoRedrive,
)
from postroom.domain.redrive.events import (
    RedriveAdvanced,
    RedriveCancelled,
    RedriveCompleted,
    RedrivePaused,
    RedriveResumed,
    RedriveStarted,
    RedriveUndoAdvanced,
    RedriveUndone,
    RedriveUndoStarted,
)
from postroom.domain.redrive.job import ENDED, JobStatus, RedriveJob
from postroom.domain.redrive.spec import RedriveSpec, is_dead

MAX_OPEN_JOBS = 32
"""Jobs that have not ended."""
SENDERS_SHARE = 10
"""A job leaves a tenth of the capacity of each shard to senders."""


def decide_redrive(command: RedriveCommand, mailbox: Mailbox, now: int) -> Sequence[Event]:
    """Return the events that a command of a job causes; see `postroom.domain.mailbox.decide`.

    Raises: a `Rejected` when the command is refused.
    """
    return _DECIDE[type(command)](command, mailbox, now)


def find_job(job: bytes, mailbox: Mailbox) -> RedriveJob:
    """Return a job of the mailbox, or raise NotFound."""
    if (state := mailbox.redrives.get(job)) is None:
        raise NotFound(
            f"Mailbox {mailbox.name} has no redrive job {message_id(job)}; postroom redrive list shows those "
            "that it has."
        )
    return state


def _start(command: StartRedrive, mailbox: Mailbox, now: int) -> list[Event]:
    existing = mailbox.redrives.get(command.job)
    if existing is not None:
        if existing.spec == command.spec:
            return []
        raise IdempotencyConflict(
            f"Redrive job {message_id(command.job)} exists with another specification; use another id."
        )
    if command.job in mailbox.messages:
        raise InvalidRequest(f"{message_id(command.job)} is the id of a message; use another for the job.")
    if mailbox.mode == "archive":
        raise InvalidRequest(f"Mailbox {mailbox.name} is an archive, which has no dead letters to redrive.")
    if sum(job.status not in ENDED for job in mailbox.redrives.values()) >= MAX_OPEN_JOBS:
        raise Saturated(
            f"Mailbox {mailbox.name} has its limit of {MAX_OPEN_JOBS} redrive jobs that have not ended; "
            "cancel one of them, or wait until it is done.",
            SATURATED_RETRY_MS,
        )
    if not command.cutoff <= mailbox.position:
        raise InvalidRequest(f"The cut-off {command.cutoff} is after the log's end at {mailbox.position}.")
    return [
        RedriveStarted(command.job, 1, now, command.spec, command.cutoff, command.matched, command.principal)
    ]


def _advance(command: AdvanceRedrive, mailbox: Mailbox, now: int) -> list[Event]:
    """Change the messages that are still selected; stop at the first one whose shard has no room."""
    job = mailbox.redrives.get(command.job)
    if job is None or job.status != JobStatus.RUNNING:
        return []
    events: list[Event] = []
    room: dict[tuple[str, int], int] = {}
    skipped, cursor, remaining = 0, job.cursor, job.remaining
    is_stopped = False
    for stream in command.messages:
        if remaining is not None and len(events) >= remaining:
            break
        message = mailbox.messages.get(stream)
        if not is_dead(message) or message is None or not job.cursor < message.last <= job.cutoff:
            skipped += 1
            continue
        if job.spec.action == "redrive" and not _take_room(room, message, mailbox):
            is_stopped = True
            break
        cursor = message.last
        events.append(_change(message, job.spec, mailbox, now))
    is_limited = remaining is not None and len(events) >= remaining
    if not is_stopped:
        cursor = max(cursor, command.cursor)
    version = job.version
    if events or skipped or cursor > job.cursor:
        version += 1
        events.append(RedriveAdvanced(job.job, version, now, cursor, len(events), skipped))
    if is_limited or (command.is_last and not is_stopped):
        events.append(RedriveCompleted(job.job, version + 1, now))
    return events


def _take_room(room: dict[tuple[str, int], int], message: Message, mailbox: Mailbox) -> bool:
    """Take a place in the shard of a message; return whether there was one."""
    key = (message.topic, message.shard)
    if key not in room:
        capacity = mailbox.policy(message.topic).shard_capacity
        shard = mailbox.topics[message.topic].shards.get(message.shard)
        room[key] = capacity - capacity // SENDERS_SHARE - (0 if shard is None else shard.size)
    room[key] -= 1
    return room[key] >= 0


def _change(message: Message, spec: RedriveSpec, mailbox: Mailbox, now: int) -> Event:
    if spec.action == "purge":
        return expire(message, "purged", now)
    if spec.action == "archive":
        return expire(message, "archived", now)
    policy = mailbox.policy(message.topic)
    due = now + spec.delay_ms * MS
    return MessageRedriven(
        message.stream, message.version + 1, now, due, due + policy.ready_retention_ms * MS
    )


def _change_job(command: ChangeRedrive, mailbox: Mailbox, now: int) -> list[Event]:
    """Pause, resume, cancel or undo a job; no event if it is in that status."""
    job = find_job(command.job, mailbox)
    place = (job.job, job.version + 1, now)
    match command.action, job.status:
        case "pause", JobStatus.RUNNING:
            return [RedrivePaused(*place, command.principal)]
        case "resume", JobStatus.PAUSED:
            return [RedriveResumed(*place, command.principal)]
        case "cancel", JobStatus.RUNNING | JobStatus.PAUSED:
            return [RedriveCancelled(*place, command.principal)]
        case "undo", JobStatus.UNDOING | JobStatus.UNDONE:
            return []
        case "undo", _ if job.spec.action == "redrive":
            return [RedriveUndoStarted(*place, command.principal)]
        case "undo", _:
            raise InvalidRequest(
                f"Redrive job {message_id(job.job)} is to {job.spec.action} messages, which can't be undone; "
                "only redrives can."
            )
        case ("pause", JobStatus.PAUSED) | ("resume", JobStatus.RUNNING) | ("cancel", JobStatus.CANCELLED):
            return []
    raise InvalidRequest(
        f"Redrive job {message_id(job.job)} is {job.status}, so it can't {command.action}; only jobs that "
        "have not ended can."
    )


def _undo(command: UndoRedrive, mailbox: Mailbox, now: int) -> list[Event]:
    """Make the messages dead letters again to which nothing happened since the job redrove them."""
    job = mailbox.redrives.get(command.job)
    if job is None or job.status != JobStatus.UNDOING or command.cursor < job.undo_cursor:
        return []
    events: list[Event] = []
    version = job.version
    if command.cursor > job.undo_cursor:
        for stream, position in command.messages:
            message = mailbox.messages.get(stream)
            if message is not None and message.status == READY and message.last == position:
                events.append(_restore(message, mailbox, now))
        version += 1
        retained = len(command.messages) - len(events)
        events.append(RedriveUndoAdvanced(job.job, version, now, command.cursor, len(events), retained))
    if command.is_last:
        events.append(RedriveUndone(job.job, version + 1, now))
    return events


def _restore(message: Message, mailbox: Mailbox, now: int) -> MessageDeadLettered:
    """Dead-letter a message as it was before; its attempts since the redrive are none."""
    expires_at = now + mailbox.policy(message.topic).dead_retention_ms * MS
    reason: Any = message.reason  # of the dead-lettering before, which the redrive left as it was
    return MessageDeadLettered(
        message.stream, message.version + 1, now, message.attempt, reason, message.last_error, expires_at
    )


_DECIDE: dict[type, Callable[[Any, Mailbox, int], Sequence[Event]]] = {
    StartRedrive: _start,
    AdvanceRedrive: _advance,
    ChangeRedrive: _change_job,
    UndoRedrive: _undo,
}
