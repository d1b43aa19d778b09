"""Streams of deliveries as lines of JSON."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

from tests.support.http_messages import message, receive, send, topic
from tests.support.servers.http import PostroomServer
from tests.support.waiting import SECONDS

Line = dict[str, Any]


@contextmanager
def stream(server: PostroomServer, name: str, **fields: Any) -> Iterator[Iterator[Line]]:
    """Open a stream and yield its lines."""
    connection = server.connect()
    body = json.dumps({"topic": name} | fields)
    connection.request("POST", "/v1/recv/stream", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.headers["content-type"] == "application/x-ndjson"
    try:
        yield (json.loads(line) for line in response)
    finally:
        response.close()
        connection.close()


def messages(lines: Iterator[Line], count: int) -> list[Line]:
    """Return the next messages, without heartbeats."""
    received: list[Line] = []
    while len(received) < count:
        line = next(lines)
        if "heartbeat" not in line:
            received.append(line)
    return received


def ack(server: PostroomServer, line: Line) -> None:
    answer = server.call("POST", f"/v1/ack/{line['msg_id']}", {"receipt": line["receipt"]})
    assert answer.json == {"ok": True}


def test_a_stream_delivers_messages_as_they_come_and_heartbeats_between(server: PostroomServer) -> None:
    name = topic()
    send(server, name, b"1")
    with stream(server, name) as lines:
        (first,) = messages(lines, 1)
        assert first["attempt"] == 1
        ack(server, first)
        assert "heartbeat" in next(lines)
        id_ = send(server, name, b"2")
        (second,) = messages(lines, 1)
        assert second["msg_id"] == id_


def test_no_more_messages_are_delivered_than_may_be_unsettled(server: PostroomServer) -> None:
    name = topic()
    for _ in range(4):
        send(server, name)
    with stream(server, name, max_messages=2) as lines:
        first, _ = messages(lines, 2)
        assert "heartbeat" in next(lines)
        ack(server, first)
        (third,) = messages(lines, 1)
        server.call("POST", "/v1/nack", {"receipts": [third["receipt"]], "delay_ms": 60_000})
        (fourth,) = messages(lines, 1)
        assert fourth["msg_id"] != third["msg_id"]


def test_a_delivery_that_times_out_makes_room(server: PostroomServer) -> None:
    name = topic()
    send(server, name), send(server, name)
    with stream(server, name, max_messages=1, visibility_ms=400) as lines:
        first, second = messages(lines, 2)
        assert first["msg_id"] != second["msg_id"] or second["attempt"] == 2


def test_what_a_client_left_unsettled_is_ready_again_at_once(server: PostroomServer) -> None:
    name = topic()
    for _ in range(3):
        send(server, name)
    with stream(server, name, visibility_ms=60_000) as lines:
        received = messages(lines, 3)
        ack(server, received[0])
    again: list[Line] = []
    deadline = time.monotonic() + SECONDS
    while len(again) < 2 and time.monotonic() < deadline:
        again += receive(server, name, wait_ms=5_000)
    assert {each["msg_id"] for each in again} == {each["msg_id"] for each in received[1:]}
    assert [each["attempt"] for each in again] == [2, 2]


def test_an_extended_delivery_stays_with_its_client(server: PostroomServer) -> None:
    name = topic()
    send(server, name)
    with stream(server, name, visibility_ms=500) as lines:
        (first,) = messages(lines, 1)
        body = {"receipt": first["receipt"], "visibility_ms": 4_000}
        assert server.call("POST", f"/v1/extend/{first['msg_id']}", body).json == {"ok": True}
        time.sleep(0.6)
        ack(server, first)


def test_a_stream_with_a_wait_ends_when_it_is_over(server: PostroomServer) -> None:
    name = topic()
    send(server, name)
    with stream(server, name, wait_ms=500) as lines:
        (first,) = messages(lines, 1)
        ack(server, first)
        assert all("heartbeat" in line for line in lines)


def test_a_stream_whose_wait_is_over_waits_for_its_last_ack_without_a_flood(server: PostroomServer) -> None:
    name = topic()
    send(server, name)
    with stream(server, name, wait_ms=0) as lines:
        (first,) = messages(lines, 1)
        beats = [datetime.fromisoformat(next(lines)["heartbeat"]) for _ in range(3)]
        assert beats[2] - beats[0] > timedelta(milliseconds=400)  # heartbeats are 300 ms apart
        ack(server, first)
        assert len(list(lines)) < 20


def test_a_client_that_stops_reading_gets_no_more_messages(server: PostroomServer) -> None:
    name = topic()
    body = [message(name, bytes(12_000)) for _ in range(4)]
    for _ in range(10):
        assert server.call("POST", "/v1/send", body).status == 200
    request = json.dumps({"topic": name, "max_messages": 256, "max_bytes": 50_000}).encode()
    head = b"POST /v1/recv/stream HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        raw.connect(("127.0.0.1", server.port))
        raw.sendall(head + b"Content-Length: %d\r\n\r\n" % len(request) + request)
        time.sleep(1.5)
        (row,) = server.call("GET", f"/v1/backlog?topic={name}").json["shards"]
        assert row["in_flight"] > 0
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        (row,) = server.call("GET", f"/v1/backlog?topic={name}").json["shards"]
        if row["in_flight"] == 0:
            return
        time.sleep(0.05)
    raise AssertionError("deliveries to a client that has gone are still in flight")


def test_an_invalid_request_is_refused_before_the_stream_begins(server: PostroomServer) -> None:
    answer = server.call("POST", "/v1/recv/stream", {"topic": "t", "max_messages": 0})
    assert (answer.status, answer.json["code"]) == (400, "E_SCHEMA")


def test_a_wrong_topic_ends_the_stream_with_an_error_line(server: PostroomServer) -> None:
    with stream(server, "no spaces") as lines:
        assert next(lines)["error"]["code"] == "E_SCHEMA"
        assert list(lines) == []
