"""Schedules: handlers that change and list them, and the worker that sends their messages (ADR 0120)."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from logging import ERROR
from typing import NamedTuple

import uuid_utils

from postroom.application.cron import LATE_US, MAX_TICKS, NextTick, due_ticks, ticks_of
from postroom.application.extras import MissingExtra
from postroom.application.mailbox.administer import execute
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.mailbox.message_factory import MessageFactory
from postroom.application.mailbox.owner_tasks import StepWorker
from postroom.application.messages import NewMessage, Sent, rfc3339
from postroom.application.reports import LastResult, ScheduleReport
from postroom.application.telemetry import logger
from postroom.application.tracing import correlate
from postroom.domain.arguments import check_optional_text, check_type
from postroom.domain.errors import FrameTooLarge, InvalidRequest, PostroomError, Rejected, Saturated
from postroom.domain.mailbox.commands import (
    DeleteSchedule,
    PauseSchedule,
    ResumeSchedule,
    RunSchedule,
    ScheduleCommand,
    Send,
    SetSchedule,
)
from postroom.domain.mailbox.schedule_decisions import find_schedule
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.message import DEAD, IN_FLIGHT, READY
from postroom.domain.names import message_id, tick_stream
from postroom.domain.schedule import Schedule, ScheduleSpec, check_schedule, check_schedule_name

_RESULTS: dict[int, LastResult] = {READY: "waiting", IN_FLIGHT: "in_flight", DEAD: "dead"}


CHECK_SECONDS = 30.0
"""Longest sleep before a tick: timers of some systems stand still while the machine is suspended."""
BATCH = 100
"""Ticks that are decided together; it bounds the wait of senders."""
MAX_RETRY_SECONDS = 10.0
"""Longest pause before a tick that failed is tried again."""


class _Retry(NamedTuple):
    """A schedule that failed: its version, failures in a row, and the loop's time of the next attempt."""

    version: int
    failures: int
    at: float


