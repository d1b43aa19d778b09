"""Target: requests of the HTTP interface, whose first line is method and target, and the rest is the body."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from postroom.adapters.compose import open_mailbox
from postroom.adapters.http_server.app import App
from postroom.adapters.http_server.requests import decode
from postroom.adapters.http_server.server import make_app
from postroom.adapters.http_server.settings import HttpSettings
from postroom.domain.errors import InvalidRequest
from tests.fuzz.services import INPUTS_PER_MAILBOX, Connection, stopping_service
from tests.fuzz.target import Check

_SEND = b'{"topic": "orders", "payload_b64": "eyJvcmRlciI6IDd9", "idem_key": "order-7", "attrs": {"a": "b"}}'
_RECEIPT = b'"r.AZnSxG8AehCMITtbD2-eAQAAAAIAAAAAAAE"'
_ID = b"0199d2c4-6f00-7a10-8c21-3b5b0f6f9e01"

SEEDS = [
    b"POST /v1/send\n" + _SEND,
    b"POST /v1/send\n[" + _SEND + b"," + _SEND + b"]",
    b'POST /v1/send\n{"topic": "t", "payload_b64": "", "message_id": "m", "priority": 3, "ttl_seconds": 9}',
    b'POST /v1/send\n{"topic": "t", "topic": "u", "payload_b64": ""}',
    b'POST /v1/send\n{"topic": "t\\u0000", "payload_b64": "", "sticky_key": "\\ud800"}',
    b'POST /v1/recv\n{"topic": ["orders", "t"], "max_messages": 10, "visibility_ms": 5000, "wait_ms": 10}',
    b'POST /v1/recv/stream\n{"topic": "orders", "max_bytes": 65536, "with_envelope": true}',
    b"POST /v1/ack/" + _ID + b'\n{"receipt": ' + _RECEIPT + b"}",
    b"POST /v1/nack/" + _ID + b'\n{"reason": "out of stock", "delay_ms": 1000}',
    b"POST /v1/extend/" + _ID + b'\n{"receipt": ' + _RECEIPT + b', "visibility_ms": 30000}',
    b'POST /v1/ack\n{"receipts": [' + _RECEIPT + b"]}",
    b'POST /v1/nack\n{"receipts": [' + _RECEIPT + b'], "reason": "why", "delay_ms": 0}',
    b'POST /v1/extend\n{"receipts": [' + _RECEIPT + b'], "visibility_ms": 250}',
    b'POST /v1/dlq/reprocess\n{"topic": "orders", "limit": 100, "message_ids": ["a"]}',
    b'PUT /v1/topics/orders/policy\n{"max_attempts": 3, "visibility_ms": 1000, "shards": 4}',
    b"GET /v1/topics/orders/policy\n",
    b'POST /v1/topics/orders/purge\n{"dead": true, "ready": true}',
    b'POST /v1/log/delete\n{"older_than_us": 1700000000000000}',
    b"GET /v1/messages?topics=orders.*&statuses=dead&limit=5&headers%5Ba%5D=b&match=words\n",
    b"GET /v1/messages/" + _ID + b"/explanation\n",
    b"GET /v1/backlog?topic=orders&at=2026-01-31T12%3A00%3A00Z\n",
    b"GET /v1/dlq?limit=5&cursor=1&at=3\n",
    b"GET /v1/peek?topic=orders&limit=1\n",
    b"GET /openapi.json\n",
    b"GET /metrics\n",
]
BOMBS = [
    b"POST /v1/send\n" + b"[" * 500_000,
    b"POST /v1/send\n" + b'{"attrs":' * 100_000,
    b'POST /v1/recv\n{"topic": "t", "max_messages": ' + b"9" * 900_000 + b"}",
    b'POST /v1/send\n{"topic": "' + b"t" * 900_000 + b'", "payload_b64": ""}',
    b"POST /v1/send\n[" + b"{}," * 300_000 + b"{}]",
    b"POST /v1/send\n" + b" " * (8 << 20),
    b"GET /v1/messages?" + b"topics=a&" * 7_000 + b"\n",
]


@contextmanager
def opened() -> Iterator[Check]:
    """Yield the check, over a mailbox in memory that is replaced before it grows large."""
    with asyncio.Runner() as runner:
        calls = _Calls(runner)
        try:
            yield calls.check
        finally:
            calls.close()


class _Calls:
    """Requests to an application over a mailbox in memory."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._count = 0
        self._opening: Any = None
        self._app: Any = None

    def check(self, data: bytes) -> None:
        """Check that a request is answered by anything but an internal error."""
        if self._count % INPUTS_PER_MAILBOX == 0:
            self.close()
            self._runner.run(self._open())
        self._count += 1
        line, _, body = data.partition(b"\n")
        method, _, target = line.partition(b" ")
        path, _, query = target.partition(b"?")
        if not method.isalpha() or not path.startswith(b"/") or not query.isascii():
            return  # the HTTP parser refuses them
        self._check_round_trip(method.decode(), path.decode("latin-1"), body)
        status, answer = self._runner.run(_call(self._app, method.decode(), path, query, body))
        assert status != 500, answer
        if status >= 400:
            assert answer["code"].startswith("E_"), answer
            assert answer["message"].endswith((".", "?")), answer

    def _check_round_trip(self, method: str, path: str, body: bytes) -> None:
        """Check that a body that is accepted is the same after being written and read again."""
        for route in self._app._router.routes:
            if route.body is not None and (route.method, route.path) == (method, path):
                decoder = msgspec.json.Decoder(route.body)
                with suppress(InvalidRequest):
                    value = decode(body, decoder)
                    assert decode(msgspec.json.encode(value), decoder) == value

    async def _open(self) -> None:
        self._opening = open_mailbox("memory:", "acme@one")
        mailbox = await self._opening.__aenter__()
        self._app = make_app(stopping_service(mailbox), HttpSettings())

    def close(self) -> None:
        """Close the mailbox."""
        if self._opening is not None:
            self._runner.run(self._opening.__aexit__(None, None, None))
            self._opening = None


async def _call(app: App, method: str, path: bytes, query: bytes, body: bytes) -> tuple[int, Any]:
    """Return the status of an answer, and its problem document."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "method": method,
        "scheme": "http",
        "raw_path": path,
        "query_string": query,
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "state": {"connection": Connection()},
    }
    await app(scope, receive, send)
    status = sent[0]["status"]
    content = b"".join(message.get("body", b"") for message in sent[1:])
    return status, msgspec.json.decode(content) if status >= 400 else None
