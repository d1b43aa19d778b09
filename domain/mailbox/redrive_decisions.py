"""Decisions of redrive jobs."""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from postroom.domain.errors import IdempotencyConflict, InvalidRequest, NotFound, Saturated
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.mailbox.subscription_decisions import fan_out, refuse_send
from postroom.domain.mailbox.topic_decisions import is_in_the_clear
from postroom.domain.message import (
    DEAD,
    IN_FLIGHT,
    MS,
    READY,
    REPLACED,
    Message,
    MessageDeadLettered,
    MessageRedriven,
    MessageSent,
)
from postroom.domain.message_decider import expire, reschedule
from postroom.domain.names import message_id
from postroom.domain.policy import SATURATED_RETRY_MS
from postroom.domain.record import Event
from postroom.domain.redrive.job import (
    ENDED,
    AdvanceRedrive,
    ChangeRedrive,
    Copy,
    JobStatus,
    RedriveAdvanced,
    RedriveCancelled,
    RedriveCommand,
    RedriveCompleted,
    RedriveJob,
    RedrivePaused,
    RedriveResumed,
    RedriveSkipped,
    RedriveStarted,
    RedriveUndoAdvanced,
    RedriveUndone,
    RedriveUndoStarted,
    StartRedrive,
    UndoRedrive,
)
from postroom.domain.redrive.spec import RedriveSpec, SkipReason, is_dead

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
    if command.spec.destination is not None:
        refuse_send(command.spec.destination, mailbox)
    if mailbox.mode == "archive":
        raise InvalidRequest(
            f"Mailbox {mailbox.name} is an archive, which has no messages to {command.spec.action}."
        )
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
    sends: list[MessageSent] = []
    changes: list[Event] = []
    skips: list[tuple[bytes, SkipReason]] = []
    room: dict[tuple[str, int], int] = {}
    taken: set[tuple[str, str]] = set()
    cursor, remaining, skips_before = job.cursor, job.remaining, 0
    is_stopped = False
    has_copies = job.spec.sends_copies or command.copies
    copies = command.copies if has_copies else (None,) * len(command.messages)
    for stream, copy in zip(command.messages, copies, strict=True):
        if remaining is not None and len(changes) + len(skips) >= remaining:
            break
        message = mailbox.messages.get(stream)
        reason = _skip_reason(message, copy, job, mailbox)
        if reason is None and message is not None and _is_taken(message, job.spec, taken, mailbox):
            reason = "key_taken"
        if reason is not None or message is None:
            skips.append((stream, reason or "settled"))
            continue
        topic, shard = _place(message, copy, mailbox)
        if job.spec.action == "redrive" and not _take_room(room, topic, shard, mailbox, now):
            is_stopped = True
            break
        try:
            change = _change(message, job, mailbox, now)
        except InvalidRequest:
            skips.append((stream, "expires_first"))
            continue
        cursor, skips_before = job.spec.place_of(message), len(skips)
        if message.unique_key is not None:
            taken.add((message.topic, message.unique_key))
        if isinstance(copy, Copy):
            sends.append(_send(copy, message, shard, job.spec, mailbox, now))
        changes.append(change)
    if is_stopped:
        del skips[skips_before:]  # found again with the message that has no room
    else:
        cursor = max(cursor, command.cursor)
    is_limited = remaining is not None and len(changes) + len(skips) >= remaining
    is_complete = is_limited or (command.is_last and not is_stopped)
    # Selected messages whose records retention removed before the job reached them can't be named.
    unnamed = job.left - len(changes) - len(skips) if is_complete else 0
    skipped = len(skips) + max(0, unnamed)
    # Copies for subscriptions come first, as the job's events count the events directly before them.
    events = [*fan_out(sends, mailbox, now), *sends, *changes]
    version = job.version
    if changes or skipped or cursor > job.cursor:
        version += 1
        events.append(RedriveAdvanced(job.job, version, now, cursor, len(changes), skipped))
    for stream, why in skips:
        version += 1
        events.append(RedriveSkipped(job.job, version, now, stream, why))
    if is_complete:
        events.append(RedriveCompleted(job.job, version + 1, now))
    return events


def _skip_reason(
    message: Message | None, copy: Copy | SkipReason | None, job: RedriveJob, mailbox: Mailbox
) -> SkipReason | None:
    """Return the reason to skip a message, or None if it is changed."""
    if message is None:
        return "settled"
    if job.spec.selects_waiting:
        if message.status == DEAD:
            return "dead"
        if not job.spec.covers_status(message.status):
            return "in_flight" if message.status == IN_FLIGHT else "ready"
        if isinstance(copy, str):
            return copy
    elif not is_dead(message):
        return "redriven"
    if not job.cursor < job.spec.place_of(message) <= job.cutoff:
        return "replaced" if message.reason == REPLACED else "dead_again"
    if isinstance(copy, Copy):
        if is_in_the_clear(copy.topic, copy.headers, mailbox):
            return "unreadable"
        return "too_large" if len(copy.envelope) > mailbox.limits.frame_bytes else None
    return copy


