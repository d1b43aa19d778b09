"""Bytes that no well-behaved client sends: each ends with its connection, and the server goes on."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.servers.http import PostroomServer, receive_all

FRAME_BYTES = 65_536
HEAD = b"POST /v1/send HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"topic": "attacked", "payload_b64": ""}'


@pytest.fixture(autouse=True)
def _server_goes_on(server: PostroomServer) -> Iterator[None]:
    yield
    assert server.call("GET", "/healthz").json == {"ok": True}
    assert server.call("GET", "/v1/backlog?topic=attacked").json["shards"] == []


def answers(raw: bytes) -> list[int]:
    """Return the statuses of all answers."""
    return [int(each[:3]) for each in raw.split(b"HTTP/1.1 ")[1:]]


def attack(server: PostroomServer, *pieces: bytes, pause: float = 0.0) -> bytes:
    """Send pieces, and return what comes back until the server closes."""
    with server.raw() as raw:
        try:
            for piece in pieces:
                raw.sendall(piece)
                time.sleep(pause)
        except (BrokenPipeError, ConnectionResetError):
            pass
        return receive_all(raw)


def ask_for_30_seconds(raw: socket.socket) -> None:
    """Send requests without reading the answers."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        raw.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(0.01)


def code(raw: bytes) -> str:
    """Return the code of a problem document."""
    return str(json.loads(raw.partition(b"\r\n\r\n")[2])["code"])


@pytest.mark.parametrize("sent", [b"", b"POST /v1/se", HEAD], ids=["nothing", "half a line", "half a header"])
def test_a_slow_header_is_cut_off(server: PostroomServer, sent: bytes) -> None:
    raw = attack(server, sent)
    assert (answers(raw), code(raw)) == ([408], "E_TIMEOUT")


def test_a_header_that_drips_is_cut_off(server: PostroomServer) -> None:
    drips = [b"X-%d: 1\r\n" % n for n in range(100)]
    raw = attack(server, HEAD, *drips, pause=0.05)
    assert answers(raw) in ([408], [])  # a client that goes on sending may miss the answer


@pytest.mark.parametrize("framing", [b"Content-Length: 100", b"Transfer-Encoding: chunked"])
def test_a_slow_body_is_cut_off(server: PostroomServer, framing: bytes) -> None:
    raw = attack(server, HEAD + framing + b"\r\n\r\n")
    assert (answers(raw), code(raw)) == ([408], "E_TIMEOUT")


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 40\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 40",
        b"Content-Length: 40\r\nContent-Length: 41",
        b"Content-Length: 40, 40",
        b"Content-Length: +40",
        b"Content-Length: -1",
        b"Content-Length: 99999999999999999999999",
        b"Transfer-Encoding: chunked, identity",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding : chunked",
        b" folded",
    ],
)
def test_a_body_of_ambiguous_length_is_refused(server: PostroomServer, framing: bytes) -> None:
    raw = attack(server, HEAD + framing + b"\r\n\r\n" + b"28\r\n" + BODY + b"\r\n0\r\n\r\n")
    assert answers(raw) == [400]
    assert code(raw) == "E_SCHEMA"


def test_a_declared_body_above_the_limit_is_refused_before_it_is_sent(server: PostroomServer) -> None:
    for length in (FRAME_BYTES + 1, 999_999_999):
        for expectation in (b"", b"Expect: 100-continue\r\n"):
            with server.raw() as raw:
                raw.sendall(HEAD + b"Content-Length: %d\r\n" % length + expectation + b"\r\n")
                answer = receive_all(raw)
            assert (answers(answer), code(answer)) == ([413], "E_FRAME_TOO_LARGE")
            assert b"\r\nconnection: close\r\n" in answer


def test_a_client_that_sends_a_body_above_the_limit_reads_the_answer(server: PostroomServer) -> None:
    raw = attack(server, HEAD + b"Content-Length: %d\r\n\r\n" % (3 * FRAME_BYTES), bytes(3 * FRAME_BYTES))
    assert (answers(raw), code(raw)) == ([413], "E_FRAME_TOO_LARGE")


@pytest.mark.parametrize("coding", [b"gzip", b"br", b"identity, gzip", b"x\xff"])
def test_a_body_with_a_content_coding_is_refused(server: PostroomServer, coding: bytes) -> None:
    fields = b"Connection: close\r\nContent-Length: %d\r\n" % len(BODY)
    raw = attack(server, HEAD + b"Content-Encoding: " + coding + b"\r\n" + fields + b"\r\n" + BODY)
    assert (answers(raw), code(raw)) == ([415], "E_MEDIA_TYPE")
    assert b"\r\naccept-encoding: identity\r\n" in raw


