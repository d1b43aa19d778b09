"""A mailbox that several processes share: one of them owns it, and the others call it."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any, TypeVar

from postroom.adapters.local.client import Deadlines, LocalClient, OwnerGone
from postroom.adapters.local.endpoints import (
    Endpoint,
    LocalEndpoint,
    OpenMailbox,
    OwnerHere,
    RemoteEndpoint,
    socket_id,
)
from postroom.application.mailbox.groups import Answers, as_known, deliveries_of, releases_of
from postroom.application.mailbox.outgoing import unless_own
from postroom.application.messages import MessageDelivery
from postroom.application.ports.event_log import Answer
from postroom.application.ports.lease_store import Ownership
from postroom.application.telemetry import logger
from postroom.application.threads import check_not_forked, has_result
from postroom.domain.errors import (
    Fenced,
    MailboxClosed,
    MailboxOwned,
    PostroomError,
    Rejected,
    Unavailable,
    WrongPosition,
)
from postroom.domain.mailbox.commands import Command, Purge, Receive, Redrive
from postroom.domain.settings import UNCHANGED, SettingsChanges, check_settings

T = TypeVar("T")

OWNER_LOST = (Fenced, WrongPosition)
"""Failures after which a call is repeated with the next owner."""
POLL_SECONDS, MAX_POLL_SECONDS = 0.02, 0.25
"""Pause before another attempt to reach or become the owner, and its limit after repeated failures."""
STEADY_SECONDS = 1.0
"""A connection that lasted this long is replaced at once when it ends; a shorter one, after a pause."""
POLL_GROWTH = 1.25
"""Small, because PostgreSQL may end the session of a killed owner after the first attempts."""
RETRY_MS = 200


Owner = OwnerHere | LocalClient


class OwnerConnection:
    """The owner of a mailbox, in this process or another, across changes of owner.

    A background task connects to the owner, or becomes the owner if the mailbox has none. Calls wait for an
    owner, and are repeated with the next one if theirs ends. That is safe for all commands except redriving
    and purging: a message that is sent again has the id of the first attempt, which the log stores once.

    Arguments:
        path: the socket of the mailbox; None if other processes can't reach it. An owner without a socket
            here is looked for in the directory of its ownership, which other hosts share.
        own: owns the mailbox for the length of a context, with the settings that it must have; raises
            MailboxOwned when another process does.
        timeout_ms: time for each call, besides the wait for messages.
        owner_timeout_ms: time after which an owner that does not answer is replaced.
        outboxes: databases that another owner is to relay; `own` relays them itself.
        settings: settings that the mailbox must have when it is opened; they may change while it is used.
    """

    def __init__(
        self,
        name: str,
        path: Path | None,
        ownership: Ownership,
        own: Callable[[SettingsChanges], AbstractAsyncContextManager[OpenMailbox]],
        *,
        timeout_ms: int,
        owner_timeout_ms: int,
        outboxes: Sequence[str] = (),
        settings: SettingsChanges = UNCHANGED,
    ) -> None:
        self.name = name
        self._path = path
        self._ownership = ownership
        self._own = own
        self._timeout_ms = timeout_ms
        self._owner_timeout_ms = owner_timeout_ms
        self._outboxes = outboxes
        self._settings = settings
        self._owner: Owner | None = None
        self._is_available = asyncio.Event()
        self._failure: Exception | None = None
        self._was_used = False
        self._stale: tuple[int, int] | None = None
        self._gone_at: float | None = None
        self._task: asyncio.Task[None] | None = None
        self._process = os.getpid()
        self._deadlines = Deadlines(timeout_ms, self._timed_out)

    # -- opening and closing ---

    async def open(self) -> None:
        """Connect to the owner, or become it.

        Raises: Unavailable when neither succeeds in time, or the error that keeps this process from opening
            the mailbox.
        """
        self._task = asyncio.create_task(self._stay_connected(), name=f"connection to mailbox {self.name}")
        available = asyncio.ensure_future(self._is_available.wait())
        seconds = self._timeout_ms / 1_000
        await asyncio.wait([self._task, available], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        was_available = available.done()  # the owner may be gone again; calls wait for the next one
        available.cancel()
        if was_available:
            return
        if self._task.done():
            self._task.result()
        await self.close()
        raise self._unavailable("nothing was sent")

    async def close(self) -> None:
        """Finish calls in progress, and release the mailbox if this process owns it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._is_available.set()  # wakes calls that wait for an owner: there will be none

    # -- the port ---

    def start(self, commands: Sequence[Command], answers: Answers, wait_ms: int = 0) -> bool:
        """Queue commands without waiting for their answers, if the owner is this process.

        A task and a timer for each call would take longer than its commands. If nothing was queued, or the
        call fails with one of `OWNER_LOST`, the caller makes it by `submit` or `receive`.

        Arguments:
            wait_ms: how long a receive may wait for messages.

        Returns: False if the call may have to wait for an owner, for keys or for messages.
        """
        check_not_forked(self._process, self.name)
        owner = self._owner
        if type(owner) is not OwnerHere or (
            wait_ms and type(commands[0]) is Receive and not owner.engine.is_deliverable(commands[0].topics)
        ):
            return False
        if not owner.engine.start(commands, answers):
            return False
        self._deadlines.add(answers)
        return True

    async def submit(self, commands: Sequence[Command], *, is_lost: bool = False) -> Sequence[Answer]:
        """Decide commands; see `MailboxOwner.submit`.

        Arguments:
            is_lost: whether `start` queued them, and the owner was lost.
        """
        check_not_forked(self._process, self.name)
        answers: asyncio.Future[list[Answer]] = asyncio.get_running_loop().create_future()
        if not is_lost and self.start(commands, answers):
            try:
                return await answers
            except OWNER_LOST:
                is_lost = True
        is_repeatable = not any(isinstance(each, Redrive | Purge) for each in commands)

        async def submit(owner: Owner, is_repeated: bool) -> Sequence[Answer]:
            if not is_repeated:
                return await owner.submit(commands)
            answers = await owner.submit([as_known(each) for each in commands])
            return [unless_own(*each) for each in zip(answers, commands, strict=True)]

        return await self._call(submit, is_repeatable=is_repeatable, is_lost=is_lost)

    async def receive(
        self, command: Receive, wait_ms: int, *, is_stream: bool = False
    ) -> list[MessageDelivery]:
        """Deliver ready messages; see `MailboxOwner.receive`."""
        check_not_forked(self._process, self.name)
        now = asyncio.get_running_loop().time
        end = now() + wait_ms / 1_000
        answers: asyncio.Future[list[Answer]] = asyncio.get_running_loop().create_future()
        if self.start((command,), answers, wait_ms):
            try:
                (answer,) = await answers
                if isinstance(answer, Rejected):
                    raise answer
                assert isinstance(answer, list)
                if answer or not wait_ms:
                    return answer
            except OWNER_LOST:
                pass
            except asyncio.CancelledError:
                if has_result(answers):
                    await self.release(deliveries_of(answers.result()))
                raise

        async def receive(owner: Owner, is_repeated: bool) -> list[MessageDelivery]:
            remaining_ms = max(0, int((end - now()) * 1_000)) if is_repeated else wait_ms
            return await owner.receive(command, remaining_ms, is_stream=is_stream)

        return await self._call(receive, wait_ms)

    async def release(self, deliveries: Sequence[MessageDelivery]) -> None:
        """Release deliveries whose receivers have given up; otherwise their visibility timeout does."""
        with suppress(PostroomError):
            await self.submit(releases_of(deliveries))

    async def find_message_id(self, stream: bytes) -> str:
        """Return the id of a message; see `MailboxOwner.find_message_id`."""
        return await self._call(lambda owner, _: owner.find_message_id(stream))

    @property
    def is_here(self) -> bool:
        """Return whether this process owns the mailbox."""
        return isinstance(self._owner, OwnerHere)

    async def query(self, name: str, *arguments: object, **options: object) -> Any:
        """Return the result of a query of the mailbox, which may wait for `wait_ms`."""
        now, wait_ms = asyncio.get_running_loop().time, options.get("wait_ms", 0)
        if not isinstance(wait_ms, int) or not wait_ms:
            return await self._call(lambda owner, _: owner.query(name, arguments, options))
        end = now() + wait_ms / 1_000

        async def query(owner: Owner, is_repeated: bool) -> Any:
            remaining_ms = max(0, int((end - now()) * 1_000)) if is_repeated else wait_ms
            return await owner.query(name, arguments, {**options, "wait_ms": remaining_ms})

        return await self._call(query, wait_ms)

    # -- calls ---

    async def _call(
        self,
        call: Callable[[Owner, bool], Awaitable[T]],
        wait_ms: int = 0,
        *,
        is_repeatable: bool = True,
        is_lost: bool = False,
    ) -> T:
        """Make a call; if its owner is lost, repeat it with the next one until its time is over."""
        check_not_forked(self._process, self.name)
        was_sent = is_lost
        if is_lost and not is_repeatable:
            raise self._timed_out()
        try:
            async with asyncio.timeout((self._timeout_ms + wait_ms) / 1_000):
                while True:
                    owner = self._owner or await self._available()
                    try:
                        return await call(owner, was_sent)
                    except OwnerGone as gone:
                        is_sent = gone.was_sent
                    except OWNER_LOST:
                        is_sent = True
                    self._drop(owner)
                    was_sent |= is_sent
                    if is_sent and not is_repeatable:
                        raise self._timed_out()
        except TimeoutError:
            raise self._timed_out() from None

    async def _available(self) -> Owner:
        while self._owner is None:
            if self._task is None or self._task.done():
                raise MailboxClosed(f"Mailbox {self.name} is closed; connect to it again.")
            await self._is_available.wait()
        return self._owner

    def _timed_out(self) -> Unavailable:
        return self._unavailable("whether the call took effect is unknown")

    def _unavailable(self, outcome: str) -> Unavailable:
        reason = f" ({self._failure})" if self._failure is not None and self._owner is None else ""
        return Unavailable(
            f"The owner of mailbox {self.name} did not answer within {self._timeout_ms} ms{reason}; "
            f"{outcome}. Retry shortly.",
            RETRY_MS,
        )

    # -- the connection ---

    async def _stay_connected(self) -> None:
        pause, now = POLL_SECONDS, asyncio.get_running_loop().time
        while True:
            since = now()
            try:
                is_served = await self._use_local_owner() or await self._be_owner_or_use_remote_one()
            except MailboxOwned as error:  # the owner does not listen yet, or can't be reached
                is_served, self._failure = False, error
            except Exception as error:
                if not self._was_used:
                    raise
                if str(error) != str(self._failure):
                    logger().warning("mailbox.owner_unavailable", mailbox=self.name, error=str(error))
                is_served, self._failure = False, error
            if is_served and now() >= since + STEADY_SECONDS:
                pause = POLL_SECONDS
                continue
            await asyncio.sleep(pause)
            pause = min(POLL_GROWTH * pause, MAX_POLL_SECONDS)

    async def _use_local_owner(self) -> bool:
        """Send calls to the owner at the socket until it is gone; return whether there was one.

        Skip the socket of an owner that was evicted or replaced: it accepts connections until the next owner
        on this host replaces it.
        """
        socket = None if self._path is None else socket_id(self._path)
        if self._path is None or socket is None or socket == self._stale:
            return False
        client = await self._use_owner(LocalEndpoint(self._path, self.name, self._ownership))
        if client is not None and (client.hanging is not None or client.is_replaced):
            self._stale = socket
        return client is not None and client.has_served

    async def _be_owner_or_use_remote_one(self) -> bool:
        """Own the mailbox, or send calls to its owner on another host; return whether either was done.

        Raises: MailboxOwned when the owner can't be called.
        """
        try:
            return await self._be_owner()
        except MailboxOwned as error:
            owned = error
        directory = self._ownership.directory
        address = None if directory is None else await directory.find(self.name)
        if directory is None or address is None:
            raise owned
        try:
            endpoint = RemoteEndpoint(self.name, address, directory, self._ownership)
            client = await self._use_owner(endpoint)
            return client is not None and client.has_served
        except Unavailable as error:
            raise MailboxOwned(self.name, f"{owned.owner}. {error}") from error

    async def _use_owner(self, endpoint: Endpoint) -> LocalClient | None:
        """Send calls to the owner in another process until it is gone; return None if nobody listens.

        An owner that hangs is evicted.
        """
        client = await LocalClient.connect(endpoint, self.name, self._owner_timeout_ms)
        if client is None:
            return None
        try:
            if client.has_greeted:
                if self._settings != UNCHANGED:
                    check_settings(self.name, await client.query("get_settings", (), {}), self._settings)
                self._use(client)
                await self._name_outboxes(client)
                await client.ended
        finally:
            self._drop(client)
            client.close()
        if client.hanging is not None:
            logger().warning("mailbox.owner_hangs", mailbox=self.name, owner=client.hanging)
            await self._ownership.evict(self.name, client.hanging)
        return client

    async def _name_outboxes(self, client: LocalClient) -> None:
        try:
            if self._outboxes:
                await client.relay(self._outboxes)
        except OwnerGone:  # the next owner is told of the outboxes
            pass
        except PostroomError as error:
            logger().warning("mailbox.outboxes_refused", mailbox=self.name, error=str(error))

    async def _be_owner(self) -> bool:
        """Own the mailbox until another process takes it over."""
        async with self._own(self._settings) as mailbox:
            owner = OwnerHere(mailbox)
            try:
                self._use(owner)
                await mailbox.engine.wait_until_lost()
            finally:
                self._drop(owner)
        return True

    def _use(self, owner: Owner) -> None:
        self._owner, self._failure, self._was_used = owner, None, True
        self._settings = UNCHANGED  # they were compared once; a later change is allowed
        self._is_available.set()
        if self._gone_at is not None:
            logger().info(
                "mailbox.owner_replaced",
                mailbox=self.name,
                is_here=isinstance(owner, OwnerHere),
                gap_ms=int((asyncio.get_running_loop().time() - self._gone_at) * 1_000),
            )
            self._gone_at = None

    def _drop(self, owner: Owner) -> None:
        if self._owner is owner:
            self._owner = None
            self._is_available.clear()
            self._gone_at = asyncio.get_running_loop().time()
