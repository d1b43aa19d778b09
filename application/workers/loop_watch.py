"""A watch over the event loop of handlers, which names the handler that blocks it."""

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from postroom.application.messages import ReceivedMessage
from postroom.application.telemetry import logger

CHECK_SECONDS = 0.25
CHECKS = 5
"""Checks in a row that find the loop blocked, before it is logged: the first may come when it has just begun.

Counted, because after a pause of the process all of its time has elapsed.
"""


class Handling(NamedTuple):
    """A message that a handler is working on."""

    handler: str
    message: ReceivedMessage


class LoopWatch:
    """Watch over the running event loop for the length of a context, from a thread.

    A task that keeps the loop for longer than a second is logged once, with its handler, topic and message id
    if it is a handler's, and with the line that it is at.

    Arguments:
        find: returns what a task is handling, if anything; called in the thread.
    """

    def __init__(self, find: "Callable[[asyncio.Task[Any]], Handling | None]") -> None:
        self._find = find
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="postroom-watch", daemon=True)
        self._ended = threading.Event()
        self._beats = 0
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._beat()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        self._beats += 1
        self._timer = self._loop.call_later(CHECK_SECONDS, self._beat)

    def _watch(self) -> None:
        seen, silent = 0, 0
        while not self._ended.wait(CHECK_SECONDS):
            beats, task = self._beats, asyncio.current_task(self._loop)
            silent = silent + 1 if beats == seen and task is not None else 0
            seen = beats
            if silent == CHECKS and task is not None:
                self._log(task)

    def _log(self, task: "asyncio.Task[Any]") -> None:
        handling = self._find(task)
        frame = sys._current_frames().get(self._loop_thread)
        logger().warning(
            "worker.loop_blocked",
            handler=None if handling is None else handling.handler,
            topic=None if handling is None else handling.message.topic,
            message_id=None if handling is None else handling.message.message_id,
            task=task.get_name(),
            at=None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}",
        )
