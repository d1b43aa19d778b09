"""Messages sent at the ticks of schedules, each tick once whatever the number of processes."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple

import msgspec

from postroom.application.messages import NewMessage, Sent
from postroom.application.metrics import Metric, counter
from postroom.application.telemetry import logger
from postroom.application.threads import cancel_and_wait
from postroom.application.tracing import correlate
from postroom.domain.errors import Fenced, IdempotencyConflict, Rejected, Saturated, Unavailable
from postroom.domain.policy import OutageBackoff, backoff_ms

CHECK_SECONDS = 30.0
"""Longest sleep, after which log time is read again: another owner may have another clock."""
LATE = timedelta(minutes=1)
"""Age at which a tick counts as missed."""
SECOND = timedelta(seconds=1)
"""Ticks are at least a second apart."""
BACKOFF = OutageBackoff(100, 5_000)
NextTick = Callable[[datetime], datetime]
"""Return the first tick after a time; both have a time zone."""
SendMessage = Callable[[NewMessage], Awaitable[Sent]]
Missed = Literal["last", "all", "none"]


class Schedule(NamedTuple):
    """A message and the ticks at which it is sent.

    Arguments:
        name: unique in the mailbox; the message's id is `{name}@{time of the tick}`.
        message: without an id.
        missed: which ticks are sent late, after the process was suspended or the mailbox could not be used:
            the last one, all, or none.
    """

    name: str
    next_tick: NextTick
    message: NewMessage
    missed: Missed = "last"


class Scheduler:
    """Sender of the messages of schedules.

    The message of a tick has an id made of the schedule's name and the tick's time, and the mailbox accepts
    an id once: run as many schedulers as availability needs. Ticks while none runs are not sent.

    Arguments:
        now: returns the log time of the mailbox's owner, with a time zone: the same for all processes, and
            independent of their wall clocks.
    """

    def __init__(
        self,
        send: SendMessage,
        schedules: Sequence[Schedule],
        *,
        now: Callable[[], Awaitable[datetime]],
    ) -> None:
        self._send = send
        self._schedules = schedules
        self._now = now
        self._stopping = asyncio.Event()
        self.sent = 0
        self.failed = 0
        """Attempts to send that failed; they are repeated, unless the mailbox refused the message."""

    def collect_metrics(self) -> list[Metric]:
        """Return the metrics."""
        return [
            counter("postroom_schedule_sent", "Messages sent at the times of schedules.", self.sent),
            counter("postroom_schedule_failed", "Attempts to send that failed.", self.failed),
        ]

    def stop(self) -> None:
        """Make `run` return."""
        self._stopping.set()

    async def run(self) -> None:
        """Send messages until stopped.

        Raises: Fenced when the mailbox was taken over.
        """
        running = [asyncio.create_task(self._run(schedule)) for schedule in self._schedules]
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            done, _ = await asyncio.wait([*running, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await cancel_and_wait(*running, stopping)

    async def _run(self, schedule: Schedule) -> None:
        now = last = await self._read_time(schedule)
        while True:
            last = min(last, now)  # log time may be less at another owner, after a restart of the machine
            tick = schedule.next_tick(last)
            if tick > now:
                await asyncio.sleep(min((tick - now).total_seconds(), CHECK_SECONDS))
            else:
                if schedule.missed != "all":
                    tick = _last_tick(schedule.next_tick, tick, now)
                if schedule.missed != "none" or now - tick < LATE:
                    await self._send_tick(schedule, tick)
                last = tick
            now = await self._read_time(schedule)

    async def _read_time(self, schedule: Schedule) -> datetime:
        failures = 0
        while True:
            try:
                return await self._now()
            except (Saturated, Unavailable) as error:
                failures += 1
                pause_ms = backoff_ms(BACKOFF, failures, random.random())
                logger().retry(
                    "schedule.time_unknown", schedule=schedule.name, error=str(error), pause_ms=pause_ms
                )
                await asyncio.sleep(pause_ms / 1_000)

    async def _send_tick(self, schedule: Schedule, tick: datetime) -> None:
        id_ = f"{schedule.name}@{tick.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
        message = msgspec.structs.replace(schedule.message, message_id=id_)
        with correlate():
            await self._send_until_answered(message, id_)

    async def _send_until_answered(self, message: NewMessage, id_: str) -> None:
        failures = 0
        while True:
            try:
                sent = await self._send(message)
            except (Fenced, asyncio.CancelledError):
                raise
            except (Saturated, Unavailable) as error:
                failures += 1
                self.failed += 1
                pause_ms = backoff_ms(BACKOFF, failures, random.random())
                logger().retry("schedule.send_failed", message_id=id_, error=str(error), pause_ms=pause_ms)
                await asyncio.sleep(pause_ms / 1_000)
            except IdempotencyConflict:  # a process with another payload for this schedule was first
                logger().warning("schedule.payload_differs", message_id=id_)
                return
            except Rejected as error:
                self.failed += 1
                logger().error("schedule.refused", message_id=id_, error=str(error))
                return
            else:
                self.sent += not sent.duplicate
                logger().info("schedule.sent", message_id=id_, duplicate=sent.duplicate)
                return


def _last_tick(next_tick: NextTick, tick: datetime, now: datetime) -> datetime:
    """Return the last tick until `now`, given one, by bisection: a clock may jump by years."""
    after = now
    while after - tick.astimezone(UTC) >= SECOND and next_tick(tick) <= now:
        middle = tick.astimezone(UTC) + (after - tick.astimezone(UTC)) / 2
        following = next_tick(middle)
        if following <= now:
            tick = following
        else:
            after = middle
    return tick