class ScheduleRunner(StepWorker):
    """Worker that sends the message of each tick, and continues the work of an earlier owner.

    The tick is marked as done in the commit of the message, so each is sent once, whoever owns the mailbox
    next. It sleeps until the next tick, and without schedules until one is set.
    """

    failure = "schedule.failed"

    def __init__(self, engine: MailboxEngine, factory: MessageFactory) -> None:
        super().__init__(engine)
        self._factory = factory
        self._ticks: dict[bytes, tuple[ScheduleSpec, int, NextTick]] = {}
        """By stream of the schedule: what they were made from, and the ticks."""
        self._next: dict[bytes, tuple[int, int | None]] = {}
        """By stream of the schedule: its version, and its next tick."""
        self._retries: dict[bytes, _Retry] = {}
        """By stream of the schedule."""

    async def _run_once(self, *, is_changed: bool) -> float | None:
        return await self.send_due(is_patient=True)

    async def send_due(self, *, is_patient: bool = False) -> float | None:
        """Send the ticks that are due; return the seconds until the next one, None without any.

        Arguments:
            is_patient: leave out schedules that failed until their pause is over.
        """
        schedules = list(self._engine.mailbox.schedules.values())
        streams = {each.stream for each in schedules}
        self._ticks = {stream: each for stream, each in self._ticks.items() if stream in streams}
        self._next = {stream: each for stream, each in self._next.items() if stream in streams}
        self._retries = {stream: each for stream, each in self._retries.items() if stream in streams}
        now, time, pauses, due = self._engine.now(), asyncio.get_running_loop().time(), [], []
        for each in schedules:
            version, tick = self._next.get(each.stream, (None, None))
            retry = self._retries.get(each.stream)
            if each.is_paused:
                continue
            if version == each.version and (tick is None or tick > now):
                pauses.append(_seconds_until(tick, now))
            elif is_patient and retry is not None and retry.version == each.version and retry.at > time:
                pauses.append(retry.at - time)
            else:
                due.append(each)
        for start in range(0, len(due), BATCH):
            # At once, so that the ticks of many schedules are in few commits.
            pauses += await asyncio.gather(*map(self._attempt_step, due[start : start + BATCH]))
        return min(pauses, default=None)

    async def _attempt_step(self, schedule: Schedule) -> float:
        """Send the ticks of a schedule that are due; return the seconds until its next one, or a retry."""
        stream, before = schedule.stream, self._retries.pop(schedule.stream, None)
        if before is not None and before.version != schedule.version:
            before = None
        try:
            return await self._step(schedule, is_retry=before is not None)
        except Exception as error:
            failures = 1 if before is None else before.failures + 1
            pause = self._failed(error, schedule=schedule.name) * (1 << min(failures - 1, 10))
            pause = min(pause, MAX_RETRY_SECONDS)
            self._retries[stream] = _Retry(
                schedule.version, failures, asyncio.get_running_loop().time() + pause
            )
            return pause

    def lateness(self) -> dict[str, float]:
        """Return the time since the first tick of each schedule that is due and not sent, in seconds.

        A schedule whose ticks can't be computed counts as due since its last tick.
        """
        now, lateness = self._engine.now(), {}
        for each in self._engine.mailbox.schedules.values():
            tick: int | None = None
            if not each.is_paused:
                try:
                    tick = self._next_tick(each)
                except PostroomError:
                    tick = each.through
            lateness[each.name] = 0.0 if tick is None else max(0, now - tick) / 1_000_000
        return lateness

    async def _step(self, schedule: Schedule, *, is_retry: bool) -> float:
        """Send the ticks of a schedule that are due; return the seconds until its next one.

        Arguments:
            is_retry: send one tick only, as the others may fail, too.
        """
        now, tick = self._engine.now(), self._next_tick(schedule)
        if tick is None or tick > now:
            return _seconds_until(tick, now)
        find = partial(due_ticks, schedule.spec, self._ticks_of(schedule), schedule.through, now)
        due = await asyncio.to_thread(find) if now - tick > LATE_US else find()
        sent = due[:1] if is_retry else due
        try:
            if not due:
                command = RunSchedule(schedule.name, None, schedule.stream, schedule.version, now)
                await execute(self._engine, command)
            for start in range(0, len(sent), BATCH):
                await self._send(schedule, sent[start : start + BATCH], schedule.version + start)
        finally:
            if tick not in due and self._has_advanced(schedule):
                left_out = logger().warning if len(due) == MAX_TICKS else logger().info
                left_out(
                    "schedule.ticks_left_out",
                    mailbox=self._engine.name,
                    schedule=schedule.name,
                    since=rfc3339(tick),
                    before=rfc3339(due[0] if due else now),
                )
        return 0

    def _has_advanced(self, before: Schedule) -> bool:
        """Return whether ticks of a schedule have been done since a state of it."""
        after = self._engine.mailbox.schedules.get(before.name)
        return after is not None and after.stream == before.stream and after.through > before.through

    async def _send(self, schedule: Schedule, ticks: Sequence[int], version: int) -> None:
        """Send the messages of ticks.

        A tick whose message the mailbox refuses is left out, unless it only lacks room.

        Arguments:
            version: of the schedule before the first of them.
        """
        commands = []
        for number, tick in enumerate(ticks):
            send = make_send(schedule, tick, self._factory, tick_stream(schedule.stream, tick))
            command = RunSchedule(schedule.name, send, schedule.stream, version + number, tick)
            commands.append(command)
        for command, answer in zip(commands, await self._engine.submit(commands), strict=True):
            if isinstance(answer, Saturated):
                raise answer
            if not isinstance(answer, Rejected):
                continue
            logger().retry(
                "schedule.refused",
                ERROR,
                mailbox=self._engine.name,
                schedule=schedule.name,
                error=str(answer),
            )
            await execute(
                self._engine,
                RunSchedule(schedule.name, None, schedule.stream, command.version, command.through),
            )
            return  # the others were made for another version, and come again

    def _next_tick(self, schedule: Schedule) -> int | None:
        cached = self._next.get(schedule.stream)
        if cached is None or cached[0] != schedule.version:
            tick = self._ticks_of(schedule)(schedule.through)
            cached = self._next[schedule.stream] = schedule.version, tick
        return cached[1]

    def _ticks_of(self, schedule: Schedule) -> NextTick:
        cached = self._ticks.get(schedule.stream)
        if cached is None or cached[:2] != (schedule.spec, schedule.anchor):
            made = ticks_of(schedule.spec, schedule.anchor)
            cached = self._ticks[schedule.stream] = schedule.spec, schedule.anchor, made
        return cached[2]


def _seconds_until(tick: int | None, now: int) -> float:
    return CHECK_SECONDS if tick is None else min((tick - now) / 1_000_000, CHECK_SECONDS)


def make_send(schedule: Schedule, tick: int, factory: MessageFactory, stream: bytes) -> Send:
    """Return the command that sends the message of a schedule.

    Arguments:
        tick: log time, µs.
        stream: id of the message, 16 bytes.
    """
    with correlate():
        return factory.from_message(_message(schedule.name, schedule.spec, tick, message_id(stream))).command


def _message(name: str, spec: ScheduleSpec, tick: int, id_: str | None = None) -> NewMessage:
    return NewMessage(
        spec.topic,
        spec.payload,
        attrs={**spec.headers, "schedule": name, "scheduled_at": rfc3339(tick) or ""},
        content_type=spec.content_type,
        sticky_key=spec.sticky_key,
        priority=spec.priority,
        message_id=id_,
    )


