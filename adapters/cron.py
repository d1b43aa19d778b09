"""Ticks of cron expressions, computed by cronsim."""

from collections.abc import Callable
from datetime import datetime
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from postroom.domain.arguments import check_any_text
from postroom.domain.errors import InvalidRequest


def cron_ticks(expression: str, timezone: str = "UTC") -> Callable[[datetime], datetime]:
    """Return a function that returns the first tick of a cron expression after a time.

    Arguments:
        expression: five fields (minute, hour, day, month, day of the week), or six with seconds first.
        timezone: IANA name of the zone in which the expression is read. Around changes of the clock, a job at
            a fixed time runs once, as in Debian's cron.

    Raises: InvalidRequest for an invalid expression, one that has no ticks, and an unknown zone.
    """
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
