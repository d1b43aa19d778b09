"""One request and its answer, apart from ASGI."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec

from postroom.adapters.http_server.connection import Connection
from postroom.application.operations.mailbox import Mailbox
from postroom.application.service import Session

CLOSE: Final = (b"connection", b"close")
"""Header of an answer after which the connection is closed."""
_ENCODER = msgspec.json.Encoder()


class Call(msgspec.Struct):
    """A request whose path, parameters and body have been checked.

    Arguments:
        path: values of the path's placeholders.
        query: the parameters, as the route's type.
        body: the body, as the route's type; None without one.
        connection: the client's connection, whose end cancels what waits for the client.
        open_session: opens the session again, which fails once the token has expired or is revoked.
        caller: the session with which the request was accepted; None for a public route.
    """

    corr_id: str
    headers: Mapping[bytes, bytes]
    path: dict[str, str]
    query: Any
    body: Any
    connection: Connection
    open_session: Callable[[], Awaitable[Session]]
    caller: Session | None

    @property
    def session(self) -> Session:
        """Return the caller's session."""
        assert self.caller is not None, "a public route has no session"
        return self.caller

    @property
    def mailbox(self) -> Mailbox:
        """Return the mailbox as the caller may use it."""
        return self.session.mailbox

    @property
    def closed(self) -> asyncio.Event:
        """Return the event that is set when the client is gone."""
        return self.connection.closed


class Reply(msgspec.Struct):
    """An answer.

    Arguments:
        body: bytes, or their pieces.
    """

    body: bytes | AsyncIterator[bytes]
    status: int = 200
    content_type: bytes = b"application/json"
    headers: tuple[tuple[bytes, bytes], ...] = ()


def json_reply(value: Any, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Reply:
    """Return a value as JSON."""
    return Reply(_ENCODER.encode(value), status, headers=headers)
