"""Log time: the wall clock at first, then only what a monotonic clock adds to it (svc-mailbox I-17)."""

from typing import NamedTuple

from postroom.domain.mailbox.state import Clock

SKEW_TOLERANCE = 120 * 1_000_000
"""How far, in µs, the wall clock may be off before log time starts anew (svc-mailbox I-17: >= 2 minutes)."""


class Anchor(NamedTuple):
    """Where log time stands for a new owner, and whether it went on from the owner before."""

    at: int
    continues: bool


def anchor(last: Clock | None, last_at: int, *, wall: int, boot: str, uptime: int) -> Anchor:
    """Find out the log time at which a new owner starts.

    On the same boot, the monotonic clock tells exactly how long the mailbox was closed, whatever the wall
    clock
    did: deadlines stay what they were. After a reboot, or when that time is more than the tolerance away
        from the
    wall clock, log time starts at the wall clock, and messages in flight get their full visibility again.

    Arguments:
        last, last_at: what the owner before noted, and the log time of the last event (µs).
        wall, boot, uptime: what the machine's clocks say now (µs).
    """
    if last is not None and last.boot == boot and uptime >= last.uptime:
        continued = last.at + uptime - last.uptime
        if continued >= last_at and abs(continued - wall) <= SKEW_TOLERANCE:
            return Anchor(continued, continues=True)
    return Anchor(max(wall, last_at), continues=False)
