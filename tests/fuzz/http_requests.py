"""Target: requests of the HTTP interface, whose first line is method and target, and the rest is the body."""

from contextlib import AsyncExitStack, suppress

import msgspec

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.http_server.requests import decode
from postroom.adapters.http_server.server import make_app
from postroom.adapters.http_server.settings import HttpSettings
from postroom.domain.errors import InvalidRequest
from tests.fuzz.services import MailboxCalls, call_app, stopping_service

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


class _Calls(MailboxCalls):
    """Requests to an application over a mailbox in memory."""

    def call(self, data: bytes) -> None:
        """Check that a request is answered by anything but an internal error."""
        line, _, body = data.partition(b"\n")
        method, _, target = line.partition(b" ")
        path, _, query = target.partition(b"?")
        if not method.isalpha() or not path.startswith(b"/") or not query.isascii():
            return  # the HTTP parser refuses them
        self._check_round_trip(method.decode(), path.decode("latin-1"), body)
        scope = {
            "method": method.decode(),
            "scheme": "http",
            "raw_path": path,
            "query_string": query,
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        }
        status, content = self._runner.run(call_app(self._app, scope, body))
        assert status != 500, content
        if status >= 400:
            answer = msgspec.json.decode(content)
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

    async def serve(self, mailbox: OwnedMailbox, opened: AsyncExitStack) -> None:
        self._app = make_app(stopping_service(mailbox), HttpSettings())


opened = _Calls.opened
