"""A request that comes in one piece is answered as one whose parts come one after the other, by ASGI."""

import json
import re
import socket
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom.adapters.compose.access import open_capabilities, open_key_ring
from postroom.domain.capability.rights import Right, Rights
from tests.support.http_messages import message
from tests.support.servers.http import PostroomServer

PAUSE_SECONDS = 0.05
FRAME_BYTES = 65_536
JSON = {"Host": "localhost", "Content-Type": "application/json", "X-Corr-Id": "call-7"}
SEND, RECV = "/v1/send", "/v1/recv"
UNKNOWN = "0199d2c4-6f00-7a10-8c21-3b5b0f6f9e01"
RECEIPT = "r.AZnSxG8AehCMITtbD2-eAQAAAAIAAAAAAAE"
_VARYING = re.compile(
    rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|r\.[\w-]{30,}|b3:[0-9a-f]{64}"
    rb"|\d{4}-\d\d-\d\dT[\d:.]+Z|\"timestamp\":\d+|\"shard\":\d+|date: [^\r]+|retry[-_]after[^\d]+\d+"
)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PostroomServer, dict[str, str]]]:
    """A server that asks for tokens: of all rights, of one right, and of another topic."""
    folder = tmp_path_factory.mktemp("tokens")
    store = str(folder / "store.db")
    with open_capabilities(store, open_key_ring(store)) as capabilities:
        capabilities.rotate()
        made = {
            "all": capabilities.issue("all", Rights(("*",), ("*",), tuple(Right))),
            "recv": capabilities.issue("recv", Rights(("*",), ("*",), (Right.RECV,))),
            "other": capabilities.issue("other", Rights(("*",), ("other.*",), tuple(Right))),
        }
    with PostroomServer(folder, store, dev=False, frame_bytes=FRAME_BYTES) as server:
        yield server, made | {"junk": "prm1_junk"}


