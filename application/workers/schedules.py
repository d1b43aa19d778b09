"""Schedules of a worker: the decorator's arguments, and their registration in a mailbox when it starts."""

import inspect
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from postroom.application.operations.mailbox import Mailbox
from postroom.application.received_messages import ReceivedMessage
from postroom.application.telemetry import logger
from postroom.application.workers.retry import Duration, read_duration
from postroom.domain.errors import Forbidden, InvalidRequest
from postroom.domain.policy import MAX_DURATION_MS
from postroom.domain.schedule import MIN_INTERVAL_MS, ScheduleSpec


class Interval(NamedTuple):
    """An interval of a schedule; `every` makes one."""

    every_ms: int


def every(interval: Duration) -> Interval:
    """Return an interval for `Worker.schedule`, from one second on, which counts from when it is first set.

    Arguments:
        interval: text such as `30s`, or a timedelta.

    Raises: InvalidRequest for a duration that is malformed or out of range.
    """
    return Interval(read_duration("interval", interval, MIN_INTERVAL_MS, MAX_DURATION_MS))


def read_times(when: object) -> dict[str, str | int]:
    """Return the fields of a specification that say when it sends."""
    if isinstance(when, Interval):
        return {"every_ms": when.every_ms}
    if isinstance(when, str):
        return {"cron": when}
    raise InvalidRequest(
        f"A schedule is a cron expression or every(...), not of type {type(when).__name__}; write "
        "'*/5 * * * *' or every(\"30s\")."
    )


def as_handler(function: Any) -> Any:
    """Return a handler of messages; a function without parameters is called without the message."""
    try:
        if not callable(function) or inspect.signature(function).parameters:
            return function
    except ValueError:  # some built-in functions, which `make_handler` refuses
        return function

    async def call_async(message: ReceivedMessage) -> Any:
        return await function()

    def call(message: ReceivedMessage) -> Any:
        return function()

    handler: Any = call_async if inspect.iscoroutinefunction(function) else call
    handler.__qualname__ = getattr(function, "__qualname__", type(function).__qualname__)
    return handler


async def register_schedules(worker: str, mailbox: Mailbox, schedules: Mapping[str, ScheduleSpec]) -> None:
    """Set the schedules of a worker, unless an operator changed them since the same code was set.

    Raises: Forbidden when the token may not set one that is missing or different.
    """
    for name, spec in schedules.items():
        try:
            report = await mailbox.set_schedule(name, spec, from_code=True)
        except Forbidden as error:
            reports = {each.name: each for each in await mailbox.list_schedules()}
            if name in reports:  # its operators decide
                logger().info("worker.schedule_kept", schedule=name, reason=str(error))
                continue
            times = f"--cron {shlex.quote(spec.cron)}" if spec.cron else f"--every {spec.every_ms}ms"
            zone = "" if spec.timezone == "UTC" else f" --timezone {shlex.quote(spec.timezone)}"
            command = f"postroom schedule set {shlex.quote(name)} {shlex.quote(spec.topic)} {times}{zone}"
            raise Forbidden(
                f"Mailbox {mailbox.name} has no schedule {name}, and the token of worker {worker} lacks "
                f"`admin` of the whole mailbox to create it; create it with `{command}`.",
                error.reason,
            ) from error
        logger().info(
            "worker.schedule_registered",
            schedule=name,
            times=report.describe(),
            next_run=report.next_run,
            overridden=report.overridden,
        )
