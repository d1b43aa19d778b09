"""Connections of a proxy to the owners of mailboxes, and the calls that it forwards over them."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import grpc

from postroom.adapters.grpc.calls import (
    DETAILS_KEY,
    FORWARDED_KEY,
    MAILBOX_KEY,
    detailed_error,
    status_code,
    status_of,
    write_text,
)
from postroom.application.cluster.proxy import RETRY_MS, no_owner
from postroom.application.threads import cancel_and_wait, wait_at_most
from postroom.application.tracing import correlate
from postroom.domain.errors import PostroomError, Saturated, Unavailable, WrongOwner
from postroom.domain.lease.routing import Route

CALLS_PER_CONNECTION = 512
"""Calls in progress on a connection before another is opened; a server allows 1,024 streams on each."""
MAX_CONNECTIONS = 16
"""Connections to one owner."""
CONNECT_SECONDS = 3.0
"""Time in which an owner must accept a connection; a process that is paused does not."""
IDLE_SECONDS = 60.0
"""Time without a call after which the connections to a process without routes are closed."""

OpenChannel = Callable[[str], grpc.aio.Channel]
_READY = grpc.ChannelConnectivity.READY
_FAILED = grpc.ChannelConnectivity.TRANSIENT_FAILURE
_CLOSED = grpc.ChannelConnectivity.SHUTDOWN


class OwnerUnreachable(Exception):
    """No connection to an owner could be made, so that nothing was sent."""


class PooledChannel:
    """One connection, with the number of calls that use it.

    Arguments:
        channel: gRPC channel, which is closed with the connection.
        connect_seconds: time in which the owner must accept it.
    """

    def __init__(self, channel: grpc.aio.Channel, connect_seconds: float) -> None:
        self.calls = 0
        self._connect_seconds = connect_seconds
        self._channel = channel
        self._changed = asyncio.Event()
        self._connecting_since: float | None = asyncio.get_running_loop().time()
        self._watch = asyncio.create_task(self._observe())

    def unary(self, path: str) -> Any:
        """Return a method of encoded messages with one answer."""
        return self._channel.unary_unary(path)

    def stream(self, path: str) -> Any:
        """Return a method of encoded messages with a stream of answers."""
        return self._channel.unary_stream(path)

    async def wait_until_ready(self) -> None:
        """Return when calls can be sent.

        Raises: OwnerUnreachable when the owner refuses the connection, or has not accepted it in time.
        """
        loop = asyncio.get_running_loop()
        while (state := self._channel.get_state(try_to_connect=True)) is not _READY:
            since = loop.time() if self._connecting_since is None else self._connecting_since
            left = since + self._connect_seconds - loop.time()
            if state in (_FAILED, _CLOSED) or left <= 0:
                raise OwnerUnreachable
            self._changed.clear()
            await wait_at_most(left, self._changed.wait())

    async def close(self) -> None:
        """Close the connection, which cancels its calls."""
        await self._channel.close()
        await cancel_and_wait(self._watch)

    async def _observe(self) -> None:
        """Keep connecting, and wake the calls that wait for a connection."""
        while True:
            state = self._channel.get_state(try_to_connect=True)
            if state is _READY:
                self._connecting_since = None
            elif self._connecting_since is None:
                self._connecting_since = asyncio.get_running_loop().time()
            self._changed.set()
            if state is _CLOSED:
                return
            await self._channel.wait_for_state_change(state)


class _Owner:
    def __init__(self) -> None:
        self.connections: list[PooledChannel] = []
        self.idle_since = 0.0

    @property
    def calls(self) -> int:
        return sum(each.calls for each in self.connections)


class OwnerChannels:
    """Connections to the processes that own mailboxes, by their addresses.

    Arguments:
        open_channel: opens a channel to an address, with a connection of its own.
        connect_seconds: time in which an owner must accept a connection.
    """

    def __init__(self, open_channel: OpenChannel, connect_seconds: float = CONNECT_SECONDS) -> None:
        self._open_channel = open_channel
        self._connect_seconds = connect_seconds
        self._owners: dict[str, _Owner] = {}

    @property
    def count(self) -> int:
        """Return the number of connections."""
        return sum(len(each.connections) for each in self._owners.values())

    @contextmanager
    def use(self, address: str) -> Iterator[PooledChannel]:
        """Use a connection for one call; open another one if all connections to the owner are busy.

        Raises: Saturated when the owner has too many calls in progress.
        """
        owner = self._owners.get(address)
        if owner is None:
            owner = self._owners[address] = _Owner()
        connection = next((each for each in owner.connections if each.calls < CALLS_PER_CONNECTION), None)
        if connection is None:
            if len(owner.connections) >= MAX_CONNECTIONS:
                raise Saturated(
                    f"{owner.calls} calls through this proxy to {address} are in progress; retry.", 1_000
                )
            connection = PooledChannel(self._open_channel(address), self._connect_seconds)
            owner.connections.append(connection)
        connection.calls += 1
        try:
            yield connection
        finally:
            connection.calls -= 1
            owner.idle_since = asyncio.get_running_loop().time()

    async def close_idle(self, addresses: Collection[str]) -> None:
        """Close the connections to processes without calls, other than those at `addresses`."""
        before = asyncio.get_running_loop().time() - IDLE_SECONDS
        for address, owner in list(self._owners.items()):
            if address not in addresses and not owner.calls and owner.idle_since <= before:
                del self._owners[address]
                await _close(owner)

    async def run(self, find_addresses: Callable[[], Collection[str]]) -> None:
        """Close connections that are not needed any more, until cancelled.

        Arguments:
            find_addresses: returns the addresses of the owners to which there are routes.
        """
        while True:
            await asyncio.sleep(IDLE_SECONDS)
            await self.close_idle(find_addresses())

    async def close(self) -> None:
        """Close all connections."""
        owners = list(self._owners.values())
        self._owners.clear()
        for owner in owners:
            await _close(owner)


async def _close(owner: _Owner) -> None:
    for each in owner.connections:
        await each.close()


T = TypeVar("T")

READS = frozenset(
    {
        "backlog",
        "describe_topic",
        "explain",
        "get",
        "get_settings",
        "get_topic_policy",
        "info",
        "list_consumers",
        "list_dead_letters",
        "list_searches",
        "list_topics",
        "list_workers",
        "peek",
        "preview_settings",
        "query",
    }
)
"""The methods that change nothing, and so are repeated when their outcome is unknown."""
_CONNECTION_KEYS = frozenset({"user-agent", "content-type", "te", "host", FORWARDED_KEY, MAILBOX_KEY})
"""Metadata that is not passed on, besides gRPC's own."""
CORR_ID_KEY = "x-corr-id"
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)

