"""Decisions of schedules: their changes, and the messages that they send (ADR 0120)."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from postroom.domain.errors import InvalidRequest, NotFound, Saturated
from postroom.domain.mailbox.commands import (
    DeleteSchedule,
    PauseSchedule,
    ResumeSchedule,
    RunSchedule,
    ScheduleCommand,
    SetSchedule,
)
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.mailbox.subscription_decisions import refuse_send
from postroom.domain.names import describe_choices
from postroom.domain.policy import SATURATED_RETRY_MS
from postroom.domain.record import Event
from postroom.domain.schedule import (
    MAX_SCHEDULES,
    Schedule,
    ScheduleDeleted,
    SchedulePaused,
    ScheduleRan,
    ScheduleResumed,
    ScheduleSet,
)
from postroom.domain.subject import find_policy


def decide_schedule(command: ScheduleCommand, mailbox: Mailbox, now: int) -> Sequence[Event]:
    """Return the events that a command of a schedule causes, but for the message that it sends.

    Raises: a `Rejected` when the command is refused.
    """
    return _DECIDE[type(command)](command, mailbox, now)


def find_schedule(name: str, mailbox: Mailbox) -> Schedule:
    """Return a schedule of the mailbox, or raise NotFound."""
    if (schedule := mailbox.schedules.get(name)) is None:
        raise unknown_schedule(name, mailbox.name, mailbox.schedules)
    return schedule


def unknown_schedule(name: str, mailbox: str, choices: Collection[str]) -> NotFound:
    """Return the error for a schedule that a mailbox does not have; `choices` are those it has."""
    return NotFound(f"Mailbox {mailbox} has no schedule {name}; {describe_choices(name, choices)}")


def _set(command: SetSchedule, mailbox: Mailbox, now: int) -> list[Event]:
    """Create or change a schedule; no event if it has this specification, or if its code did not change."""
    name, spec = command.schedule, command.spec
    existing = mailbox.schedules.get(name)
    if existing is not None:
        former = existing.code_spec if command.from_code else existing.spec
        if former == spec:
            return []
    elif len(mailbox.schedules) >= MAX_SCHEDULES:
        raise Saturated(
            f"Mailbox {mailbox.name} has its limit of {MAX_SCHEDULES} schedules; delete one of them.",
            SATURATED_RETRY_MS,
        )
    _check_topic(spec.topic, mailbox)
    place = (command.stream, 1) if existing is None else (existing.stream, existing.version + 1)
    return [ScheduleSet(*place, now, name, spec, command.from_code, command.principal)]


def _check_topic(topic: str, mailbox: Mailbox) -> None:
    """Raise InvalidRequest for a topic to which schedules must not send."""
    refuse_send(topic, mailbox)
    if find_policy(mailbox.settings.subject_policies, topic) is not None:
        raise InvalidRequest(
            f"Mailbox {mailbox.name} encrypts the messages of topic {topic}, and the log has the payload of "
            "a schedule in the clear; send to another topic."
        )


def _pause(command: PauseSchedule, mailbox: Mailbox, now: int) -> list[Event]:
    schedule = find_schedule(command.schedule, mailbox)
    if schedule.is_paused:
        return []
    return [SchedulePaused(schedule.stream, schedule.version + 1, now, schedule.name, command.principal)]


def _resume(command: ResumeSchedule, mailbox: Mailbox, now: int) -> list[Event]:
    schedule = find_schedule(command.schedule, mailbox)
    if not schedule.is_paused:
        return []
    return [ScheduleResumed(schedule.stream, schedule.version + 1, now, schedule.name, command.principal)]


def _run(command: RunSchedule, mailbox: Mailbox, now: int) -> list[Event]:
    """Mark a tick as done; no event if it is not due, or if the schedule has changed since."""
    if command.version is None:
        schedule, through = find_schedule(command.schedule, mailbox), None
    else:
        current, through = mailbox.schedules.get(command.schedule), command.through
        if current is None or (current.stream, current.version) != (command.stream, command.version):
            return []
        schedule = current
        if schedule.is_paused or not schedule.through < command.through <= now:
            return []
    sent = None
    if command.send is not None:
        _check_topic(command.send.topic, mailbox)
        sent = command.send.message
    if through is None:
        through = schedule.through
    place = (schedule.stream, schedule.version + 1, now)
    return [ScheduleRan(*place, schedule.name, through, sent, command.principal)]


def _delete(command: DeleteSchedule, mailbox: Mailbox, now: int) -> list[Event]:
    schedule = find_schedule(command.schedule, mailbox)
    return [ScheduleDeleted(schedule.stream, schedule.version + 1, now, schedule.name, command.principal)]


_DECIDE: dict[type, Callable[[Any, Mailbox, int], Sequence[Event]]] = {
    SetSchedule: _set,
    PauseSchedule: _pause,
    ResumeSchedule: _resume,
    RunSchedule: _run,
    DeleteSchedule: _delete,
}
