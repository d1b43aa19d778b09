"""`TaskWorker`: a worker whose handler runs the tasks of a backend."""

import asyncio
import inspect
import os
import socket
from collections.abc import Iterable
from contextvars import ContextVar
from functools import partial
from typing import Any

from asgiref.sync import async_to_sync
from django.db import close_old_connections, reset_queries
from django.utils import timezone
from django.utils.module_loading import autodiscover_modules

from postroom.application.messages import MessageResult
from postroom.application.operations.mailbox import Mailbox
from postroom.application.query_results import MessageDetail
from postroom.application.received_messages import ReceivedMessage
from postroom.application.telemetry import logger, summarize
from postroom.application.workers.consumer import enable_policy
from postroom.application.workers.handler import Handle
from postroom.application.workers.retry import Duration, Reject, RetryLater
from postroom.application.workers.sending import current_mailbox
from postroom.application.workers.worker import STOP_MS, Worker, WorkerCounts
from postroom.django.backend import PostroomBackend
from postroom.django.calls import (
    TaskCall,
    encode_result,
    error_of,
    from_microseconds,
    make_task_result,
    set_field,
)
from postroom.django.database import end_transactions
from postroom.django.framework import (
    TaskContext,
    TaskResultStatus,
    normalize_json,
    task_finished,
    task_started,
)
from postroom.domain.errors import Forbidden, InvalidRequest, PoisonMessage, PostroomError
from postroom.domain.names import describe_choices

VISIBILITY = "1m"
OUTBOX_SECONDS = 10.0
"""Time for the owner of the mailbox to send what is in the outbox."""
OUTBOX_PAUSE = 0.02
POLICY_SECONDS = 5.0
"""Time to learn the number of attempts of a topic."""
_detail: ContextVar[MessageDetail | None] = ContextVar("postroom_task_message", default=None)
"""The message of a task that was delivered before, with its history."""