Context = grpc.aio.ServicerContext[Any, Any]
Metadata = Sequence[tuple[str, str | bytes]]


class ForwardedCall:
    """A call to forward.

    Arguments:
        method: its name in `METHODS`.
        path: its name on the wire.
        data: the encoded request.
        metadata: metadata with which the call is forwarded.

    Attributes:
        is_answered: whether the caller has got a part of the answer, so that the call can't be sent again.
    """

    def __init__(
        self, method: str, path: str, data: bytes, context: Context, mailbox: str, metadata: Metadata
    ) -> None:
        self.method = method
        self.path = path
        self.data = data
        self.mailbox = mailbox
        self.is_answered = False
        self._context = context
        self._metadata = metadata

    @property
    def options(self) -> dict[str, Any]:
        """Return the metadata, and the remainder of the caller's time."""
        return {"metadata": self._metadata, "timeout": self._context.time_remaining()}

    async def begin_answer(self, initial: Metadata | None) -> None:
        """Pass the initial metadata of the owner on."""
        if passed_on := _passed_on(initial):
            self.is_answered = True
            await self._context.send_initial_metadata(passed_on)

    async def write(self, item: bytes) -> None:
        """Pass an item of a stream on; return when the caller has room for more."""
        self.is_answered = True
        await self._context.write(item)

    def end_answer(self, trailing: Metadata | None) -> None:
        """Pass the trailing metadata of the owner on."""
        self._context.set_trailing_metadata(_passed_on(trailing))

    def may_repeat(self, failure: Exception) -> bool:
        """Return whether the call had no effect, and nothing of an answer has reached the caller."""
        if self.is_answered:
            return False
        if isinstance(failure, OwnerUnreachable):
            return True
        return _code_of(failure) == WrongOwner.code or (self.method in READS and _is_lost(failure))

    def explain(self, route: Route, failure: Exception) -> Exception:
        """Return the error for the caller: the owner's status, or the reason why it did not respond."""
        owner = f"Runner {route.runner} at {route.address}, which owns mailbox {self.mailbox},"
        if isinstance(failure, OwnerUnreachable):
            return Unavailable(f"{owner} can't be reached; nothing was done. Retry.", RETRY_MS)
        if _is_lost(failure):
            return Unavailable(
                f"{owner} did not answer before the connection ended; whether the command took effect is "
                "unknown.",
                RETRY_MS,
            )
        return no_owner(self.mailbox) if _code_of(failure) == WrongOwner.code else failure


