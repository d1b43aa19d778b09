"""An HTTP connection with deadlines and bounds that uvicorn's own protocol does not have."""

import asyncio
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from postroom.adapters.http_server.problems import refusal_of
from postroom.adapters.http_server.requests import WholeRequests
from postroom.adapters.http_server.settings import HttpSettings
from postroom.adapters.sockets.connections import UnauthenticatedConnections, WriteBuffer
from postroom.application.telemetry import logger


class State(ServerState):
    """The connections of a server, each an `HttpConnection`.

    `refused` are those above the limit, whose clients have not closed them yet. `head` has the fields of the
    header of every answer.
    """

    def __init__(self, limits: HttpSettings) -> None:
        super().__init__()
        self.head = b""
        self.refused: set[Any] = set()
        self.unauthenticated = UnauthenticatedConnections[Any](
            lambda connection: connection.make_way(),
            limits.max_unauthenticated,
            limits.max_unauthenticated_per_address,
        )

    def set_fields(self, fields: list[tuple[bytes, bytes]]) -> None:
        """Set the fields of the header of every answer."""
        self.default_headers = fields
        self.head = b"".join(b"%b: %b\r\n" % field for field in fields)


MAX_HEADER_BYTES = 64 << 10
LINE_BYTES, FIELD_BYTES = len(b"  HTTP/1.1\r\n\r\n"), len(b": \r\n")
"""Bytes of a header besides method, path, names and values."""
OVERHEAD = 8
"""Bytes on the wire per byte of the largest frame: chunk headers, trailers, and bodies that are refused."""


class _HeaderTooLarge(Exception):
    """The header of a request exceeds its limit."""


