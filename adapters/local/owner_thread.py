"""A shared mailbox on an event loop in its own thread, so that no code of its callers delays it."""

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from typing import Any, TypeVar

from postroom.adapters.local.shared import OwnerConnection
from postroom.application.messages import MessageDelivery
from postroom.application.ports.event_log import Answer
from postroom.application.threads import cancel_and_wait, check_not_forked, wait_uncancelled
from postroom.domain.errors import InvalidRequest
from postroom.domain.mailbox.commands import Command, Receive

T = TypeVar("T")


class OwnerThread:
    """A `OwnerConnection` that runs on another event loop; has its methods, for one event loop of callers.

    The calls that are made in one turn of an event loop cross to the other together, and so do their answers:
    waking a thread costs more than a call.

    Arguments:
        loop: runs in another thread; the owner's connections and tasks live on it.
    """

    def __init__(self, owner: OwnerConnection, loop: asyncio.AbstractEventLoop) -> None:
        self._owner = owner
        self._loop = loop
        self._callers = asyncio.get_running_loop()
        self._process = os.getpid()
        self._asked: list[_Call] = []
        self._answered: list[_Call] = []
        self._open: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """Return the name of the mailbox."""
        return self._owner.name

    @property
    def is_here(self) -> bool:
        """Return whether this process owns the mailbox."""
        return self._owner.is_here

    async def open(self) -> None:
        """Connect to the owner, or become it; see `OwnerConnection.open`."""
        self._open = asyncio.create_task(self._close_at_end(), name=f"mailbox {self.name}")
        await asyncio.sleep(0)  # a task that is cancelled before its first step would close nothing
        await self._call(self._owner.open)

    async def close(self) -> None:
        """Release the mailbox; see `OwnerConnection.close`."""
        if self._open is not None:
            await cancel_and_wait(self._open)

    async def submit(self, commands: Sequence[Command]) -> Sequence[Answer]:
        """Decide commands; see `MailboxOwner.submit`."""
        return await self._call(partial(self._owner.submit, commands))

    async def receive(
        self, command: Receive, wait_ms: int, *, is_stream: bool = False
    ) -> list[MessageDelivery]:
        """Deliver ready messages; see `MailboxOwner.receive`."""
        receive = partial(self._owner.receive, command, wait_ms, is_stream=is_stream)
        return await self._call(receive, self._owner.release)

    async def find_message_id(self, stream: bytes) -> str:
        """Return the id of a message; see `MailboxOwner.find_message_id`."""
        return await self._call(partial(self._owner.find_message_id, stream))

    async def query(self, name: str, *arguments: object, **options: object) -> Any:
        """Return the result of a query of the mailbox."""
        return await self._call(partial(self._owner.query, name, *arguments, **options))

    # -- between the loops ---

    async def _close_at_end(self) -> None:
        """Close the mailbox when it is cancelled: by `close`, or by the end of the callers' event loop."""
        try:
            await asyncio.Event().wait()
        finally:
            await wait_uncancelled(self._call(self._owner.close))

    async def _call(
        self,
        work: Callable[[], Coroutine[Any, Any, T]],
        undo: Callable[[T], Coroutine[Any, Any, None]] | None = None,
    ) -> T:
        """Return the result of work in the other loop.

        Arguments:
            undo: called there with the result if its caller has given up.
        """
        check_not_forked(self._process, self.name)
        if asyncio.get_running_loop() is not self._callers:
            raise InvalidRequest(
                f"Mailbox {self.name} was opened in another event loop, and does not work in this one; "
                "connect in each event loop, or use `connect(...).sync()` in threads."
            )
        answer: asyncio.Future[T] = self._callers.create_future()
        call = _Call(work, answer, copy_context(), undo, self._loop)
        if not self._asked:
            self._callers.call_soon(self._flush)
        self._asked.append(call)
        try:
            return await answer
        except asyncio.CancelledError:
            if call in self._asked:
                self._asked.remove(call)
            elif answer.done() and not answer.cancelled() and not answer.exception():
                call.give_up(answer.result())
            else:
                self._loop.call_soon_threadsafe(call.cancel)
            raise

    def _flush(self) -> None:
        asked, self._asked = self._asked, []
        self._loop.call_soon_threadsafe(self._start, asked)

    def _start(self, calls: "list[_Call]") -> None:
        for call in calls:
            call.task = self._loop.create_task(call.work(), context=call.context)
            call.task.add_done_callback(partial(self._end, call))

    def _end(self, call: "_Call", _: object) -> None:
        if not self._answered:
            self._loop.call_soon(self._flush_answers)
        self._answered.append(call)

    def _flush_answers(self) -> None:
        answered, self._answered = self._answered, []
        with suppress(RuntimeError):  # the callers' event loop has ended
            self._callers.call_soon_threadsafe(_answer_all, answered)


class _Call:
    """A call from one event loop to another."""

    __slots__ = ("answer", "context", "loop", "task", "undo", "work")

    def __init__(
        self,
        work: Callable[[], Coroutine[Any, Any, Any]],
        answer: "asyncio.Future[Any]",
        context: Context,
        undo: Callable[[Any], Coroutine[Any, Any, None]] | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.work = work
        self.answer = answer
        self.context = context
        self.undo = undo
        self.loop = loop
        self.task: asyncio.Task[Any] | None = None

    def cancel(self) -> None:
        """Cancel the work, on its event loop, which has started it."""
        if self.task is not None:
            self.task.cancel()

    def give_up(self, result: object) -> None:
        """Undo the work, on its event loop, if its result is one to be undone."""
        if self.undo is not None and result:
            asyncio.run_coroutine_threadsafe(self.undo(result), self.loop)


def _answer_all(calls: Sequence[_Call]) -> None:
    for call in calls:
        task = call.task
        assert task is not None
        if task.cancelled():
            call.answer.cancel()
        elif (error := task.exception()) is not None:
            if not call.answer.done():
                call.answer.set_exception(error)
        elif not call.answer.done():
            call.answer.set_result(task.result())
        else:
            call.give_up(task.result())
