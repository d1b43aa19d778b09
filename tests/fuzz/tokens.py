"""Target: receipts, cursors, capabilities, ids, names, hosts and query strings, as callers pass them."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from postroom.adapters.http_server.api import make_routes
from postroom.adapters.http_server.handlers import MessageHandlers
from postroom.adapters.http_server.queries import QueryHandlers, StateHandlers
from postroom.adapters.http_server.requests import parse_query
from postroom.adapters.sockets.address import is_loopback_name
from postroom.application.messages import read_receipt, write_receipt
from postroom.domain.capability.access import combine
from postroom.domain.capability.rights import Expires, Quota, Rights, Topics, decode_caveat, encode_caveat
from postroom.domain.capability.token import Identifier, Token, mint
from postroom.domain.errors import InvalidRequest, Unauthenticated
from postroom.domain.message import Receipt
from postroom.domain.names import (
    check_mailbox,
    check_topic,
    external_id,
    may_have_id,
    message_id,
    message_stream,
)
from postroom.domain.search import Cursor
from tests.fuzz.target import Check

_ROUTES = make_routes(MessageHandlers, QueryHandlers, StateHandlers)  # type: ignore[arg-type] # not called
_QUERIES = (*(each.query for each in _ROUTES if each.query is not None), None)

_IDENTIFIER = Identifier(
    key_id=bytes(8), nonce=bytes(16), principal="shop", epoch=1, issued_at=1_700_000_000_000, rights=Rights()
)
SEEDS = [
    mint(_IDENTIFIER, bytes(32), [Expires(1_800_000_000_000), Topics(("orders.*",))]).encode().encode(),
    encode_caveat(Quota(100, None, 60_000)),
    write_receipt(Receipt(bytes(range(16)), 1, 1)).encode(),
    write_receipt(Receipt(b"\xff" * 16, (1 << 32) - 1, (1 << 48) - 1)).encode(),
    write_receipt(Receipt(bytes(16), 1, 1)).encode()[:-1] + b"F",  # other bits at the end
    write_receipt(Receipt(bytes(16), 1, 1)).encode() + b"!",
    Cursor(1_700_000_000_000, 7).encode().encode(),
    b"0199d2c4-6f00-7a10-8c21-3b5b0f6f9e01",
    b"acme@one",
    b"orders.created",
    b"[::1]:8080",
    b"topics=orders.*&statuses=dead&limit=5&headers%5Ba%5D=b&match=words&order=oldest",
    b"topic=orders&at=2026-01-31T12%3A00%3A00Z&limit=10&cursor=1",
    "größe=%C3%BC".encode(),
]
BOMBS = [
    b"prm1_" + b"k" * 3_900,
    b"\x91" * (1 << 20),
    b"r." + b"A" * (1 << 20),
    b"a=1&" * 200_000,
    b"%" * (1 << 20),
    b"[" * 100_000,
    b"A" * (1 << 20),
]


@contextmanager
def opened() -> Iterator[Check]:
    """Yield the check."""
    yield check


def check(data: bytes) -> None:
    """Check that what is accepted is the only spelling of what it means."""
    text = data.decode("utf-8", "surrogateescape")
    with suppress(InvalidRequest):
        assert write_receipt(read_receipt(text)) == text
    with suppress(Unauthenticated, InvalidRequest):
        token = Token.decode(text)
        assert token.encode() == text
        assert combine(token.read_identifier(), token.read_caveats()).expires >= 0
    with suppress(InvalidRequest):
        assert decode_caveat(data) == decode_caveat(encode_caveat(decode_caveat(data)))
    with suppress(InvalidRequest):
        assert Cursor.decode(text).encode() == text
    with suppress(InvalidRequest):
        for topic in (None, "orders"):
            stream = message_stream("acme@one", text, topic)
            assert message_id(stream, external_id(stream, text)) == text
            assert may_have_id(stream, "acme@one", text)
    for parse in (check_mailbox, check_topic):
        with suppress(InvalidRequest):
            assert parse(text) == text
    for kind in _QUERIES:
        with suppress(InvalidRequest):
            parse_query(data, kind)
    is_loopback_name(data.decode("latin-1"))
