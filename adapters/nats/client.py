"""A NATS client that detects stalled connections and replaces them."""

import asyncio
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from ssl import SSLError
from typing import Any, NamedTuple

from nats.aio.client import PING_PROTO, Client, Srv
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import (
    ConnectionReconnectingError,
    Error,
    FlushTimeoutError,
    NoRespondersError,
    ProtocolError,
)
from nats.errors import TimeoutError as NatsTimeoutError
from nats.protocol.parser import PERMISSIONS_ERR, Parser

from postroom.application.telemetry import logger
from postroom.application.threads import cancel_and_wait

Deliver = Callable[[bytes, bytes | None, bytes, bytes], None]
"""Callback with subject, reply subject, raw headers and data of one message."""
Wake = Callable[[], None]
"""Callback after all messages of one read are delivered."""

_LINE_END = b"\r\n"
_ENDS = len(_LINE_END)


class FastPathParser(Parser):
    """Parser of the NATS protocol that delivers the messages of some subscriptions itself."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._subscriptions: dict[bytes, tuple[Deliver, Wake | None]] = {}

    def add(self, subscription: int, deliver: Deliver, wake: Wake | None = None) -> None:
        """Deliver the messages of a subscription from now on.

        Arguments:
            subscription: its id.
        """
        self._subscriptions[b"%d" % subscription] = (deliver, wake)

    def reset(self) -> None:
        """Drop unparsed bytes; called by nats-py when a connection ends."""
        super().reset()
        self._unread = bytearray()
        self._needed = 0

    async def parse(self, data: bytes = b"") -> None:
        """Parse bytes from the socket; an incomplete message is buffered."""
        self.nc._pings_outstanding = 0  # any data shows that the server is alive
        unread = self._unread
        unread += data
        if len(unread) < self._needed:
            return
        read, self._needed = bytes(unread), 0
        at = 0
        wakes: set[Wake | None] = set()
        while (line_end := read.find(_LINE_END, at)) >= 0:
            words = read[at:line_end].split()
            body = stop = line_end + _ENDS
            ours = None
            try:
                if words[0] in (b"MSG", b"HMSG"):
                    ours = self._subscriptions.get(words[2])
                    stop = body + int(words[-1]) + _ENDS
            except (IndexError, ValueError):
                raise ProtocolError(f"nats: malformed line {read[at:line_end]!r}") from None
            if len(read) < stop:
                self._needed = stop - at
                break
            if ours is not None:
                deliver, wake = ours
                # MSG subject sid [reply] size, and HMSG subject sid [reply] header-size size
                has_headers = words[0] == b"HMSG"
                data_at = body + int(words[-2]) if has_headers else body
                reply = words[3] if len(words) == (6 if has_headers else 5) else None
                deliver(words[1], reply, read[body:data_at], read[data_at : stop - _ENDS])
                wakes.add(wake)
            else:
                await super().parse(read[at:stop])
                if self._unread is not unread:  # the connection ended meanwhile
                    break
            at = stop
        del unread[:at]
        for wake in wakes:
            if wake is not None:
                wake()


FLUSH_TIMEOUT_SECONDS = 2.0
CLOSE_TIMEOUT_SECONDS = 2.0
SILENCE_SECONDS = 5.0
"""Time without replies to requests after which the connection is replaced."""
_NO_RESPONDERS = b"NATS/1.0 503"


class Reply(NamedTuple):
    """The reply to a request, with its headers as they were received."""

    headers: bytes
    data: bytes


class SupervisedClient(Client):
    """A NATS client that reconnects whenever its connection stops working, and closes within a deadline.

    Each override fixes one case in which nats-py 2.16 stops receiving, or never finishes closing (ADR 0031).
    """

    def __init__(self, *, needs_tls: bool = False) -> None:
        """Create a client that is not connected yet.

        Arguments:
            needs_tls: refuse a server without TLS, which nats-py would use unencrypted.
        """
        super().__init__()
        self._needs_tls = needs_tls
        self._is_closing = False
        self._silent_since: float | None = None
        self._ps: FastPathParser = FastPathParser(self)
        self._next_pong: asyncio.Future[bool] | None = None
        self._replies: dict[bytes, tuple[asyncio.Future[Reply], float]] = {}
        self._expiry: asyncio.TimerHandle | None = None
        self._reply_prefix = b""
        self._request_count = 0

    async def subscribe_bytes(self, subject: str, deliver: Deliver, wake: Wake | None = None) -> Subscription:
        """Subscribe to a subject, whose messages are delivered as bytes.

        Arguments:
            deliver: called with each message.
            wake: called after all messages of one read.
        """
        subscription = await self.subscribe(subject)
        self._ps.add(subscription._id, deliver, wake)
        return subscription

    async def flush(self, timeout: float = FLUSH_TIMEOUT_SECONDS) -> None:  # noqa: ASYNC109  # signature of nats-py
        """Return once the server has read everything sent so far.

        Arguments:
            timeout: in seconds.

        Raises: nats.errors.Error without a connection, or without an answer before the timeout.
        """
        # nats-py returns while it is reconnecting, sends its PING before what is pending, and after a timeout
        # cancels the future of the PONG: when that PONG arrives, setting the result ends the read loop.
        if not self.is_connected:
            raise ConnectionReconnectingError
        loop = asyncio.get_running_loop()
        if self._next_pong is None:
            self._next_pong = loop.create_future()
            loop.call_soon(self._ping)  # one PING for all calls of this turn
        pong = self._next_pong
        answered, _ = await asyncio.wait([pong], timeout=timeout)
        if not answered:
            raise FlushTimeoutError

    def _ping(self) -> None:
        """Write the pending data and a PING at once, so that its PONG confirms that data."""
        pong, self._next_pong = self._next_pong, None
        if pong is None or not self.is_connected or self._transport is None:
            return  # the callers of `flush` time out
        self._pongs.append(pong)
        self._transport.writelines([*self._pending, PING_PROTO])
        self._pending.clear()
        self._pending_data_size = 0

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,  # noqa: ASYNC109  # signature of nats-py
        old_style: bool = False,
        headers: dict[str, str] | None = None,
    ) -> Msg:
        """Send a request and return its reply.

        Arguments:
            timeout: in seconds.

        Raises: nats.errors.Error without a connection, when the connection is lost before the reply, or
        without a reply before the timeout; except in the first case, the server may have processed the
        request.
        """
        # nats-py would buffer the request until the client is connected again.
        if not self.is_connected:
            raise ConnectionReconnectingError
        try:
            reply = await super().request(subject, payload, timeout, old_style, headers)
        except TimeoutError:
            await self._note_silence()
            raise
        except NoRespondersError:
            self._silent_since = None
            raise
        self._silent_since = None
        return reply

    async def request_bytes(self, subject: bytes, headers: bytes, payload: bytes, seconds: float) -> Reply:
        """Send a request, and return its reply; the cost is a third of `request`'s.

        Arguments:
            headers: as they are sent, from `NATS/1.0` to the empty line.

        Raises: as `request`.
        """
        if not self.is_connected:
            raise ConnectionReconnectingError
        if not self._reply_prefix:
            self._reply_prefix = self.new_inbox().encode() + b"."
            await self.subscribe_bytes(f"{self._reply_prefix.decode()}*", self._take_reply)
        self._request_count += 1
        address = b"%b%d" % (self._reply_prefix, self._request_count)
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Reply] = loop.create_future()
        self._replies[address] = reply, loop.time() + seconds
        if self._expiry is None or self._expiry.when() > loop.time() + seconds:
            self._expire()
        sizes = (len(headers), len(headers) + len(payload))
        try:
            await self._send_command(
                b"HPUB %b %b %d %d\r\n%b%b\r\n" % (subject, address, *sizes, headers, payload)
            )
            if self._flush_queue is not None and self._flush_queue.empty():
                await self._flush_pending()
            answer: Reply = await reply
        except TimeoutError:
            await self._note_silence()
            raise NatsTimeoutError from None
        finally:
            del self._replies[address]
        self._silent_since = None
        if answer.headers.startswith(_NO_RESPONDERS):
            raise NoRespondersError
        return answer

    def _take_reply(self, subject: bytes, _: bytes | None, headers: bytes, data: bytes) -> None:
        waiting = self._replies.get(subject)
        if waiting is not None and not waiting[0].done():
            waiting[0].set_result(Reply(headers, data))

    def _expire(self) -> None:
        """Fail the requests whose time is over, and set the one timer of all others."""
        loop = asyncio.get_running_loop()
        now, next_at = loop.time(), math.inf
        for reply, ends_at in self._replies.values():
            if ends_at > now:
                next_at = min(next_at, ends_at)
            elif not reply.done():
                reply.set_exception(TimeoutError())
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = loop.call_at(next_at, self._expire) if next_at < math.inf else None

    async def close(self) -> None:
        """Flush and close, within a few seconds in any state of the connection."""
        if not self._is_closing:
            self._is_closing = True
            with suppress(Error, OSError):
                await self.flush(CLOSE_TIMEOUT_SECONDS)
        # A graceful close would wait for a server that doesn't read.
        await self._drop_pending()
        closing = asyncio.create_task(super().close())
        await asyncio.wait([closing], timeout=CLOSE_TIMEOUT_SECONDS)
        await cancel_and_wait(*(task for task in (closing, self._reconnection_task) if task is not None))
        await self._end_tasks()
        self._abort()
        self._status = Client.CLOSED

    async def _read_loop(self) -> None:
        """Read until the connection ends, and reconnect when the loop ends for any other reason."""
        await super()._read_loop()
        task = asyncio.current_task()
        if task is not None and task is self._reading_task and not task.cancelling():
            await self._process_op_err(Error("nats: the read loop ended"))

    async def _process_err(self, err_msg: str) -> None:
        """Reconnect after errors on which nats-py closes permanently, such as expired credentials."""
        if PERMISSIONS_ERR in err_msg:
            await super()._process_err(err_msg)
            return
        error = Error("nats: " + err_msg.strip("'"))
        await self._error_cb(error)
        await self._process_op_err(error)

    async def _attempt_reconnect(self) -> None:
        # Otherwise the server would store a request that is sent again after later ones.
        await self._drop_pending()
        await super()._attempt_reconnect()

    async def _connect_to_server(self, s: Srv) -> None:
        _end_if_cancelled()
        self._abort()
        await super()._connect_to_server(s)

    async def _process_connect_init(self) -> None:
        _end_if_cancelled()
        # Tasks of the previous connection would read from the new one, or feed its parser.
        await self._end_tasks()
        self._ps.reset()
        await super()._process_connect_init()

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """Refuse a server without TLS before anything is sent to it, if TLS is needed."""
        has_tls = info.get("tls_required") or self.options["tls_handshake_first"]
        if initial_connection and self._needs_tls and not has_tls:
            raise SSLError("the server offers no TLS")
        await super()._process_info(info, initial_connection)

    async def _end_tasks(self) -> None:
        tasks = (self._reading_task, self._ping_interval_task, self._flusher_task)
        await cancel_and_wait(*(task for task in tasks if task is not None))

    async def _drop_pending(self) -> None:
        """Abort the connection, fail the requests without a reply, and drop the data not yet sent."""
        self._abort()
        self._pending.clear()
        self._pending_data_size = 0
        replies: Iterable[asyncio.Future[Any]] = (
            *self._resp_map.values(),
            *(reply for reply, _ in self._replies.values()),
        )
        for reply in replies:
            if not reply.done():
                reply.set_exception(Error("nats: the connection was lost before the reply"))
                reply.exception()  # silences asyncio's 'exception was never retrieved'
        while self._flush_queue is not None and not self._flush_queue.empty():
            flushed = self._flush_queue.get_nowait()
            if not flushed.done():
                flushed.set_result(None)
            await asyncio.sleep(0)  # requests that wait for room in the queue

    async def _note_silence(self) -> None:
        """Replace a connection without replies to requests: the server may have dropped the subscription."""
        now = asyncio.get_running_loop().time()
        if self._silent_since is None:
            self._silent_since = now
        elif now - self._silent_since >= SILENCE_SECONDS and self.is_connected:
            self._silent_since = None
            logger().warning("nats.silent", client=self.options["name"])
            await self.force_reconnect()

    def _abort(self) -> None:
        """Close the socket without waiting for the server to read pending data."""
        writer: asyncio.StreamWriter | None = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()


def _end_if_cancelled() -> None:
    """Raise `CancelledError` again if the current task dropped it.

    `asyncio.wait_for` before Python 3.12 drops a cancellation that coincides with the result, and nats-py
    would then try to connect forever.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
