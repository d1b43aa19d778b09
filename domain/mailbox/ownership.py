"""Ownership of a mailbox: how a take-over is decided and changes the state, and at which log time.

Log time starts at the wall clock and advances by the monotonic clock (svc-mailbox I-17).
"""

from datetime import UTC, datetime
from typing import NamedTuple

from postroom.domain.errors import Fenced, ImplausibleClock, InvalidRequest, WrongMode
from postroom.domain.mailbox.commands import TakeOwnership, Truncate
from postroom.domain.mailbox.events import (
    Clock,
    LogTruncated,
    MailboxCreated,
    MailboxSettingsChanged,
    OwnershipTaken,
)
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.message import IN_FLIGHT, MS
from postroom.domain.names import mailbox_stream
from postroom.domain.policy import DAY_MS
from postroom.domain.record import Event
from postroom.domain.settings import MailboxSettings, change_settings, check_settings

MAX_DOWNTIME = 7 * DAY_MS * MS
"""Longest downtime, in µs, accepted from the wall clock alone: the default retention of ready messages, so
that a wrong clock can't expire a message that was just sent."""
EXPIRY_GRACE_MS = 5 * 60 * 1_000
"""Pause of expiry after log time restarted at a wall clock that may be wrong (ADR 0029)."""


class Anchor(NamedTuple):
    """Log time of an owner at one reading of the monotonic clock.

    Arguments:
        at: log time, µs.
        uptime: reading of the monotonic clock, µs.
        continues: whether log time continues from the previous owner's.
    """

    at: int
    uptime: int
    continues: bool


def anchor(mailbox: Mailbox, *, wall: int, boot: str, uptime: int, accept_clock: bool = False) -> Anchor:
    """Return the log time at which a new owner of a mailbox starts.

    On the same boot, the monotonic clock measures how long the mailbox was closed, regardless of the wall
    clock. After a reboot, log time restarts at the wall clock, but not before the last event. The downtime is
    then based on the wall clock alone; if that is wrong, messages expire early.

    Arguments:
        wall, boot, uptime: current readings of the machine's clocks (µs).
        accept_clock: accept any downtime.

    Raises: ImplausibleClock when the downtime would exceed `MAX_DOWNTIME`, or log time by uptime is that far
        ahead of both the last event and the wall clock.
    """
    last, last_at = mailbox.clock, mailbox.at
    at = log_time(last, last_at, wall=wall, boot=boot, uptime=uptime)
    if _is_same_boot(last, boot, uptime):
        if at - last_at > MAX_DOWNTIME and at - wall > MAX_DOWNTIME and not accept_clock:
            raise ImplausibleClock(
                f"By the uptime of this machine it is {_utc(at)}, but its clock says {_utc(wall)}, and the "
                f"last record of mailbox {mailbox.name} is of {_utc(last_at)}. Set the clock; if the uptime "
                "is right, open the mailbox with --accept-clock (accept_clock=True)."
            )
        return Anchor(at, uptime, continues=True)
    if last is not None and wall - uptime - last_at > MAX_DOWNTIME and not accept_clock:
        raise ImplausibleClock(
            f"The clock of this machine says {_utc(wall)}, but the last record of mailbox {mailbox.name} is "
            f"of {_utc(last_at)}, and the machine was restarted since. Set the clock; if it is right, open "
            "the mailbox with --accept-clock (accept_clock=True)."
        )
    return Anchor(at, uptime, continues=False)


def log_time(last: Clock | None, last_at: int, *, wall: int, boot: str, uptime: int) -> int:
    """Return the current log time (µs) of a mailbox, whoever owns it; see `anchor`.

    Arguments:
        last: the last owner's reading of the clocks; None for a mailbox that had no owner.
        last_at: log time of the last record.
        wall, boot, uptime: current readings of the machine's clocks (µs).
    """
    if last is not None and _is_same_boot(last, boot, uptime):
        return max(last.at + uptime - last.uptime, last_at)
    return max(wall, last_at)


def _is_same_boot(last: Clock | None, boot: str, uptime: int) -> bool:
    return last is not None and last.boot == boot and uptime >= last.uptime


def _utc(us: int) -> str:
    return datetime.fromtimestamp(us // 1_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def take_ownership(command: TakeOwnership, mailbox: Mailbox, now: int) -> list[Event]:
    """Return the events of a take-over, of a new mailbox or another owner."""
    epoch = mailbox.epoch + 1 if command.epoch is None else command.epoch
    if epoch <= mailbox.epoch:
        raise Fenced(mailbox.name, epoch, mailbox.epoch)
    stream = mailbox_stream(mailbox.name)
    version = mailbox.version + 1
    events: list[Event] = []
    if version == 1:
        settings = change_settings(MailboxSettings(), command.settings)
        events.append(MailboxCreated(stream, version, now, command.name, command.mode or "queue", settings))
        version += 1
    elif command.mode is not None and command.mode != mailbox.mode:
        raise WrongMode(mailbox.name, mailbox.mode, command.mode)
    elif mailbox.stored_settings.is_stored:
        check_settings(mailbox.name, mailbox.settings, command.settings)
        if mailbox.settings.subject_policies and not command.can_encrypt:
            raise InvalidRequest(
                f"Mailbox {mailbox.name} encrypts messages of data subjects; open it with the settings of "
                "erasure, which name the key store."
            )
    else:  # a log from before settings were stored: assume the former owner's
        settings = change_settings(mailbox.settings, command.settings)
        events.append(MailboxSettingsChanged(stream, version, now, settings))
        version += 1
    ownership = OwnershipTaken(
        stream,
        version,
        now,
        epoch,
        command.owner,
        command.boot,
        command.uptime,
        command.clock_continues,
    )
    return [*events, ownership]


def truncate(command: Truncate, mailbox: Mailbox, now: int) -> list[Event]:
    """Return the event that records a removal of old commits; none if it is recorded already.

    There is none either while a subscription has yet to copy messages of these commits.
    """
    if command.through <= mailbox.truncated_through or command.through > mailbox.copied_through:
        return []
    stream = mailbox_stream(mailbox.name)
    return [LogTruncated(stream, mailbox.version + 1, now, command.through, command.link)]


def owner_changed(mailbox: Mailbox, event: OwnershipTaken) -> None:
    """Evolve a mailbox by a change of its owner."""
    if not mailbox.stored_settings.is_stored:
        mailbox.configure(mailbox.stored_settings.after(event), event.at)
    mailbox.version = event.version
    mailbox.epoch = event.epoch
    mailbox.owner = event.owner
    mailbox.clock = Clock(event.boot, event.uptime, event.at)
    if not event.clock_continues and event.epoch > 1:
        mailbox.expiry_resumes_at = event.at + EXPIRY_GRACE_MS * MS
        for message in mailbox.messages.values():
            if message.status == IN_FLIGHT:
                message.due = event.at + message.hidden
                mailbox.set_timer(message)
        for topic in mailbox.topics.values():
            topic.window.drop_until(mailbox.at - topic.policy.replay_window_ms * MS)
            topic.window.restart(event.at)


def truncated(mailbox: Mailbox, event: LogTruncated) -> None:
    """Evolve a mailbox by the removal of old commits."""
    mailbox.version = event.version
    mailbox.truncated_through = event.through
