"""TLS and SASL/PLAIN in front of a Kafka broker that has neither."""

import asyncio
import ssl
import struct
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tests.support.servers.process import LOOPBACK

SASL_HANDSHAKE, SASL_AUTHENTICATE = 17, 36
AUTHENTICATION_FAILED = 58
READY_SECONDS = 60

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class KafkaGateway:
    """A gateway that ends TLS, checks user and password, and passes all other requests to a broker.

    Arguments:
        port: where clients connect to; the broker must advertise it.
        broker_port: port of the broker.
        tls: certificate and key in PEM; None is without TLS.
        login: user and password that SASL/PLAIN demands; None demands nothing.
    """

    def __init__(
        self,
        port: int,
        broker_port: int,
        tls: tuple[str, str] | None = None,
        login: tuple[str, str] | None = None,
    ) -> None:
        self._port = port
        self._broker_port = broker_port
        self._context: ssl.SSLContext | None = None
        if tls is not None:
            self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._context.load_cert_chain(*tls)
        self._login = None if login is None else b"\0" + "\0".join(login).encode()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kafka gateway", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(READY_SECONDS), "the gateway did not start"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(READY_SECONDS)

    def _run(self) -> None:
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, LOOPBACK, self._port))
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(_end(server))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened = [writer]
        try:
            if self._context is not None:
                await writer.start_tls(self._context)
            answers, broker = await asyncio.open_connection(LOOPBACK, self._broker_port)
            opened.append(broker)
            await asyncio.gather(self._pass_requests((reader, writer), broker), _copy(answers, writer))
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            for each in opened:
                each.transport.abort()

    async def _pass_requests(self, client: Streams, broker: asyncio.StreamWriter) -> None:
        reader, writer = client
        while True:
            size = await reader.readexactly(4)
            request = await reader.readexactly(struct.unpack(">i", size)[0])
            key, version, correlation = struct.unpack_from(">hhi", request)
            if answer := self._answer(key, version, request):
                body = struct.pack(">i", correlation) + answer
                writer.write(struct.pack(">i", len(body)) + body)
            else:
                broker.write(size + request)
                await broker.drain()

    def _answer(self, key: int, version: int, request: bytes) -> bytes | None:
        """Return the body of the answer to a SASL request, and None for any other request."""
        if key == SASL_HANDSHAKE:
            return struct.pack(">hih", 0, 1, 5) + b"PLAIN"
        if key != SASL_AUTHENTICATE:
            return None
        is_right = self._login is not None and self._login in request
        return _AUTHENTICATE[version >= 2](0 if is_right else AUTHENTICATION_FAILED)


def _authenticate(code: int) -> bytes:
    return struct.pack(">hhiq", code, -1, 0, 0)


def _authenticate_flexible(code: int) -> bytes:
    return b"\0" + struct.pack(">h", code) + b"\0\1" + struct.pack(">q", 0) + b"\0"


_AUTHENTICATE: tuple[Callable[[int], bytes], Callable[[int], bytes]] = (_authenticate, _authenticate_flexible)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


async def _end(server: asyncio.Server) -> None:
    """End all connections, also those in the middle of a TLS handshake."""
    server.close()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)  # sockets are closed in the next iteration of the loop