class TaskWorker(Worker):
    """Worker that runs the tasks of queues of a backend, each in a thread, with connections of its own.

    Arguments:
        queues: names of queues; by default all of `QUEUES`.
        concurrency: maximum number of tasks of a queue that run at once.
        visibility: time after which the tasks of a killed worker run again; see `Worker.consumer`.

    Raises: InvalidTaskBackend for settings that are malformed; InvalidRequest without queues, or for a name
        that is not of `QUEUES`.
    """

    def __init__(
        self,
        backend: PostroomBackend,
        queues: Iterable[str] = (),
        *,
        concurrency: int = 1,
        visibility: Duration = VISIBILITY,
    ) -> None:
        backend.ensure_valid()
        autodiscover_modules("tasks")
        super().__init__(f"django {socket.gethostname()} {os.getpid()}")
        self._backend = backend
        self._mailbox: Mailbox | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopped = False
        for queue in _choose_queues(backend, [*queues]):
            self.consumer(
                queue,
                concurrency=concurrency,
                timeout=None,
                visibility=visibility,
                middlewares=[_with_history],
                results=True,
            )(partial(run_task, self))

    async def run(self, mailbox: Mailbox, *, once: bool = False, stop_ms: int = STOP_MS) -> WorkerCounts:
        self._loop, self._mailbox, self._is_stopped = asyncio.get_running_loop(), mailbox, False
        if not once:
            return await super().run(mailbox, stop_ms=stop_ms)
        handled = failed = 0
        while True:
            await self._wait_for_outbox()
            counts = await super().run(mailbox, once=True, stop_ms=stop_ms)
            handled, failed = handled + counts.handled, failed + counts.failed
            if counts == WorkerCounts() or self._is_stopped:
                return WorkerCounts(handled, failed)

    def stop(self) -> None:
        self._is_stopped = True
        super().stop()

    async def _wait_for_outbox(self) -> None:
        """Wait until the owner has sent what was committed, so that a run with `once` finds it."""
        loop = asyncio.get_running_loop()
        end = loop.time() + OUTBOX_SECONDS
        while await asyncio.to_thread(self._backend.has_waiting, self.topics):
            if loop.time() >= end or self._is_stopped:
                logger().warning("worker.outbox_not_sent", worker=self.name, database=self._backend.database)
                return
            await asyncio.sleep(OUTBOX_PAUSE)

    async def _prepare(self, mailbox: Mailbox) -> None:
        """Enable priorities of the topics, unless a section of the settings disables them."""
        await super()._prepare(mailbox)
        try:
            await enable_policy(mailbox, self.topics, "priorities")
        except (Forbidden, InvalidRequest) as error:  # an operator may set them
            logger().warning("worker.priorities_not_set", worker=self.name, error=str(error))

    def run_message(self, message: ReceivedMessage) -> MessageResult | None:
        """Run the task of a message, and return its result.

        Raises: Reject for a message that is not the call of a task; RuntimeError for a task
            that leaves a transaction open; what the task raises.
        """
        try:
            call = TaskCall.read(message.payload)
            task = call.find_task(message.topic)
        except InvalidRequest as error:
            raise Reject(str(error)) from error
        result = self._running(task, call, message)
        task_started.send_robust(type(self._backend), task_result=result)
        try:
            arguments = [TaskContext(task_result=result)] if task.takes_context else []
            function = async_to_sync(task.func) if _is_async(task.func) else task.func
            value = normalize_json(function(*arguments, *result.args, **result.kwargs))
            answer = encode_result(value)
            if aliases := end_transactions():
                raise RuntimeError(  # a class that the result names without a traceback
                    f"The task left a transaction of the database {', '.join(aliases)} open, which was "
                    "rolled back; leave transactions before the task returns."
                )
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if self._is_final(message, error):
                result.errors[:] = [error_of(error)]
                self._finish(result, TaskResultStatus.FAILED)
            raise
        set_field(result, "_return_value", value)
        self._finish(result, TaskResultStatus.SUCCESSFUL)
        return answer

    def _running(self, task: Any, call: TaskCall, message: ReceivedMessage) -> Any:
        """Return the result of a task that begins to run."""
        detail = _detail.get()
        if detail is not None:
            result = self._backend.result_of(detail)
        else:
            enqueued_at = from_microseconds(message.published_at_us or 0)
            result = make_task_result(task, message.message_id, call, self._backend.alias, enqueued_at, None)
            now = timezone.now()
            set_field(result, "started_at", now)
            set_field(result, "last_attempted_at", now)
            result.worker_ids.extend([self.name] * message.attempt)
        set_field(result, "status", TaskResultStatus.RUNNING)
        return result

    def _finish(self, result: Any, status: Any) -> None:
        set_field(result, "finished_at", timezone.now())
        set_field(result, "status", status)
        task_finished.send_robust(type(self._backend), task_result=result)

    def _is_final(self, message: ReceivedMessage, error: BaseException) -> bool:
        """Return whether a message becomes a dead letter by this failure; False if that is unknown."""
        if isinstance(error, PoisonMessage) or self._loop is None or self._mailbox is None:
            return isinstance(error, PoisonMessage)
        if isinstance(error, RetryLater):
            return False
        asking = asyncio.run_coroutine_threadsafe(self._mailbox.get_topic_policy(message.topic), self._loop)
        try:
            return message.attempt >= asking.result(POLICY_SECONDS).max_attempts
        except (PostroomError, TimeoutError) as failure:
            logger().warning("worker.policy_unknown", topic=message.topic, error=summarize(failure))
            return False


def run_task(worker: TaskWorker, message: ReceivedMessage) -> MessageResult | None:
    """Run the task of a message, as Django runs a request: with no connection that is broken or too old."""
    reset_queries()
    close_old_connections()
    try:
        return worker.run_message(message)
    finally:
        end_transactions()  # of a task that raised; the next ones of the thread would be within them
        close_old_connections()


def _with_history(next_: Handle) -> Handle:
    """Read the history of a message that was delivered before, for the result that its task sees."""

    async def handle(message: ReceivedMessage) -> Any:
        mailbox = current_mailbox.get()
        detail = None
        if message.attempt > 1 and mailbox is not None:
            try:
                detail = await mailbox.get_message(message.message_id)
            except PostroomError as error:
                logger().warning(
                    "worker.history_unknown", message_id=message.message_id, error=summarize(error)
                )
        _detail.set(detail)
        return await next_(message)

    return handle


def _choose_queues(backend: PostroomBackend, queues: list[str]) -> list[str]:
    """Return the given queues, or all of `QUEUES` without any."""
    if not backend.queues and not queues:
        raise InvalidRequest(
            f"QUEUES of TASKS[{backend.alias!r}] is empty, which allows any queue; name those of this worker."
        )
    if unknown := [each for each in queues if backend.queues and each not in backend.queues]:
        choices = describe_choices(unknown[0], backend.queues)
        raise InvalidRequest(f"TASKS[{backend.alias!r}] has no queue {unknown[0]!r}; {choices}")
    return queues or sorted(backend.queues)


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function)