def is_outdated(failure: Exception) -> bool:
    """Return whether the failure of a call may mean that the mailbox has another owner by now."""
    return not isinstance(failure, grpc.aio.AioRpcError) or failure.code() in _LOST


async def within(answer: Awaitable[T]) -> T:
    """Return an answer of an owner.

    Raises: AioRpcError for any status besides OK; Unavailable when this process closed the connection, which
        cancels the calls but not their callers.
    """
    try:
        return await answer
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Unavailable(
            "The proxy closed the connection to the owner; whether the command took effect is unknown."
        ) from None


async def abort_alike(context: Context, error: grpc.aio.AioRpcError) -> None:
    """End a call with the status of another one."""
    if initial := _passed_on(_pairs(error.initial_metadata())):
        with suppress(grpc.aio.UsageError):  # the metadata was sent before the first item
            await context.send_initial_metadata(initial)
    await context.abort(error.code(), error.details() or "", _passed_on(_pairs(error.trailing_metadata())))


async def refuse(context: Context, failure: PostroomError, caller: Mapping[str, str]) -> None:
    """End a call with an error of this process.

    Arguments:
        caller: metadata of the call.
    """
    with correlate(caller.get(CORR_ID_KEY)) as corr_id:
        status = status_of(failure)
        details = ((DETAILS_KEY, status.SerializeToString()), (CORR_ID_KEY, corr_id))
        await context.abort(status_code(failure), status.message, details)


def forwarded_metadata(pairs: Metadata, mailbox: str) -> Metadata:
    """Return the metadata of a forwarded call: its own, the mailbox, and a mark that it was forwarded."""
    return (*_passed_on(pairs), (MAILBOX_KEY, write_text(mailbox)), (FORWARDED_KEY, "1"))


def _passed_on(pairs: Metadata | None) -> Metadata:
    """Return metadata without the fields of the connection."""
    return tuple(
        (key, value)
        for key, value in pairs or ()
        if key not in _CONNECTION_KEYS and (key == DETAILS_KEY or not key.startswith("grpc-"))
    )


def _pairs(metadata: Any) -> Metadata:
    """Return metadata as pairs."""
    return tuple(metadata or ())


def _code_of(failure: Exception) -> str | None:
    """Return the wire code of an owner's refusal; None for a status of the connection."""
    if not isinstance(failure, grpc.aio.AioRpcError):
        return None
    error = detailed_error(failure.trailing_metadata() or ())
    return None if error is None else error.code


def _is_lost(failure: Exception) -> bool:
    """Return whether the connection ended in the middle of a call."""
    return isinstance(failure, grpc.aio.AioRpcError) and failure.code() in _LOST and _code_of(failure) is None
