"""Periodic sends: their times by cron expressions, and their wiring."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from zoneinfo import ZoneInfo

import msgspec
from cronsim import CronSim, CronSimError
from uuid_utils.compat import uuid7

from postroom.adapters.system.clock import SystemClock
from postroom.application.extras import explain_missing_extra
from postroom.application.mailbox.message_factory import MessageFactory
from postroom.application.messages import NewMessage
from postroom.application.operations.mailbox import Mailbox
from postroom.application.schedule import Missed, Schedule, Scheduler
from postroom.domain.arguments import check_any_text, check_text
from postroom.domain.errors import InvalidRequest
from postroom.domain.names import DEFAULT_MAILBOX

MAX_NAME_CHARS = 200


class ScheduleSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Configuration of a schedule: `[schedules.NAME]` of the settings file.

    Arguments:
        cron: five fields (minute, hour, day, month, day of the week), or six with seconds first.
        timezone: IANA name of the zone in which `cron` is read.
        attrs, sticky_key, ttl_seconds: see `NewMessage`.
        missed: see `Schedule`.
    """

    cron: str
    topic: str
    payload: str = ""
    timezone: str = "UTC"
    content_type: str | None = None
    attrs: Mapping[str, str] = {}
    sticky_key: str | None = None
    ttl_seconds: int = 0
    missed: Missed = "last"


def make_schedules(schedules: Mapping[str, ScheduleSettings]) -> list[Schedule]:
    """Return schedules from their settings, by name.

    Raises: InvalidRequest naming the schedule that is invalid, MissingExtra when cronsim is not installed.
    """
    with explain_missing_extra():
        pass

    factory = MessageFactory(DEFAULT_MAILBOX, SystemClock().wall, uuid7)
    made = []
    for name, settings in schedules.items():
        check_text("The name of a schedule", name, 1, MAX_NAME_CHARS)
        message = NewMessage(
            topic=settings.topic,
            payload=settings.payload.encode(),
            content_type=settings.content_type,
            attrs=settings.attrs,
            sticky_key=settings.sticky_key,
            ttl_seconds=settings.ttl_seconds,
        )
        try:
            next_tick = cron_ticks(settings.cron, settings.timezone)
            factory.from_message(message)  # a message that is invalid would be refused at every tick
        except InvalidRequest as error:
            raise InvalidRequest(f"Schedule {name}: {error}") from error
        made.append(Schedule(name, next_tick, message, settings.missed))
    return made


def make_scheduler(mailbox: Mailbox, schedules: Sequence[Schedule]) -> Scheduler:
    """Return the scheduler of some schedules that sends to a mailbox."""

    async def now() -> datetime:
        return datetime.fromisoformat((await mailbox.get_backlog()).as_of)

    return Scheduler(mailbox.send_message, schedules, now=now)


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
