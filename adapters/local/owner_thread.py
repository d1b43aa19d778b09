"""A shared mailbox on an event loop in its own thread, so that no code of its callers delays it."""

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context, copy_context
from functools import partial
from typing import Any, TypeVar

import msgspec

from postroom.adapters.local.shared import OWNER_LOST, OwnerConnection
from postroom.application.mailbox.groups import QueuedAnswers, deliveries_of
from postroom.application.messages import MessageDelivery
from postroom.application.ports.event_log import Answer
from postroom.application.threads import cancel_and_wait, check_not_forked, has_result, wait_uncancelled
from postroom.domain.errors import InvalidRequest, Rejected
from postroom.domain.mailbox.commands import Command, Receive

T = TypeVar("T")


class OwnerThread:
    """An `OwnerConnection` on another event loop; it has the same methods, for one event loop of callers.

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
        return await self._call(partial(self._owner.submit, commands), commands)

    async def receive(
        self, command: Receive, wait_ms: int, *, is_stream: bool = False
    ) -> list[MessageDelivery]:
        """Deliver ready messages; see `MailboxOwner.receive`."""

        async def receive(*, is_lost: bool = False) -> Sequence[Answer]:
            return [await self._owner.receive(command, wait_ms, is_stream=is_stream)]

        (answer,) = await self._call(receive, (command,), wait_ms)
        if isinstance(answer, Rejected):
            raise answer
        assert isinstance(answer, list)
        return answer

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
        work: Callable[..., Coroutine[Any, Any, T]],
        commands: Sequence[Command] = (),
        wait_ms: int = 0,
    ) -> T:
        """Make a call on the other event loop.

        Arguments:
            work: makes the call; it gets `is_lost` if the owner was lost that had started the call.
            commands: commands of the call, which are queued at once if possible; see `OwnerConnection.start`.
            wait_ms: how long a receive may wait for messages.
        """
        check_not_forked(self._process, self.name)
        if asyncio.get_running_loop() is not self._callers:
            raise InvalidRequest(
                f"Mailbox {self.name} was opened in another event loop, and does not work in this one; "
                "connect in each event loop, or use `connect(...).sync()` in threads."
            )
        answer: asyncio.Future[T] = self._callers.create_future()
        call = _Call(
            self._answered, self._pass_on, work=work, commands=commands, wait_ms=wait_ms, answer=answer
        )
        if not self._asked:
            self._callers.call_soon(self._flush)
        self._asked.append(call)
        try:
            return await answer
        except asyncio.CancelledError:
            if call in self._asked:
                self._asked.remove(call)
            elif has_result(answer):
                self._give_up([call])
            else:
                self._loop.call_soon_threadsafe(call.cancel)
            raise

    def _flush(self) -> None:
        asked, self._asked = self._asked, []
        self._loop.call_soon_threadsafe(self._start, asked)

    def _start(self, calls: "list[_Call]") -> None:
        for call in calls:
            if not call.commands or not self._owner.start(call.commands, call, call.wait_ms):
                call.run(self._loop, call.work())

    def _pass_on(self) -> None:
        """Pass on the answers of one turn of the owner's event loop; repeat the calls that got none."""
        answered = []
        for call in self._answered:
            if call.is_cancelled:
                self._give_up([call])
            elif call.task is not None:
                answered.append(call)
            elif isinstance(call.error, OWNER_LOST):
                call.run(self._loop, call.work(is_lost=True))
            elif call.wait_ms and call.result == [[]]:
                call.run(self._loop, call.work())
            else:
                answered.append(call)
        self._answered.clear()
        if answered:
            try:
                self._callers.call_soon_threadsafe(self._answer_all, answered)
            except RuntimeError:  # the callers' event loop has ended
                self._give_up(answered)

    def _answer_all(self, calls: "list[_Call]") -> None:
        for call in calls:
            if call.answer.done():
                self._give_up([call])
            elif isinstance(call.error, asyncio.CancelledError):
                call.answer.cancel()
            elif call.error is not None:
                call.answer.set_exception(call.error)
            else:
                call.answer.set_result(call.result)

    def _give_up(self, calls: "list[_Call]") -> None:
        """Release the messages that were delivered to callers that have given up."""
        answers = [each for call in calls if call.commands for each in call.result or ()]
        if untaken := deliveries_of(answers):
            asyncio.run_coroutine_threadsafe(self._owner.release(untaken), self._loop)


class _Call(QueuedAnswers, eq=False, kw_only=True):
    """A call from one event loop to another; see `OwnerThread._call`."""

    work: Callable[..., Coroutine[Any, Any, Any]]
    commands: Sequence[Command]
    wait_ms: int
    answer: asyncio.Future[Any]
    context: Context = msgspec.field(default_factory=copy_context)
    task: asyncio.Task[Any] | None = None

    def run(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any]) -> None:
        """Make the call by `work` in a task; `work` has a time limit of its own."""
        self.is_over = True
        self.task = loop.create_task(work, context=self.context)
        self.task.add_done_callback(self._end)

    def cancel(self) -> None:
        """Cancel the call, on the event loop of the owner, which has started it."""
        self.is_cancelled = True
        if self.task is not None:
            self.task.cancel()

    def _end(self, task: "asyncio.Task[Any]") -> None:
        if task.cancelled() and self.is_cancelled:
            return
        self.is_over = self.is_cancelled = False  # a caller that gave up releases its messages
        if task.cancelled():  # the owner's event loop ends
            self.set_exception(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())