def _is_taken(message: Message, spec: RedriveSpec, taken: set[tuple[str, str]], mailbox: Mailbox) -> bool:
    """Return whether another message has the unique key of one that would return to its queue.

    Arguments:
        taken: topics and keys of the messages that the command has redriven so far.
    """
    key = message.unique_key
    if key is None or spec.action != "redrive" or spec.sends_copies:
        return False
    return key in mailbox.topics[message.topic].unique or (message.topic, key) in taken


def _place(message: Message, copy: Copy | SkipReason | None, mailbox: Mailbox) -> tuple[str, int]:
    """Return the topic and the shard in which a message will be; messages of one shard stay in one."""
    if isinstance(copy, Copy):
        return copy.topic, message.shard % mailbox.shard_count(copy.topic)
    return message.topic, message.shard


def _take_room(room: dict[tuple[str, int], int], name: str, number: int, mailbox: Mailbox, now: int) -> bool:
    """Take a place in a shard of a topic; return whether there was one."""
    if (name, number) not in room:
        topic, capacity = mailbox.topics.get(name), mailbox.policy(name).shard_capacity
        if topic is None and not mailbox.has_room(now):
            return False
        shard = None if topic is None else topic.shards.get(number)
        room[name, number] = capacity - capacity // SENDERS_SHARE - (0 if shard is None else shard.size)
    room[name, number] -= 1
    return room[name, number] >= 0


def _send(
    copy: Copy, message: Message, shard: int, spec: RedriveSpec, mailbox: Mailbox, now: int
) -> MessageSent:
    """Send a copy as a sender would, but without idempotency and unique keys, which stay with the original.

    In the topic of a subscription, it counts as a subscription's copy, so no other subscription copies it.
    """
    policy = mailbox.policy(copy.topic)
    ttl_ms = policy.ready_retention_ms if copy.ttl_ms is None else min(policy.ready_retention_ms, copy.ttl_ms)
    due = now + spec.delay_ms * MS
    is_archived = policy.subscriptions_only
    return MessageSent(
        copy.message,
        1,
        now,
        copy.topic,
        shard,
        None if is_archived else due,
        0 if is_archived else due + ttl_ms * MS,
        copy.size,
        None,
        copy.payload_hash,
        copy.hash_chain,
        copy.headers,
        copy.envelope,
        copy.priority,
        message.sticky_key,
        copy_of=message_id(message.stream) if copy.topic in mailbox.subscriptions else None,
    )


def _change(message: Message, job: RedriveJob, mailbox: Mailbox, now: int) -> Event:
    """Return the event of a message that the job changes.

    Raises: InvalidRequest for a message to be rescheduled whose time to live ends before.
    """
    spec, policy = job.spec, mailbox.policy(message.topic)
    due = now + spec.delay_ms * MS if spec.at is None else max(now, spec.at * MS)
    if spec.action == "cancel":
        return expire(message, "cancelled", now, note=spec.note, principal=job.principal)
    if spec.action == "reschedule":
        return reschedule(message, due, policy, now, job.principal)
    if spec.action == "purge":
        return expire(message, "purged", now)
    if spec.action == "archive":
        return expire(message, "archived", now)
    if spec.sends_copies:
        return MessageDeadLettered(
            message.stream,
            message.version + 1,
            now,
            message.attempt,
            REPLACED,
            message.last_error,
            message.expires_at,
        )
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
    """Make the messages that the job redrove dead letters again, unless something happened to them since."""
    job = mailbox.redrives.get(command.job)
    if job is None or job.status != JobStatus.UNDOING or command.cursor < job.undo_cursor:
        return []
    removals: list[Event] = []
    restored: list[Event] = []
    advance: list[Event] = []
    version, cursor = job.version, command.cursor
    # All messages of progress that retention removed from the log are settled.
    settled = job.moved - job.restored - job.retained - len(command.messages) if command.is_last else 0
    if cursor == job.undo_cursor and settled > 0:
        cursor = version
    if cursor > job.undo_cursor:
        for (stream, position), original in zip_longest(command.messages, command.originals):
            message = mailbox.messages.get(stream)
            if message is None or message.status != READY or message.last != position:
                continue
            if original is None:
                restored.append(_restore(message, message.reason, mailbox, now))
                continue
            before = mailbox.messages.get(original.stream)
            if before is not None and is_dead(before) and before.last == original.position:
                removals.append(expire(message, "undone", now))
                restored.append(_restore(before, original.reason, mailbox, now))
        version += 1
        retained = len(command.messages) - len(restored) + max(0, settled)
        advance.append(RedriveUndoAdvanced(job.job, version, now, cursor, len(restored), retained))
    if command.is_last:
        advance.append(RedriveUndone(job.job, version + 1, now))
    return [*removals, *restored, *advance]


def _restore(message: Message, reason: Any, mailbox: Mailbox, now: int) -> MessageDeadLettered:
    """Dead-letter a message again as it was before the redrive, for its former reason."""
    expires_at = now + mailbox.policy(message.topic).dead_retention_ms * MS
    return MessageDeadLettered(
        message.stream, message.version + 1, now, message.attempt, reason, message.last_error, expires_at
    )


_DECIDE: dict[type, Callable[[Any, Mailbox, int], Sequence[Event]]] = {
    StartRedrive: _start,
    AdvanceRedrive: _advance,
    ChangeRedrive: _change_job,
    UndoRedrive: _undo,
}
