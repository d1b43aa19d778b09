"""Log time: starts at the wall clock and advances by the monotonic clock (svc-mailbox I-17)."""

from datetime import UTC, datetime
from typing import NamedTuple

from postroom.domain.errors import ImplausibleClock
from postroom.domain.mailbox.state import Clock, Mailbox
from postroom.domain.message import MS
from postroom.domain.policy import DAY_MS

MAX_DOWNTIME = 7 * DAY_MS * MS
"""Longest downtime, in µs, accepted from the wall clock alone: the default retention of ready messages, so
that a wrong clock can't expire a message that was just sent."""


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
