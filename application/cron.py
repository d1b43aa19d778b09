"""Ticks of cron expressions, computed by cronsim, and of intervals."""

from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from postroom.application.extras import explain_missing_extra
from postroom.domain.arguments import check_any_text
from postroom.domain.errors import InvalidRequest
from postroom.domain.schedule import ScheduleSpec

MAX_TICKS = 1_000
"""Missed ticks that are sent at most; earlier ones are left out."""
LATE_US = 60_000_000
"""Age above which a schedule that skips missed ticks does not send one."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_US = timedelta(microseconds=1)
NextTick = Callable[[int], int | None]
"""Return the first tick after a log time, both in µs, or None."""


def cron_ticks(expression: str, timezone: str = "UTC") -> Callable[[datetime], datetime]:
    """Return a function that returns the first tick of a cron expression after a time.

    Arguments:
        expression: five fields (minute, hour, day, month, day of the week), or six with seconds first.
        timezone: IANA name of the zone in which the expression is read. Around changes of the clock, a job at
            a fixed time runs once, as in Debian's cron.

    Raises: InvalidRequest for an invalid expression, one that has no ticks, and an unknown zone.
    """
    from zoneinfo import ZoneInfo  # slow to import

    with explain_missing_extra():
        from cronsim import CronSim, CronSimError
    try:
        zone = ZoneInfo(check_any_text("timezone", timezone))
    except (ValueError, OSError, KeyError):
        raise InvalidRequest(
            f"Unknown time zone {timezone!r:.80}; use an IANA name such as Europe/Berlin."
        ) from None

    def next_tick(after: datetime) -> datetime:
        return next(CronSim(expression, after.astimezone(zone)))

    try:
        check_any_text("cron", expression)
        next_tick(datetime.now(zone))
    except (CronSimError, StopIteration) as error:
        reason = str(error) or "it has no ticks"
        raise InvalidRequest(
            f"{expression!r:.80} is not a cron expression: {reason}; write minute, hour, day, month and day "
            "of the week, such as '*/5 * * * *'."
        ) from error
    return next_tick


def ticks_of(spec: ScheduleSpec, anchor: int) -> NextTick:
    """Return a function that returns the first tick of a schedule after a log time.

    Arguments:
        anchor: log time (µs) from which an interval counts.

    Raises: InvalidRequest as `cron_ticks`; MissingExtra for a cron expression without cronsim.
    """
    if spec.cron is None:
        every = (spec.every_ms or 0) * 1_000
        return lambda after: anchor + ((after - anchor) // every + 1) * every
    following = cron_ticks(spec.cron, spec.timezone)

    def next_tick(after: int) -> int | None:
        try:
            return (following(_EPOCH + after * _US) - _EPOCH) // _US
        except (StopIteration, OverflowError):
            return None

    return next_tick


def due_ticks(spec: ScheduleSpec, next_tick: NextTick, through: int, now: int) -> list[int]:
    """Return the ticks that are to be sent now, in order; the others until now are left out.

    The last ticks are found from the end, so that a clock that jumps by years takes no longer.

    Arguments:
        through: log time (µs) through which all ticks are done.
        now: log time, µs.
    """
    most = MAX_TICKS if spec.missed == "all" else 1
    span = most * 1_000_000
    while True:
        start, ticks = max(through, now - span), deque[int](maxlen=most)
        tick = next_tick(start)
        while tick is not None and tick <= now:
            ticks.append(tick)
            tick = next_tick(tick)
        if len(ticks) == most or start == through:
            break
        span *= 4
    if spec.missed == "skip" and ticks and now - ticks[0] > LATE_US:
        return []
    return list(ticks)