def test_the_content_coding_identity_is_none(server: PostroomServer) -> None:
    headers = {"Content-Encoding": "Identity"}
    assert server.call("POST", "/v1/recv", {"topic": "attacked"}, headers).status == 200


TRAILERS = (
    b"Content-Type: application/json",
    b"Authorization: Bearer x",
    b"X-Corr-Id: trailed",
    b"Host: evil.example",
)


@pytest.mark.parametrize("trailer", TRAILERS)
def test_a_trailer_is_no_header(server: PostroomServer, trailer: bytes) -> None:
    name = trailer.partition(b":")[0]
    head = b"POST /v1/recv HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head = head.replace(b"Content-Type: application/json\r\n", b"") if name == b"Content-Type" else head
    body = b'{"topic": "attacked"}'
    chunks = b"%x\r\n" % len(body) + body + b"\r\n0\r\n" + trailer + b"\r\n\r\n"
    framing = b"Connection: close\r\nTransfer-Encoding: chunked\r\nTrailer: " + name + b"\r\n\r\n"
    raw = attack(server, head + framing + chunks)
    assert answers(raw) == [415 if name == b"Content-Type" else 200]
    assert b"trailed" not in raw


@pytest.mark.parametrize("above", [0, 1])
@pytest.mark.parametrize("part", ["value", "name", "path", "fields", "second"])
def test_a_header_above_the_limit_is_refused_however_it_is_sent(
    server: PostroomServer, part: str, above: int
) -> None:
    before, fields = b"GET /healthz", b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    room = 65_536 - len(before + fields + b"\r\n") + above
    if part == "path":
        header = before + b"?" + b"a" * (room - 1) + fields
    elif part == "name":
        header = before + fields + b"a" * (room - 5) + b": 1\r\n"
    elif part == "fields":
        header = before + fields + b"a: b\r\n" * (room // 6 - 1)
        header += b"c: " + b"d" * (room - (room // 6 - 1) * 6 - 5) + b"\r\n"
    else:
        header = before + fields + b"a: " + b"b" * (room - 5) + b"\r\n"
    first = b"GET /v1/mailbox HTTP/1.1\r\nHost: localhost\r\n\r\n" if part == "second" else b""
    assert len(header + b"\r\n") == 65_536 + above
    raw = attack(server, first + header + b"\r\n")
    # The connection of an answer in progress is closed without another answer.
    whole = 400 if part == "path" else 200  # of a query that the call does not have
    expected = [431] if above else [whole]
    assert answers(raw) in (
        [[200, *expected], [200], []] if first and above else [[200] * bool(first) + expected]
    )


@pytest.mark.parametrize("size", [FRAME_BYTES + 1, 3 * FRAME_BYTES])
def test_a_chunked_body_above_the_limit_is_refused(server: PostroomServer, size: int) -> None:
    body = b"%x\r\n" % size + bytes(size) + b"\r\n0\r\n\r\n"
    raw = attack(server, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body)
    assert (answers(raw), code(raw)) == ([413], "E_FRAME_TOO_LARGE")


@pytest.mark.parametrize("piece", [b"8000\r\n" + bytes(0x8000) + b"\r\n", b"1\r\n \r\n" * 1_000])
def test_a_chunked_body_without_an_end_is_cut_off(server: PostroomServer, piece: bytes) -> None:
    raw = attack(server, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[piece] * 1_000)
    assert answers(raw) in ([413], [408], [])


@pytest.mark.parametrize("start", [HEAD, b"GET /" + b"a" * 1_000_000, HEAD + b"X: " + b"a" * 1_000_000])
def test_a_header_without_an_end_is_cut_off(server: PostroomServer, start: bytes) -> None:
    raw = attack(server, start, *[b"X-Padding: " + b"a" * 10_000 + b"\r\n"] * 200)
    assert answers(raw) in ([431], [400], [])


def test_trailers_without_an_end_are_cut_off(server: PostroomServer) -> None:
    start = HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n"
    raw = attack(server, start, *[b"X-Trailer: " + b"a" * 10_000 + b"\r\n"] * 500)
    assert answers(raw) in ([408], [400], [])


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"CONNECT evil.example:443 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n",
        b"\r\n" * 200_000,
    ],
)
def test_what_is_not_http_is_refused(server: PostroomServer, sent: bytes) -> None:
    raw = attack(server, sent)
    assert answers(raw) in ([400], [404], [408], [431], [])


def test_two_hosts_are_refused(server: PostroomServer) -> None:
    raw = attack(server, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
    assert answers(raw)[:1] in ([400], [421])


def test_pipelined_requests_are_answered_in_their_order(server: PostroomServer) -> None:
    paths = [b"/v1/topics", b"/nothing", b"/v1/mailbox"] * 20
    raw = attack(server, *[b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n" for path in paths])
    assert answers(raw)[:60] == [200, 404, 200] * 20


def test_garbage_behind_a_long_poll_does_not_answer_in_its_place(server: PostroomServer) -> None:
    body = b'{"topic": "attacked", "wait_ms": 30000}'
    poll = b"POST /v1/recv HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    raw = attack(
        server, poll + b"Content-Length: %d\r\n\r\n" % len(body) + body, b"garbage\r\n\r\n", pause=0.3
    )
    assert answers(raw) == []


@pytest.mark.parametrize("pause", [0.0, 0.1], ids=["at once", "later"])
def test_an_upgrade_is_declined_and_the_body_stays_one(server: PostroomServer, pause: float) -> None:
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
    hidden = b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n"
    get = b"GET /v1/mailbox HTTP/1.1\r\nHost: localhost\r\n"
    pieces = [HEAD + upgrade + b"Content-Length: %d\r\n\r\n" % len(hidden), hidden, get + upgrade + b"\r\n"]
    pieces.append(get + b"\r\n")
    if not pause:
        pieces = [b"".join(pieces)]
    assert answers(attack(server, *pieces, pause=pause)) == [400, 200, 200]


def test_a_body_that_was_not_asked_for_is_no_request(server: PostroomServer) -> None:
    get = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    start = HEAD.replace(b"/v1/send", b"/nothing") + b"Expect: 100-continue\r\n"
    assert answers(attack(server, start + b"Content-Length: %d\r\n\r\n" % len(get), get, pause=0.1)) == [404]


def test_a_client_that_resets_its_connection_harms_nobody(server: PostroomServer) -> None:
    for sent in (
        b"",
        HEAD,
        HEAD + b"Content-Length: 40\r\n\r\n",
        HEAD + b"Content-Length: 40\r\n\r\n" + BODY[:-1],
        b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200,
    ):
        with server.raw() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            raw.sendall(sent)
            if b"openapi" in sent:
                time.sleep(0.3)  # until the server waits for it to read
    assert server.call("GET", "/healthz").status == 200
    assert "Traceback" not in server.log


def test_a_client_that_does_not_read_is_disconnected(tmp_path: Path) -> None:
    with PostroomServer(tmp_path, write_timeout="300ms") as server, server.raw() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            ask_for_30_seconds(raw)


KNOWN = b"GET /v1/mailbox HTTP/1.1\r\nHost: localhost\r\n\r\n"
"""A request that needs a token, where the server asks for any."""


def test_connections_are_capped(tmp_path: Path) -> None:
    with PostroomServer(tmp_path, max_connections=2, header_timeout="20s") as server:
        with server.raw() as one, server.raw() as other:
            for held in (one, other):
                held.sendall(KNOWN)
                assert held.recv(65_536)
            raw = attack(server)
            assert answers(raw) == [503]
            assert b"\r\nretry-after: 1\r\n" in raw
            assert code(raw) == "E_UNAVAILABLE"
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if answers(attack(server, b"GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n")) == [200]:
                return
        raise AssertionError("closed connections still count")


def test_a_refused_connection_is_not_reset_while_its_client_still_sends(tmp_path: Path) -> None:
    with (
        PostroomServer(tmp_path, max_connections=1, header_timeout="20s") as server,
        server.raw() as held,
        ExitStack() as opened,
    ):
        held.sendall(KNOWN)
        assert held.recv(65_536)
        refused = opened.enter_context(server.raw())
        refused.recv(1, socket.MSG_PEEK)
        for _ in range(5):
            refused.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            time.sleep(0.02)
        assert answers(refused.recv(65_536)) == [503]
        assert refused.recv(1) == b""


def test_the_memory_for_bodies_is_bounded(tmp_path: Path) -> None:
    with PostroomServer(tmp_path, frame_bytes=100_000, buffer_bytes=150_000) as server:
        start = HEAD + b"Content-Length: 100000\r\n\r\n"
        with server.raw() as holding:
            holding.sendall(start + b" " * 99_000)
            time.sleep(0.3)
            with server.raw() as refused:
                refused.sendall(start + b" " * 99_000)
                assert answers(refused.recv(65_536)) == [503]
            assert server.call("POST", "/v1/recv", {"topic": "t"}).status == 200
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if server.call("POST", "/v1/recv", b" " * 90_000).status == 400:
                return
        raise AssertionError("the body of a client that has gone is still held")


def test_an_idle_connection_is_closed(tmp_path: Path) -> None:
    get = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with PostroomServer(tmp_path, idle_timeout="300ms") as server:
        assert answers(attack(server, get)) == [200]
        assert answers(attack(server, get, b"\r\n", pause=0.1)) == [200]  # which is no request
