"""Limits of the HTTP server, and the connections to which they apply."""

from typing import Any

from uvicorn.server import ServerState

from postroom.adapters.sockets.connections import ConnectionLimits, UnauthenticatedConnections


class HttpSettings(ConnectionLimits, frozen=True, kw_only=True):
    """Limits of the HTTP server, besides the limits of connections; times in ms.

    Arguments:
        frame_bytes: largest body of a request (svc-mailbox I-6).
        buffer_bytes: bodies held at a time; a request above it is answered 503.
        header_timeout_ms: time to send the header of a request.
        body_timeout_ms: time to send its body.
        idle_timeout_ms: time between two requests of a connection that has shown a valid token.
        write_timeout_ms: time for the client to read the sent data.
        heartbeat_ms: longest silence of a stream.
        stop_timeout_ms: time to finish the requests in progress at a stop.
        open_metrics: let processes of this machine read `/metrics` without a token.
    """

    frame_bytes: int = 1 << 20
    buffer_bytes: int = 64 << 20
    header_timeout_ms: int = 5_000
    body_timeout_ms: int = 30_000
    idle_timeout_ms: int = 60_000
    write_timeout_ms: int = 30_000
    heartbeat_ms: int = 5_000
    stop_timeout_ms: int = 4_000
    open_metrics: bool = False


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
