"""Receives from the mailboxes of a namespace in one store, each with an owner of its own (ADR 0137)."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from postroom.application.cluster.namespace_receiver import ReceiptHomes
from postroom.application.mailbox.receive import make_receive
from postroom.application.message_stream import MAX_WAIT_MS
from postroom.application.operations.mailbox import Mailbox
from postroom.application.received_messages import ReceivedMessage
from postroom.application.threads import cancel_and_wait
from postroom.domain.arguments import check_int, check_items
from postroom.domain.errors import PostroomError, Saturated, Unavailable
from postroom.domain.mailbox.commands import Receive
from postroom.domain.policy import DEFAULT_MAX_BYTES, DEFAULT_MAX_MESSAGES

POLL_TIMEOUT_SECONDS = 2.0
"""Time, besides the wait for messages, after which a receive leaves a member that does not answer."""
AVOID_SECONDS = 2.0
"""Time for which receives leave out a member that did not answer, while others do."""
RETRY_MS = 200

Polls = dict[str, "asyncio.Task[list[ReceivedMessage]]"]


class StoreReceiver:
    """Receives messages of members that never change.

    A receive asks one member after the other, beginning with another one each time, until it has half of
    what it asked for. Then it waits at the members at which no other receive of these topics in this process
    waits, or else at one member. When a receive leaves a member at which no other waits, one of the others
    waits there, too. A cancelled receive leaves its messages ready.
    """

    def __init__(self, mailboxes: Mapping[str, Mailbox], homes: ReceiptHomes) -> None:
        """Take the members by name."""
        self._mailboxes = mailboxes
        self._names = [*mailboxes]
        self._homes = homes
        self._turn = 0
        self._waits: dict[tuple[str, ...], _Waits] = {}
        self._avoided: dict[str, float] = {}

    async def close(self) -> None:
        """Do nothing: no task outlives a receive."""

    async def receive_messages(
        self,
        topic: str | Sequence[str],
        /,
        *,
        max_messages: int = DEFAULT_MAX_MESSAGES,
        max_bytes: int = DEFAULT_MAX_BYTES,
        visibility_ms: int | None = None,
        consumer: str | None = None,
        wait_ms: int = 0,
        is_stream: bool = False,
    ) -> list[ReceivedMessage]:
        """Receive messages; see `Mailbox.receive_messages`."""
        now = asyncio.get_running_loop().time
        end = now() + check_int("wait_ms", wait_ms, 0, MAX_WAIT_MS) / 1_000
        topics = (topic,) if isinstance(topic, str) else tuple(check_items("topic", topic))
        command = make_receive(topics, max_messages, max_bytes, visibility_ms, consumer)
        names = self._rotate(now())
        waits = self._waits.get(command.topics)
        if wait_ms and waits is not None:  # where a receive waits, there is nothing to deliver
            names = [name for name in names if not waits.at[name]]
        received, failures = await self._take(names, command)
        if received or not wait_ms:
            if failures and len(failures) == len(names):  # for as long as a call may take
                received = await self._poll(names[0], command, 0, None)
            return received
        waits = self._waits.setdefault(command.topics, _Waits())
        waiter = _Waiter()
        waits.waiters[waiter] = None
        try:
            return await self._wait(waiter, waits, command, end)
        finally:
            del waits.waiters[waiter]
            if not waits.waiters:
                self._waits.pop(command.topics, None)
            elif any(not waits.at[name] for name in self._names):
                next(iter(waits.waiters)).wake()

    async def _take(
        self, names: Sequence[str], command: Receive
    ) -> tuple[list[ReceivedMessage], list[PostroomError]]:
        """Return ready messages, and the errors of members that are unavailable."""
        received: list[ReceivedMessage] = []
        count, size = command.max_messages, command.max_bytes
        failures: list[PostroomError] = []
        for name in names:
            some = msgspec.structs.replace(command, max_messages=count, max_bytes=size)
            try:
                more = await self._poll(name, some, 0)
            except (Saturated, Unavailable) as error:
                failures.append(error)
                continue
            except BaseException:
                await self._release(received)
                raise
            received += more
            count -= len(more)
            size -= sum(len(each.payload) for each in more)
            if size <= 0 or 2 * len(received) >= command.max_messages:
                break
        return received, failures

    async def _wait(
        self, waiter: "_Waiter", waits: "_Waits", command: Receive, end: float
    ) -> list[ReceivedMessage]:
        now = asyncio.get_running_loop().time
        count = 0
        failure: PostroomError | None = None
        polls: Polls = {}
        received: list[ReceivedMessage] = []
        try:
            while not received and (wait_ms := int((end - now()) * 1_000)) > 0:
                names = self._rotate(now())
                alone = [name for name in names if not waits.at[name]]
                for name in alone or ([] if polls else [min(names, key=waits.at.__getitem__)]):
                    polls[name] = asyncio.ensure_future(self._poll(name, command, wait_ms))
                    waits.begin(name, polls[name], waiter)
                await waiter.woken()
                for name in [name for name, poll in polls.items() if poll.done()]:
                    try:
                        received += polls.pop(name).result()
                    except (Saturated, Unavailable) as error:
                        failure = error
                        await asyncio.sleep(min(error.retry_after_ms, RETRY_MS) / 1_000)
                    else:
                        failure = None
            count = command.max_messages
            if failure is not None and not received and not polls:
                raise failure
        finally:
            await cancel_and_wait(*polls.values())
            for poll in polls.values():
                if not poll.cancelled() and not poll.exception():
                    received += poll.result()
            await self._release(received[count:])
        return received[:count]

    async def _poll(
        self, name: str, command: Receive, wait_ms: int, limit: float | None = POLL_TIMEOUT_SECONDS
    ) -> list[ReceivedMessage]:
        try:
            async with asyncio.timeout(None if limit is None else limit + wait_ms / 1_000):
                return await self._homes.receive(self._mailboxes[name], command, wait_ms)
        except TimeoutError:
            self._avoided[name] = asyncio.get_running_loop().time() + AVOID_SECONDS
            raise Unavailable(f"The owner of mailbox {name} does not answer; retry.", RETRY_MS) from None

    def _rotate(self, now: float) -> list[str]:
        """Return the members, beginning with another one each time, without those in `_avoided`."""
        self._turn += 1
        start = self._turn % len(self._names)
        names = [*self._names[start:], *self._names[:start]]
        if self._avoided:
            self._avoided = {name: until for name, until in self._avoided.items() if until > now}
            return [name for name in names if name not in self._avoided] or names
        return names

    async def _release(self, received: Sequence[ReceivedMessage]) -> None:
        """Release messages that nobody takes; if that fails, their visibility timeout does so."""
        if received:
            with suppress(PostroomError):
                receipts = [each.receipt for each in received]
                await self._homes.settler.nack_messages(receipts, delay_ms=0, action="release")


class _Waiter:
    """A receive that waits for its polls, or for news."""

    def __init__(self) -> None:
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(self, _: object = None) -> None:
        """Let the receive check its polls, and the members at which nobody waits."""
        if not self._future.done():
            self._future.set_result(None)

    async def woken(self) -> None:
        """Wait until `wake` is called, or return at once if it was called since the last wait."""
        await self._future
        self._future = asyncio.get_running_loop().create_future()


class _Waits:
    """The receives of this process that wait for messages of the same topics."""

    def __init__(self) -> None:
        self.at: Counter[str] = Counter()
        """Number of their polls by member."""
        self.waiters: dict[_Waiter, None] = {}

    def begin(self, name: str, poll: "asyncio.Task[list[ReceivedMessage]]", waiter: _Waiter) -> None:
        """Count a poll until it ends, and wake its waiter then."""
        self.at[name] += 1

        def end(_: object) -> None:
            self.at[name] -= 1
            waiter.wake()

        poll.add_done_callback(end)