class Schedules:
    """The handlers of schedules, for the owner."""

    _engine: MailboxEngine
    _factory: MessageFactory
    _runner: ScheduleRunner | None = None

    def run_schedules(self) -> None:
        """Run the worker that sends until the engine is closed, or have it check the schedules now."""
        if self._runner is None:
            self._runner = ScheduleRunner(self._engine, self._factory)
            self._engine.tasks.append(asyncio.create_task(self._runner.run(), name="schedules"))
        self._runner.wake()

    def schedule_lateness(self) -> dict[str, float]:
        """Return the lateness of each schedule; see `ScheduleRunner.lateness`."""
        return {} if self._runner is None else self._runner.lateness()

    async def send_due_ticks(self) -> None:
        """Return when all ticks that are due are sent."""
        if self._runner is not None:
            while await self._runner.send_due() == 0:
                pass

    async def set_schedule(
        self, name: str, schedule: ScheduleSpec, /, *, from_code: bool = False, principal: str | None = None
    ) -> ScheduleReport:
        """Create a schedule, or change it; see `Mailbox.set_schedule`."""
        check_schedule_name(name)
        spec = check_schedule(schedule)
        check_type("from_code", from_code, bool)
        check_optional_text("principal", principal)
        await asyncio.to_thread(ticks_of, spec, 0)
        most = self._engine.mailbox.limits.frame_bytes
        size = len(self._factory.from_message(_message(name, spec, self._engine.now())).command.envelope)
        if size > most:
            raise FrameTooLarge(
                f"The message of schedule {name} is {size} bytes with its envelope; a frame holds at most "
                f"{most}. Send a reference to the data instead."
            )
        await self._submit_schedule(SetSchedule(name, spec, uuid_utils.uuid7().bytes, from_code, principal))
        return report_schedule(find_schedule(name, self._engine.mailbox), self._engine.mailbox)

    async def list_schedules(self) -> list[ScheduleReport]:
        """Return the schedules; see `Mailbox.list_schedules`."""
        await self._engine.check_ownership()
        return report_schedules(self._engine.mailbox)

    async def pause_schedule(self, name: str, /, *, principal: str | None = None) -> ScheduleReport:
        """Pause a schedule; see `Mailbox.pause_schedule`."""
        check_optional_text("principal", principal)
        return await self._change_schedule(PauseSchedule(check_schedule_name(name), principal))

    async def resume_schedule(self, name: str, /, *, principal: str | None = None) -> ScheduleReport:
        """Resume a schedule; see `Mailbox.resume_schedule`."""
        check_optional_text("principal", principal)
        return await self._change_schedule(ResumeSchedule(check_schedule_name(name), principal))

    async def run_schedule(self, name: str, /, *, principal: str | None = None) -> Sent:
        """Send the message of a schedule now; see `Mailbox.run_schedule`."""
        check_optional_text("principal", principal)
        schedule = find_schedule(check_schedule_name(name), self._engine.mailbox)
        stream = uuid_utils.uuid7().bytes
        send = make_send(schedule, self._engine.now(), self._factory, stream)
        await self._submit_schedule(RunSchedule(name, send, principal=principal))
        return Sent(message_id(stream), duplicate=False)

    async def delete_schedule(self, name: str, /, *, principal: str | None = None) -> None:
        """Delete a schedule; see `Mailbox.delete_schedule`."""
        check_optional_text("principal", principal)
        await self._submit_schedule(DeleteSchedule(check_schedule_name(name), principal))

    async def _change_schedule(self, command: PauseSchedule | ResumeSchedule) -> ScheduleReport:
        await self._submit_schedule(command)
        return report_schedule(find_schedule(command.schedule, self._engine.mailbox), self._engine.mailbox)

    async def _submit_schedule(self, command: ScheduleCommand) -> None:
        await execute(self._engine, command)
        self.run_schedules()


def report_schedule(schedule: Schedule, mailbox: Mailbox) -> ScheduleReport:
    """Return the report of a schedule of a mailbox."""
    spec, next_run = schedule.spec, None
    if not schedule.is_paused:
        # A process that reads may lack cronsim, or know other time zones than the owner.
        with suppress(MissingExtra, InvalidRequest):
            next_run = ticks_of(spec, schedule.anchor)(schedule.through)
    return ScheduleReport(
        schedule.name,
        spec.topic,
        spec.cron,
        spec.timezone,
        spec.every_ms,
        spec.missed,
        len(spec.payload),
        spec.headers,
        spec.content_type,
        spec.sticky_key,
        spec.priority,
        schedule.is_paused,
        schedule.runs,
        rfc3339(schedule.last_run or None),
        message_id(schedule.last_message) if schedule.last_message else None,
        rfc3339(next_run),
        schedule.code_spec is not None,
        schedule.code_spec is not None and schedule.code_spec != spec,
        rfc3339(schedule.created_at) or "",
        rfc3339(schedule.changed_at) or "",
        _result_of(schedule, mailbox),
    )


def _result_of(schedule: Schedule, mailbox: Mailbox) -> LastResult | None:
    """Return the status of the last message that a schedule sent; see `ScheduleReport.last_result`."""
    if not schedule.last_message:
        return None
    message = mailbox.messages.get(schedule.last_message)
    return "settled" if message is None else _RESULTS[message.status]


def report_schedules(mailbox: Mailbox) -> list[ScheduleReport]:
    """Return the reports of all schedules, sorted by name."""
    return [report_schedule(each, mailbox) for _, each in sorted(mailbox.schedules.items())]
