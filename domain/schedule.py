"""Schedules: what they send and when, their commands and events, and their state (ADR 0120)."""

from typing import Literal, get_args

import msgspec

from postroom.domain.arguments import check_choice, check_int, check_text, check_type
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import DEFAULT_PRIORITY, MAX_PRIORITY
from postroom.domain.names import TOPIC_TEXT, check_topic
from postroom.domain.policy import MAX_DURATION_MS
from postroom.domain.record import Event

MAX_SCHEDULES = 1_000
"""Schedules of a mailbox."""
MAX_PAYLOAD_BYTES = 16 << 10
"""Bytes of the payload of a schedule, which the owner keeps in memory."""
MAX_HEADERS = 100
MIN_INTERVAL_MS = 1_000
RESERVED_HEADERS = ("schedule", "scheduled_at")
"""Headers that each message of a schedule has: the name of the schedule, and the time of the tick."""

Missed = Literal["skip", "last", "all"]
"""Which of the ticks that passed while nobody sent them are sent: none, the last one, or all."""


class ScheduleSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a schedule sends, and when; it has either `cron` or `every_ms`.

    Arguments:
        topic: to which its messages are sent.
        cron: five fields (minute, hour, day, month, day of the week), or six with seconds first.
        timezone: IANA name of the zone in which `cron` is read.
        every_ms: interval, from 1,000 ms, counted from when it was set.
        missed: `skip` sends no tick that is more than a minute late, or after which another one is due by
            now; `last` sends the last of the missed ticks; `all` the last 1,000 of them.
        payload: up to 16 KiB.
        headers: custom headers (`attrs`) of its messages, up to 100.
        content_type, sticky_key, priority: of its messages.
    """

    topic: str
    cron: str | None = None
    timezone: str = "UTC"
    every_ms: int | None = None
    missed: Missed = "last"
    payload: bytes = b""
    headers: dict[str, str] = {}
    content_type: str | None = None
    sticky_key: str | None = None
    priority: int = DEFAULT_PRIORITY

    def validate(self) -> "ScheduleSpec":
        """Return this specification.

        Raises: InvalidRequest naming the first value of a wrong type or out of bounds. Whether the expression
            and the time zone exist is checked by the owner.
        """
        if check_topic(self.topic).startswith("$"):
            raise InvalidRequest(f"Topic {self.topic} is reserved; send to another one.")
        if (self.cron is None) == (self.every_ms is None):
            raise InvalidRequest("A schedule needs either a cron expression or an interval.")
        if self.cron is not None and not check_text("cron", self.cron, 1).isprintable():
            raise InvalidRequest("A cron expression must have no control characters or line breaks.")
        if self.every_ms is not None:
            check_int("every_ms", self.every_ms, MIN_INTERVAL_MS, MAX_DURATION_MS)
        check_text("timezone", self.timezone, 1)
        if self.cron is None and self.timezone != "UTC":
            raise InvalidRequest("An interval has no time zone; leave the time zone out.")
        check_choice("missed", self.missed, get_args(Missed))
        if len(check_type("payload", self.payload, bytes)) > MAX_PAYLOAD_BYTES:
            raise InvalidRequest(
                f"The payload of a schedule must have at most {MAX_PAYLOAD_BYTES} bytes; it had "
                f"{len(self.payload)}. Send a reference to the data instead."
            )
        headers = check_type("The headers of a schedule", self.headers, dict)
        if len(headers) > MAX_HEADERS:
            raise InvalidRequest(f"A schedule must have at most {MAX_HEADERS} headers.")
        for name, value in headers.items():
            check_text("The name of a header", name, 1)
            check_text(f"The value of header {name}", value)
            if name in RESERVED_HEADERS:
                raise InvalidRequest(f"Each message of a schedule has its own header {name}; leave it out.")
        for field in ("content_type", "sticky_key"):
            if (text := getattr(self, field)) is not None:
                check_text(field, text)
        check_int("priority", self.priority, 0, MAX_PRIORITY)
        return self

    @property
    def timing(self) -> tuple[str | None, str, int | None]:
        """Return what determines its ticks."""
        return self.cron, self.timezone, self.every_ms

    def describe(self) -> str:
        """Return when it sends, such as `*/5 * * * * Europe/Madrid` or `every 30s`."""
        if self.every_ms is None:
            return f"{self.cron}{'' if self.timezone == 'UTC' else f' {self.timezone}'}"
        units = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1))
        unit, size = next(each for each in units if self.every_ms % each[1] == 0)
        return f"every {self.every_ms // size}{unit}"


def check_schedule(value: object) -> ScheduleSpec:
    """Return a specification whose fields are valid, or raise InvalidRequest."""
    return check_type("The schedule", value, ScheduleSpec).validate()


def check_schedule_name(value: object) -> str:
    """Return a name of a schedule, or raise InvalidRequest."""
    name = check_text("The name of a schedule", value, 1)
    if not TOPIC_TEXT.match(name):
        raise InvalidRequest(
            f"The name of a schedule must have no spaces, control characters, *, ? or brackets; it was "
            f"{name[:80]!r}."
        )
    return name


class Schedule(msgspec.Struct, frozen=True):
    """State of a schedule.

    Arguments:
        stream: id of its events, 16 bytes; a later schedule of the same name has another id.
        code_spec: the specification that a worker set last; None if none did.
        anchor: log time (µs) from which an interval counts.
        through: log time (µs) through which all ticks are done.
        last_run: log time (µs) at which it sent its last message; 0 if it sent none.
        last_message: stream id of that message.
        runs: number of messages that it sent.
        created_at, changed_at: log time, µs.
    """

    name: str
    stream: bytes
    version: int
    spec: ScheduleSpec
    code_spec: ScheduleSpec | None
    anchor: int
    through: int
    created_at: int
    changed_at: int
    is_paused: bool = False
    last_run: int = 0
    last_message: bytes = b""
    runs: int = 0


class ScheduleSet(Event, frozen=True, gc=False):
    """A schedule was created or changed.

    Arguments:
        from_code: whether a worker set it, as its code says.
        principal: to whom the capability of the caller was issued; None for the mailbox's own user.
    """

    schedule: str
    spec: ScheduleSpec
    from_code: bool = False
    principal: str | None = None


class SchedulePaused(Event, frozen=True, gc=False):
    """An operator paused a schedule.

    Arguments:
        principal: see `ScheduleSet`.
    """

    schedule: str
    principal: str | None = None


class ScheduleResumed(Event, frozen=True, gc=False):
    """An operator resumed a schedule; its ticks count from now on.

    Arguments:
        principal: see `ScheduleSet`.
    """

    schedule: str
    principal: str | None = None


class ScheduleRan(Event, frozen=True, gc=False):
    """A schedule sent a message, by an event before this one in its commit, or left out ticks.

    Arguments:
        tick: log time (µs) through which its ticks are done; if it sent the message of a tick, the tick's
            time.
        message: stream id of the message; None if ticks were left out.
        principal: who ran it besides its ticks; see `ScheduleSet`.
    """

    schedule: str
    tick: int
    message: bytes | None = None
    principal: str | None = None


class ScheduleDeleted(Event, frozen=True, gc=False):
    """An operator deleted a schedule; the messages that it sent stay.

    Arguments:
        principal: see `ScheduleSet`.
    """

    schedule: str
    principal: str | None = None


ScheduleEvent = ScheduleSet | SchedulePaused | ScheduleResumed | ScheduleRan | ScheduleDeleted


def evolve(schedules: dict[str, Schedule], event: ScheduleEvent) -> None:
    """Apply an event to the schedules of a mailbox, in place."""
    name, at = event.schedule, event.at
    if isinstance(event, ScheduleDeleted):
        del schedules[name]
        return
    before = schedules.get(name)
    if before is None:
        assert isinstance(event, ScheduleSet), f"{type(event).__name__} came before ScheduleSet"
        code = event.spec if event.from_code else None
        schedules[name] = Schedule(name, event.stream, event.version, event.spec, code, at, at, at, at)
        return
    changes: dict[str, object] = {"version": event.version}
    if isinstance(event, ScheduleRan):
        changes["through"] = event.tick
        if event.message is not None:
            changes |= {"last_run": at, "last_message": event.message, "runs": before.runs + 1}
    else:
        changes["changed_at"] = at
    if isinstance(event, ScheduleSet):
        changes["spec"] = event.spec
        if event.from_code:
            changes["code_spec"] = event.spec
        if event.spec.timing != before.spec.timing:
            changes |= {"anchor": at, "through": at}
    elif isinstance(event, SchedulePaused):
        changes["is_paused"] = True
    elif isinstance(event, ScheduleResumed):
        changes |= {"is_paused": False, "through": at}
    schedules[name] = msgspec.structs.replace(before, **changes)
