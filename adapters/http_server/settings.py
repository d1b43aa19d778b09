"""Limits of the HTTP server."""

from postroom.adapters.sockets.connections import ConnectionLimits


class HttpSettings(ConnectionLimits, frozen=True, kw_only=True):
    """Limits of the HTTP server, besides the limits of connections; times in ms.

    Arguments:
        frame_bytes: largest body of a request (svc-mailbox I-6).
        buffer_bytes: total size of the bodies held at a time; a request above it is answered 503.
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