def request(
    path: str, body: Any, headers: dict[str, str] | None = None, version: str = "1.1", method: str = "POST"
) -> tuple[bytes, bytes]:
    """Return the header and the body of a request."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {**JSON, "Content-Length": str(len(content)), **(headers or {})}
    lines = [f"{name}: {value}\r\n" for name, value in fields.items() if value]
    return f"{method} {path} HTTP/{version}\r\n{''.join(lines)}\r\n".encode(), content


def answer(raw: socket.socket) -> tuple[bytes, bool]:
    """Return the next answer without what varies, and whether the server closed the connection after it."""
    raw.settimeout(30)
    received = b""
    while b"\r\n\r\n" not in received:
        piece = raw.recv(65_536)
        if not piece:
            return received, True
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    length = int(head.partition(b"content-length: ")[2].partition(b"\r")[0])
    while len(body) < length:
        body += raw.recv(65_536)
    is_closed = b"connection: close" in head.lower() and raw.recv(1) == b""
    return _VARYING.sub(b"*", head + b"\r\n\r\n" + body), is_closed


def ask(server: PostroomServer, *pieces: bytes) -> tuple[bytes, bool]:
    """Send the pieces of a request one after the other, and return its answer."""
    with server.raw() as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number, piece in enumerate(pieces):
            if number:
                time.sleep(PAUSE_SECONDS)
            raw.sendall(piece)
        answered = answer(raw)
        if not answered[1]:  # the connection goes on
            raw.sendall(b"".join(request("/v1/nothing", {})))
            assert b"E_NOT_FOUND" in answer(raw)[0]
        return answered


def both(server: PostroomServer, head: bytes, body: bytes) -> tuple[int, bytes]:
    """Return status and bytes of the answer to a request, which is the same for both of its ways."""
    whole, is_closed = ask(server, head + body)
    parts, are_closed = ask(server, head[:20], head[20:] + body[:-1], body[-1:])
    assert (whole, is_closed) == (parts, are_closed)
    return int(whole[9:12]), whole


CLOUD_EVENT = {
    "ce-specversion": "1.0", "ce-id": "e-1", "ce-source": "/shop", "ce-type": "cloud.whole",
    "Content-Type": "application/json",
}  # fmt: skip
CASES: dict[str, tuple[int, tuple[bytes, bytes]]] = {
    "a send": (200, request(SEND, message("whole.sends"))),
    "a send with everything": (
        200,
        request(
            SEND,
            message(
                "whole.sends", bytes(range(256)), attrs={"a": "ü", "b": ""}, attrs_b64={"c": "AP8="},
                sticky_key="s", priority=9, ttl_seconds=60, deliver_after_ms=1, content_type="text/plain",
                correlation_id="own", causality_parent="c", principal="p", schema_url="s", schema_version="1",
                trace_id="a" * 32, span_id="b" * 16, published_at_us=1_700_000_000_000_000,
            ),
        ),
    ),
    "a list": (200, request(SEND, [message("whole.list"), message("no spaces"), message("whole.list")])),
    "a cloud event": (200, request(SEND, {"x": 1}, CLOUD_EVENT)),
    "an invalid cloud event": (400, request(SEND, {"x": 1}, {**CLOUD_EVENT, "ce-id": ""})),
    "a receive of nothing": (200, request(RECV, {"topic": ["whole.none", "whole.nil"], "max_messages": 3})),
    "a short long poll": (200, request(RECV, {"topic": "whole.none", "wait_ms": 20})),
    "a receive out of bounds": (400, request(RECV, {"topic": "whole.none", "max_messages": 257})),
    "an ack of nothing": (404, request(f"/v1/ack/{UNKNOWN}", b"")),
    "an ack by another receipt": (400, request("/v1/ack/another", {"receipt": RECEIPT})),
    "an ack by no receipt": (400, request(f"/v1/ack/{UNKNOWN}", {"receipt": "nonsense"})),
    "an ack of an unknown receipt": (404, request(f"/v1/ack/{UNKNOWN}", {"receipt": RECEIPT})),
    "acks": (200, request("/v1/ack", {"receipts": [RECEIPT]})),
    "a nack of nothing": (404, request(f"/v1/nack/{UNKNOWN}", {"reason": "x", "delay_ms": 5})),
    "a nack with a wrong action": (400, request(f"/v1/nack/{UNKNOWN}", {"action": "forget"})),
    "nacks": (200, request("/v1/nack", {"receipts": [RECEIPT], "action": "release"})),
    "an extension of nothing": (404, request(f"/v1/extend/{UNKNOWN}", {"visibility_ms": 500})),
    "a derived call": (404, request("/v1/topics/whole.none/purge", {"ready": True})),
    "an escaped path": (404, request("/v1/ack/a%2Fb%20c", b"")),
    "an escaped path that is a call": (200, request("/v1/%73end", message("whole.sends"))),
    "a path that is no UTF-8": (400, request("/v1/ack/%ff", b"")),
    "a path without an id": (404, request("/v1/ack/", b"")),
    "an unknown path": (404, request("/v1/nothing", {})),
    "a path outside": (404, request("/nothing", {})),
    "another method": (405, request("/v1/backlog", {})),
    "a parameter": (400, request(SEND + "?a=1", message("whole.sends"))),
    "a fragment": (200, request(SEND + "#part", message("whole.sends"))),
    "no JSON": (400, request(SEND, b"{")),
    "a name twice": (400, request(SEND, b'{"topic":"t","topic":"t","payload_b64":""}')),
    "a NUL": (400, request(SEND, b'{"topic":"t","payload_b64":"","idem_key":"\\u0000"}')),
    "an unknown field": (400, request(SEND, message("whole.sends", other=1))),
    "an invalid topic": (400, request(SEND, message("no spaces"))),
    "no body": (415, request(SEND, b"", {"Content-Type": ""})),
    "another type": (415, request(SEND, message("whole.sends"), {"Content-Type": "text/plain"})),
    "a type with parameters": (
        200, request(SEND, message("whole.sends"), {"Content-Type": "application/JSON; charset=utf-8"})
    ),
    "a content coding": (415, request(SEND, message("whole.sends"), {"Content-Encoding": "gzip"})),
    "no content coding": (200, request(SEND, message("whole.sends"), {"Content-Encoding": "identity"})),
    "a frame": (200, request(SEND, message("whole.sends", bytes(48_000)))),
    "more than a frame": (413, request(SEND, message("whole.sends", bytes(FRAME_BYTES)))),
    "a foreign host": (421, request(SEND, message("whole.sends"), {"Host": "evil.example"})),
    "a foreign origin": (403, request(SEND, message("whole.sends"), {"Origin": "http://evil.example"})),
    "its own origin": (200, request(SEND, message("whole.sends"), {"Origin": "http://localhost"})),
    "an invalid correlation id": (400, request(SEND, message("whole.sends"), {"X-Corr-Id": "a b"})),
    "no correlation id": (200, request(SEND, message("whole.sends"), {"X-Corr-Id": ""})),
    "a wrong mode": (400, request(SEND, message("whole.sends"), {"X-Idempotency-Mode": "yes"})),
    "the last request": (200, request(SEND, message("whole.sends"), {"Connection": "close"})),
    "the last request, refused": (400, request(SEND, b"[", {"Connection": "close"})),
    "an expectation": (200, request(SEND, message("whole.sends"), {"Expect": "nothing"})),
    "an expectation of a refused one": (400, request(SEND, b"[", {"Expect": "nothing"})),
    "HTTP/1.0": (200, request(SEND, message("whole.sends"), version="1.0")),
    "an upgrade": (
        200, request(SEND, message("whole.sends"), {"Connection": "Upgrade", "Upgrade": "h2c"})
    ),
    "a trace": (
        200,
        request(SEND, message("whole.sends"), {"Traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}),
    ),
    "two credentials": (200, request(SEND, message("whole.sends"), {"Authorization": "Bearer prm1_x"})),
    "no bearer": (401, request(SEND, message("whole.sends"), {"Authorization": "Basic eA=="})),
    "a PUT": (404, request("/v1/topics/whole.none/pause", b"", {"Content-Type": ""}, method="PUT")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_answer_does_not_depend_on_how_the_request_comes(server: PostroomServer, name: str) -> None:
    status, (head, body) = CASES[name]
    ask(server, head + body)  # what is sent once is a duplicate from now on
    assert both(server, head, body)[0] == status


@pytest.mark.parametrize("token", ["all", "recv", "other", "junk", ""])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (SEND, message("whole.tokens")),
        (SEND, [message("whole.tokens")]),
        (RECV, {"topic": "whole.none"}),
        (f"/v1/ack/{UNKNOWN}", {}),
        (f"/v1/nack/{UNKNOWN}", {"receipt": RECEIPT}),
    ],
    ids=["send", "list", "recv", "ack", "nack"],
)
def test_tokens_are_checked_in_both_ways(
    tokens: tuple[PostroomServer, dict[str, str]], token: str, path: str, body: Any
) -> None:
    server, made = tokens
    headers = {"Authorization": f"Bearer {made[token]}"} if token else {}
    status, _ = both(server, *request(path, body, headers))
    assert (status == 401) == (token in ("junk", ""))


def test_a_message_is_delivered_and_settled_in_both_ways(server: PostroomServer) -> None:
    for path, settled in (("/v1/ack/", b'{"ok":true}'), ("/v1/nack/", b'{"ok":true}')):
        topic = f"whole.life{path.replace('/', '.')}x"
        answers = []
        for cuts in ((), (5,), (200,)):
            assert ask_at(server, cuts, SEND, message(topic, b"\x00\xff", idem_key=f"{cuts}"))[0] == 200
            _, received = ask_at(server, cuts, RECV, {"topic": topic, "visibility_ms": 60_000})
            (delivery,) = json.loads(received)["messages"]
            assert delivery["payload_b64"] == b64encode(b"\x00\xff").decode()
            body = {"receipt": delivery["receipt"]} | ({"delay_ms": 60_000} if "nack" in path else {})
            answers.append(ask_at(server, cuts, path + delivery["msg_id"], body))
            duplicate = ask_at(server, cuts, SEND, message(topic, b"\x00\xff", idem_key=f"{cuts}"))
            assert json.loads(duplicate[1])["duplicate"] is True
            conflict = request(SEND, message(topic, b"other", idem_key=f"{cuts}"))
            assert both(server, *conflict)[0] == 409
        assert answers == [(200, settled)] * 3


def ask_at(server: PostroomServer, cuts: tuple[int, ...], path: str, body: Any) -> tuple[int, bytes]:
    """Make a call whose bytes come in pieces that end at these positions, and return status and body."""
    sent = b"".join(request(path, body))
    pieces = [sent[a:b] for a, b in zip((0, *cuts), (*cuts, None), strict=True)]
    with server.raw() as raw:
        for piece in pieces:
            raw.sendall(piece)
            time.sleep(PAUSE_SECONDS if cuts else 0)
        received = b""
        while not received.endswith(b"}"):
            received += raw.recv(65_536)
    return int(received[9:12]), received.partition(b"\r\n\r\n")[2]


def test_a_full_topic_is_refused_in_both_ways(server: PostroomServer) -> None:
    batch = [message("whole.full") for _ in range(50)]
    assert ask_at(server, (), SEND, batch)[0] == 200
    status, refused = both(server, *request(SEND, message("whole.full")))
    assert (status, b"E_SATURATED" in refused) == (429, True)


def test_requests_that_come_together_are_answered_in_their_order(server: PostroomServer) -> None:
    asked = [
        request(SEND, message("whole.many", idem_key="once")),
        request("/v1/nothing", {}),
        request(SEND, message("whole.many", idem_key="once")),
        request(RECV, {"topic": "whole.none", "wait_ms": 50}),
        request(f"/v1/ack/{UNKNOWN}", {}),
        request(RECV, {"topic": "whole.none"}, {"Connection": "close"}),
    ]
    sent = b"".join(head + body for head, body in asked)
    for cut in (len(sent), 10, len(b"".join(asked[0])), len(b"".join(asked[0])) - 1, 700):
        with server.raw() as raw:
            raw.sendall(sent[:cut])
            time.sleep(PAUSE_SECONDS)
            raw.sendall(sent[cut:])
            received = b""
            while piece := raw.recv(65_536):
                received += piece
        statuses = [int(each[:3]) for each in received.split(b"HTTP/1.1 ")[1:]]
        assert statuses == [200, 404, 200, 200, 404, 200]


def test_a_client_that_leaves_during_a_whole_request_harms_nobody(server: PostroomServer) -> None:
    for path, body in ((SEND, message("whole.left")), (RECV, {"topic": "whole.none", "wait_ms": 60_000})):
        for _ in range(5):
            with server.raw() as raw:
                raw.sendall(b"".join(request(path, body)))
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    assert server.call("GET", "/healthz").status == 200
    assert "Traceback" not in server.log


def test_a_large_answer_comes_whole(tmp_path: Path) -> None:
    with PostroomServer(tmp_path) as server:
        payload = bytes(200_000)
        for _ in range(4):
            assert ask_at(server, (), SEND, message("whole.large", payload))[0] == 200
        _, received = ask_at(server, (), RECV, {"topic": "whole.large", "max_bytes": 4_000_000})
    assert [each["payload_b64"] for each in json.loads(received)["messages"]] == [
        b64encode(payload).decode()
    ] * 4
