"""Connections of a proxy to the owners of mailboxes."""

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from postroom.application.threads import cancel_and_wait, wait_at_most
from postroom.domain.errors import Saturated

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


class Connection:
    """One connection, with the number of calls that use it.

    Arguments:
        channel: which is closed with the connection.
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
        self.connections: list[Connection] = []
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
    def use(self, address: str) -> Iterator[Connection]:
        """Use a connection for one call; another one is opened when those to the owner are busy.

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
            connection = Connection(self._open_channel(address), self._connect_seconds)
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
