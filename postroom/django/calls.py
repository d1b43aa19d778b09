"""Calls of tasks: their messages, the results that Django's framework shows, and tasks by name.

A message names its task by the path of its function. A message can have only code of the project imported: a
module that is not loaded must belong to an installed app, and the object must be a task.
"""

import builtins
import json
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pkgutil import resolve_name
from traceback import format_exception
from typing import Any

import msgspec
from django.apps import apps
from django.conf import settings
from django.utils import timezone

import postroom
from postroom.application.messages import MessageResult
from postroom.application.query_results import ENDED, HistoryEntry, MessageDetail
from postroom.application.telemetry import summarize
from postroom.django.framework import (
    InvalidTask,
    Task,
    TaskError,
    TaskResult,
    TaskResultStatus,
    normalize_json,
)
from postroom.domain.errors import InvalidRequest

JSON = "application/json"
PRIORITY_STEP = 20
"""Priorities of tasks, from -100 to 100, for each priority of messages, from 0 to 10."""
_NAMED = r"^((?:[^\W\d]\w*\.)*{name})(?::|$)"
"""The line of a traceback that names the class of the error, for a known class name."""


class TaskCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A task and its arguments: the payload of a message.

    Arguments:
        task: path of its function, such as `shop.tasks.charge`.
        priority: of the task, from -100 to 100.
        run_after: ISO 8601, or None.
    """

    task: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    priority: int = 0
    run_after: str | None = None

    @classmethod
    def of(cls, task: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> "TaskCall":
        """Return the call of a task.

        Raises: TypeError or ValueError for an argument that JSON can't have.
        """
        run_after = None if task.run_after is None else task.run_after.isoformat()
        # As the worker will read them: JSON has only text as keys, and no tuples.
        read = json.loads(_dump({"args": list(args), "kwargs": kwargs}))
        return cls(task.module_path, read["args"], read["kwargs"], task.priority, run_after)

    @classmethod
    def read(cls, payload: bytes) -> "TaskCall":
        """Return the call in a payload.

        Raises: InvalidRequest when it has none.
        """
        try:
            return msgspec.convert(json.loads(payload), cls)
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            raise InvalidRequest(
                "The payload is not the call of a task, a JSON object with task, args and kwargs: "
                f"{summarize(error)}."
            ) from error

    def encode(self) -> bytes:
        """Return the payload."""
        return _dump(msgspec.to_builtins(self))

    def find_task(self, queue: str) -> Any:
        """Return the task as it was enqueued.

        Raises: InvalidRequest when there is no such task.
        """
        task = find_task(self.task)
        try:
            run_after = None if self.run_after is None else datetime.fromisoformat(self.run_after)
            return task.using(priority=self.priority, queue_name=queue, run_after=run_after)
        except (InvalidTask, TypeError, ValueError) as error:
            raise InvalidRequest(f"The task {self.task} can't be used as enqueued: {error}") from error


def find_task(path: str) -> Any:
    """Return the task whose function has a path.

    Raises: InvalidRequest when there is none. It imports only modules of the project.
    """
    name, _, attribute = path.rpartition(".")
    module = sys.modules.get(name)
    if module is None:
        if not _is_of_project(name):
            raise InvalidRequest(
                f"The task {path[:200]!r} is in no installed app, so its module is not imported; add the app "
                "to INSTALLED_APPS, or import the module in the `ready` of one."
            )
        try:
            module = import_module(name)
        except (Exception, SystemExit) as error:  # whatever the module raises
            raise InvalidRequest(f"The task {path[:200]!r} can't be imported: {summarize(error)}.") from error
    task = vars(module).get(attribute)  # a module may import what it is asked for
    if not isinstance(task, Task) or task.module_path != path:
        raise InvalidRequest(
            f"{path[:200]!r} is not a task; a task is a function of a module with the decorator "
            f"{Task.__module__.removesuffix('.base')}.task."
        )
    return task


def _is_of_project(module: str) -> bool:
    """Return whether a module is loaded, or may be: it belongs to an installed app."""
    return module in sys.modules or apps.get_containing_app_config(module) is not None


def message_priority(priority: int) -> int:
    """Return the priority of the message of a task."""
    return round((priority + 100) / PRIORITY_STEP)


def encode_result(value: object) -> MessageResult | None:
    """Return what a task returned as the result of its message.

    Raises: TypeError or ValueError for a value that JSON can't have.
    """
    return None if value is None else MessageResult(_dump(value), JSON)


def _dump(value: object) -> bytes:
    return json.dumps(normalize_json(value), allow_nan=False, separators=(",", ":")).encode()


def read_time(text: str) -> datetime:
    """Return a time of the log as Django has it."""
    return _as_django_has_it(datetime.fromisoformat(text))


def from_microseconds(time_us: int) -> datetime:
    """Return a time in µs since 1970 UTC as Django has it."""
    return _as_django_has_it(datetime.fromtimestamp(0, UTC) + timedelta(microseconds=time_us))


def _as_django_has_it(time: datetime) -> datetime:
    """Return a time with a zone, or without one in the zone of the settings, as USE_TZ says."""
    naive: datetime = timezone.make_naive(time)
    return time if settings.USE_TZ else naive


def make_task_result(
    task: Any, id_: str, call: TaskCall, backend: str, enqueued_at: datetime, detail: MessageDetail | None
) -> Any:
    """Return the result of a task.

    Arguments:
        detail: its message; None if it was not sent yet.
    """
    history = [] if detail is None else detail.history
    deliveries = [each for each in history if each.event == "MessageReceived"]
    # Deliveries before a redrive do not count, nor do released ones.
    deliveries = deliveries[-detail.attempt :] if detail is not None and detail.attempt else []
    times = [read_time(each.at) for each in deliveries]
    is_ended = detail is not None and detail.status in ENDED
    result = TaskResult(
        task=task,
        id=id_,
        status=_status_of(detail),
        enqueued_at=enqueued_at,
        started_at=times[0] if times else None,
        last_attempted_at=times[-1] if times else None,
        finished_at=read_time(history[-1].at) if is_ended else None,
        args=call.args,
        kwargs=call.kwargs,
        backend=backend,
        errors=[] if detail is None else _errors_of(detail),
        worker_ids=[_worker_of(each) for each in deliveries],
    )
    if detail is not None and detail.result is not None and detail.result.content_type == JSON:
        set_field(result, "_return_value", json.loads(detail.result.payload))
    return result


def set_field(result: Any, name: str, value: object) -> None:
    """Set a field of a result, which is frozen for its users."""
    object.__setattr__(result, name, value)


def _status_of(detail: MessageDetail | None) -> Any:
    match None if detail is None else detail.status:
        case "in_flight":
            return TaskResultStatus.RUNNING
        case "acked":
            return TaskResultStatus.SUCCESSFUL
        case "dead" | "expired" | "archived":
            return TaskResultStatus.FAILED
    return TaskResultStatus.READY


def _worker_of(entry: HistoryEntry) -> str:
    return str(entry.facts.get("consumer") or "").partition("/")[0]


def error_of(error: BaseException) -> Any:
    """Return an error that a task has raised."""
    return TaskError(exception_class_path=_path_of(type(error)), traceback="".join(format_exception(error)))


def _path_of(kind: type) -> str:
    """Return the path of a class of errors, or of its first base that can be imported by it.

    `shop.models.Order.DoesNotExist` can't be, as `shop.models.Order` is no module.
    """
    return next(f"{each.__module__}.{each.__name__}" for each in kind.__mro__ if "." not in each.__qualname__)


def _errors_of(detail: MessageDetail) -> list[Any]:
    """Return the last error of a task, if it has failed."""
    reason = ": ".join(each for each in (detail.reason, detail.last_error) if each)
    if detail.last_error is None and _status_of(detail) != TaskResultStatus.FAILED:
        return []
    traceback = reason if detail.traceback is None else f"{detail.traceback}\n"  # as Python ends one
    path = _exception_path(detail.last_error or "", traceback)
    return [TaskError(exception_class_path=path, traceback=traceback)]


def _exception_path(error: str, traceback: str) -> str:
    """Return the path of the class of an error, as its traceback names it.

    Readers of the result import the module of the class, and an error text of several lines may look like the
    end of a traceback. So a path of a module outside the project is skipped.

    Arguments:
        error: the class's name, and the text of the error, as the failed delivery has it.
    """
    name = error.partition(":")[0]
    if name.isidentifier():
        # The traceback ends with the error; its causes, which may have the same name, come first.
        for path in reversed(re.findall(_NAMED.format(name=re.escape(name)), traceback, re.MULTILINE)):
            if "." in path and _is_of_project(path.rpartition(".")[0]):
                with suppress(Exception, SystemExit):  # whatever its module raises
                    kind = resolve_name(path)
                    if isinstance(kind, type) and issubclass(kind, BaseException):
                        return _path_of(kind)
        if name in postroom.__all__:
            return f"postroom.{name}"
        builtin = getattr(builtins, name, None)
        if isinstance(builtin, type) and issubclass(builtin, BaseException):
            return f"builtins.{name}"
    return "builtins.Exception"