class HttpConnection(HttpToolsProtocol):
    """Connection that is closed when a request is late or its bytes exceed their bounds.

    Arguments:
        limits: deadlines and bounds.
        whole: answers requests that come in one piece; None sends all requests to the application by ASGI.
    """

    server_state: State

    def __init__(
        self, config: Config, state: State, limits: HttpSettings, whole: WholeRequests | None = None
    ) -> None:
        super().__init__(config, state, {"connection": self})
        self._whole = whole
        self._pieces: list[bytes] | None = None  # the body of a request that may come in one piece
        self._refused = state.refused
        self._unauthenticated = state.unauthenticated
        self._is_authenticated = False
        self.timeout_keep_alive = limits.unauthenticated_timeout_ms / 1_000  # type: ignore[assignment]  # seconds
        self.closed = asyncio.Event()
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        self._in_header = True
        self._header_bytes = 0
        self._is_idle = True  # between two requests
        # Time limit in ms, and the part of a request that it is for.
        self._awaited: tuple[int, str] | None = None
        self._has_moved_on = False  # whether these bytes have begun another part
        self._received = 0

    # -- the transport's callbacks ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline of the first request."""
        seconds = self._limits.write_timeout_ms / 1_000
        super().connection_made(WriteBuffer(transport, self.loop, seconds))  # type: ignore[arg-type]  # all it needs of one
        self._unauthenticated.add(self, transport.get_extra_info("peername"))
        self._expect(self._limits.header_timeout_ms, "header")

    def set_authenticated(self, is_authenticated: bool) -> None:
        """Note whether the last request that needs a token had a valid one."""
        if is_authenticated == self._is_authenticated or self.transport.is_closing():
            return
        self._is_authenticated = is_authenticated
        if is_authenticated:
            self._unauthenticated.discard(self)
            milliseconds = self._limits.idle_timeout_ms
        else:
            self._unauthenticated.add(self, self.transport.get_extra_info("peername"))
            milliseconds = self._limits.unauthenticated_timeout_ms
        self.timeout_keep_alive = milliseconds / 1_000  # type: ignore[assignment]  # seconds

    def make_way(self) -> None:
        """Close the connection so that another one can take its place at once."""
        self.connections.discard(self)
        self._refused.add(self)
        self.transport.close()
        # Otherwise data that the client does not read would keep the connection open.
        if self.transport.get_write_buffer_size() or len(self._refused) > self._limits.max_connections:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadlines, and notify the request in progress."""
        super().connection_lost(exc)
        self._refused.discard(self)
        self._unauthenticated.discard(self)
        self.transport.lost()  # type: ignore[attr-defined]  # of WriteBuffer
        self._unset_keepalive_if_required()
        self._cancel_deadline()
        self._cancel_write_deadline()
        self.closed.set()

    def data_received(self, data: bytes) -> None:
        """Parse bytes within the bounds of a header and of a message."""
        if self.transport.is_closing():
            return
        self._received += len(data)
        # Line ends between requests are ignored (RFC 9112, 2.2), and don't keep an idle connection open.
        if not self._is_idle or data.strip(b"\r\n"):
            self._unset_keepalive_if_required()
            while data:
                data = self._parse(data)
        if self.transport.is_closing():
            return
        if self._has_moved_on:
            self._has_moved_on = False
            self._cancel_deadline()
            if self._awaited is not None:
                self._expect(*self._awaited)
        if self._in_header and self._received > MAX_HEADER_BYTES:
            self._refuse_header()
        elif self._received > MAX_HEADER_BYTES + OVERHEAD * self._limits.frame_bytes:
            self.transport.abort()

    def pause_writing(self) -> None:
        """Start the deadline of a client that does not read."""
        super().pause_writing()
        self._write_deadline = self.loop.call_later(
            self._limits.write_timeout_ms / 1_000, self.transport.abort
        )

    def resume_writing(self) -> None:
        """Cancel that deadline."""
        super().resume_writing()
        self._cancel_write_deadline()

    # -- the parser's callbacks ---

    def on_message_begin(self) -> None:
        """Start the deadline of the header, unless these bytes complete it."""
        self.url, self.headers, self.expect_100_continue = b"", [], False
        self._in_header = True
        self._header_bytes = 0
        self._is_idle = False
        self._received = 0
        self._await(self._limits.header_timeout_ms, "header")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a field to the header; drop trailers, which nobody expects and no limit of headers covers."""
        if self._in_header:
            self._header_bytes += len(name) + len(value) + FIELD_BYTES
            name = name.lower()
            if name == b"expect" and value.lower() == b"100-continue":
                self.expect_100_continue = True
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Start the deadline of the body, unless these bytes complete it."""
        if self.parser.should_upgrade():
            return  # the parser starts over when the upgrade is declined
        line = len(self.parser.get_method()) + len(self.url) + LINE_BYTES
        if line + self._header_bytes > MAX_HEADER_BYTES:
            raise _HeaderTooLarge
        self._in_header = False
        self.transport.lingers = True  # type: ignore[attr-defined]  # of WriteBuffer
        self._await(self._limits.body_timeout_ms, "body")
        cycle: Any = self.cycle
        if (
            self._whole is not None
            and (cycle is None or cycle.response_complete)
            and self.parser.get_method() == b"POST"
            and self.parser.get_http_version() == "1.1"
            and not self.expect_100_continue
            and self._whole.whole_targets.fullmatch(self.url)
        ):
            self._pieces = []
        else:
            self._start_cycle()

    def on_body(self, body: bytes) -> None:
        """Add bytes to the body."""
        if self._pieces is None:
            super().on_body(body)
        else:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        """Cancel the deadline: the rest takes as long as the server does."""
        if self.parser.should_upgrade():
            return
        if self._pieces is None or self._whole is None:
            super().on_message_complete()
        else:
            body, self._pieces = b"".join(self._pieces), None
            keep_alive = self.parser.should_keep_alive()
            self.cycle, work = self._whole.begin(self, self.url, self.headers, body, keep_alive=keep_alive)
            task = self.loop.create_task(work)
            task.add_done_callback(self.tasks.discard)
            self.tasks.add(task)
        self.transport.lingers = False  # type: ignore[attr-defined]  # of WriteBuffer
        self._awaited = None
        self._has_moved_on = True
        self._in_header = True
        self._is_idle = True
        self._received = 0

    # -- requests ---

    def _start_cycle(self) -> None:
        """Start to answer the request by ASGI, with the part of its body that has arrived."""
        url, headers, expects_100 = self.url, self.headers, self.expect_100_continue
        pieces, self._pieces = self._pieces or (), None
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects_100
        self.headers += headers  # the list of the scope, so in place
        super().on_headers_complete()
        for each in pieces:
            super().on_body(each)

    # -- refusals ---

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP/1.1, such as a request with Content-Length and Transfer-Encoding."""
        self._refuse(400, "E_SCHEMA", "The request is not valid HTTP/1.1.")

    def _parse(self, data: bytes) -> bytes:
        """Parse bytes; return the bytes left to be parsed."""
        try:
            self.parser.feed_data(data)
            if self._pieces is not None:
                self._start_cycle()
        except httptools.HttpParserError as error:
            self._pieces = None
            if isinstance(error.__context__, _HeaderTooLarge):
                self._refuse_header()
            else:
                self.send_400_response("")
        except httptools.HttpParserUpgrade as upgrade:
            return self._decline_upgrade(data[upgrade.args[0] :])
        return b""

    def _decline_upgrade(self, rest: bytes) -> bytes:
        """Return the request without its upgrade, to be parsed again (RFC 9110, 7.8).

        The parser treats bytes after the header as another protocol, although they may be a body.
        """
        parser = self.parser
        if parser.get_method() == b"CONNECT":
            self.send_400_response("")
            return b""
        fields = [b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade"]
        version = parser.get_http_version().encode()
        return b"%b %b HTTP/%b\r\n%b\r\n%b" % (parser.get_method(), self.url, version, b"".join(fields), rest)

    def _refuse_header(self) -> None:
        self._refuse(431, "E_HEADER_TOO_LARGE", f"A header has at most {MAX_HEADER_BYTES} bytes.")

    def _await(self, milliseconds: int, part: str) -> None:
        self._awaited = (milliseconds, part)
        self._has_moved_on = True

    def _expect(self, milliseconds: int, part: str) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(milliseconds / 1_000, self._time_out, milliseconds, part)

    def _time_out(self, milliseconds: int, part: str) -> None:
        if self.flow.read_paused:  # the client waits for the server
            self._expect(milliseconds, part)
        else:
            self._refuse(408, "E_TIMEOUT", f"The {part} of the request took longer than {milliseconds} ms.")

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer a request that has not reached the application, and close."""
        logger().info("http.refused", status=status, code=code)
        if not self._is_answering and len(self.pipeline) == 0:
            self.transport.write(refusal_of(status, code, message, self.server_state.head))
            self.transport.end()  # type: ignore[attr-defined]  # of WriteBuffer
        else:
            self.transport.close()

    @property
    def _is_answering(self) -> bool:
        """Return whether a request is being answered whose body was complete."""
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete and not cycle.more_body

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _cancel_write_deadline(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None
