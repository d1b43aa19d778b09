"""Connections whose clients do not read what is sent."""

import asyncio
import socket

from postroom.adapters.sockets.connections import WriteBuffer
from tests.support.waiting import until


class _Sender(asyncio.Protocol):
    """Sends more than the kernel buffers hold, and closes.

    Arguments:
        seconds: as of `WriteBuffer`.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        buffer = WriteBuffer(transport, asyncio.get_running_loop(), self._seconds)
        buffer.write(bytes(30_000_000))
        buffer.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True


async def test_a_connection_is_closed_although_its_client_does_not_read_the_rest() -> None:
    sender = _Sender(0.1)
    server = await asyncio.get_running_loop().create_server(lambda: sender, "127.0.0.1", 0)
    with socket.create_connection(server.sockets[0].getsockname()):
        await until(lambda: sender.is_lost)
    server.close()
    await server.wait_closed()
