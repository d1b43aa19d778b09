"""The owner's side of the local socket: answers the other processes that use its mailbox."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from postroom.adapters.local import protocol
from postroom.adapters.local.endpoints import bound_path, socket_address
from postroom.adapters.local.protocol import Hello
from postroom.adapters.local.server_connection import Outboxes, ServedConnection, ServedMailbox
from postroom.adapters.local.shared import Engine
from postroom.application.telemetry import logger
from postroom.application.threads import cancel_and_wait, set_close_on_fork
from postroom.domain.errors import Unavailable

BACKLOG = 512
WATCH_SECONDS = 5.0
"""Interval in which the owner looks whether its socket is still there."""
FLUSH_SECONDS = 1.0
"""Time that clients have to take the last answers."""


class LocalServer:
    """Server of one mailbox at a Unix socket, for processes of the same user or of root.

    Arguments:
        incumbent: token of the ownership of this process; see `bound_path`.

    It listens from the moment this process owns the mailbox, so that others can tell an owner that is loading
    its log from one that hangs; requests wait until `serve` is called.
    """

    def __init__(self, path: Path, mailbox: str, incumbent: str | None) -> None:
        self._path = path
        self._bound_path = bound_path(path, incumbent)
        self.hello = Hello(protocol.VERSION, mailbox)
        self.is_closing = False
        self.connections: set[ServedConnection] = set()
        self._served: asyncio.Future[tuple[ServedMailbox, Outboxes]] = (
            asyncio.get_running_loop().create_future()
        )
        self._server: asyncio.Server | None = None
        self._watching: asyncio.Task[None] | None = None
        self._inode = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen; replace the socket of an owner that is gone.

        Raises: Unavailable when the socket can't be created.
        """
        await self._listen()
        self._watching = asyncio.create_task(self._watch(), name=f"watch of {self._path}")

    async def _listen(self) -> None:
        temporary = self._bound_path
        try:
            temporary.unlink(missing_ok=True)
            # In two steps: the first is not interrupted, so that a cancellation leaks no socket.
            with socket_address(temporary) as address:
                self._server = await asyncio.get_running_loop().create_unix_server(
                    lambda: ServedConnection(self), address, backlog=BACKLOG, start_serving=False
                )
            await self._server.start_serving()
            for listening_socket in self._server.sockets:
                set_close_on_fork(listening_socket.fileno(), True)
            temporary.chmod(0o600)
            self._inode = temporary.stat().st_ino
            temporary.rename(self._path)
        except asyncio.CancelledError:
            temporary.unlink(missing_ok=True)
            raise
        except OSError as error:
            raise Unavailable(
                f"The socket {self._path} can't be created: {error}. Check the folder's permissions."
            ) from error

    async def _watch(self) -> None:
        """Listen again if the socket was deleted, such as by a job that cleans folders."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self._server is None or self._path.exists():
                continue
            logger().retry("mailbox.socket_deleted", mailbox=self.hello.mailbox, path=str(self._path))
            self._stop_listening(self._server)
            with suppress(Unavailable):  # tried again
                await self._listen()

    def serve(self, mailbox: ServedMailbox, outboxes: Outboxes) -> None:
        """Answer requests, also those that have waited."""
        self._served.set_result((mailbox, outboxes))

    async def mailbox(self) -> ServedMailbox:
        """Return the mailbox once it is open."""
        return (await asyncio.shield(self._served))[0]

    @property
    def engine(self) -> Engine | None:
        """Return the owner if the mailbox is open."""
        is_open = self._served.done() and not self._served.cancelled()
        return self._served.result()[0].engine if is_open else None

    async def outboxes(self) -> Outboxes:
        """Return the relays of outboxes once the mailbox is open."""
        return (await asyncio.shield(self._served))[1]

    def make_connection(self) -> asyncio.Protocol:
        """Return the protocol of a connection whose peer was checked: one from another host."""
        return ServedConnection(self, is_peer_checked=True)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what outlives a connection."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop_reading(self) -> None:
        """Accept no more connections and requests; those in progress are still answered."""
        self.is_closing = True
        if self._watching is not None:
            self._watching.cancel()
        if self._server is not None:
            with suppress(OSError):
                if self._path.stat().st_ino == self._inode:  # not that of the next owner
                    self._path.unlink()
            self._stop_listening(self._server)
        for connection in self.connections:
            connection.stop_reading()

    def _stop_listening(self, server: asyncio.Server) -> None:
        for listening_socket in server.sockets:
            set_close_on_fork(listening_socket.fileno(), False)
        server.close()

    def disconnect(self) -> None:
        """Close all connections without answers; clients then look for the new owner."""
        self.is_closing = True
        for connection in list(self.connections):
            connection.abort()

    async def close(self) -> None:
        """Send pending answers, and close all connections."""
        self.stop_reading()
        self._served.cancel()
        closing = [asyncio.ensure_future(each.close()) for each in list(self.connections)]
        if closing:
            await asyncio.wait(closing, timeout=FLUSH_SECONDS)
        self.disconnect()
        await cancel_and_wait(*self._tasks)


@asynccontextmanager
async def listening(path: Path, mailbox: str, incumbent: str | None) -> AsyncIterator[LocalServer]:
    """Listen at a Unix socket while the context lasts; see `LocalServer`."""
    server = LocalServer(path, mailbox, incumbent)
    try:
        await server.start()
        yield server
    finally:
        await server.close()
