"""The calls of the HTTP interface, over a real server."""

import os
import shutil
import socket
import stat
import subprocess
import sys
import time
import uuid
from base64 import b64encode
from email.utils import parsedate_to_datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from postroom.adapters.compose import list_mailboxes
from tests.support.servers.http import PostroomServer, receive_all

RECEIVE_OVER_GRPC = """
import sys, grpc
from postroom.adapters.grpc.v1 import mailbox_pb2
with grpc.insecure_channel(sys.argv[1]) as channel:
    receive = channel.unary_unary(
        "/postroom.v1.Mailbox/Recv",
        mailbox_pb2.RecvRequest.SerializeToString,
        mailbox_pb2.RecvResponse.FromString,
    )
    print(receive(mailbox_pb2.RecvRequest(topics=["orders"]), timeout=30).messages[0].message_id)
"""


def topic() -> str:
    """Return a topic of this test alone."""
    return f"t-{uuid.uuid4().hex[:12]}"


def message(name: str, payload: bytes = b"hello", **fields: Any) -> dict[str, Any]:
    """Return the body of a send."""
    return {"topic": name, "payload_b64": b64encode(payload).decode()} | fields


def send(server: PostroomServer, name: str, payload: bytes = b"hello", **fields: Any) -> str:
    """Send a message and return its id."""
    answer = server.call("POST", "/v1/send", message(name, payload, **fields))
    assert answer.status == 200, answer.text
    return str(answer.json["msg_id"])


def receive(server: PostroomServer, name: str, **fields: Any) -> list[dict[str, Any]]:
    """Receive messages."""
    answer = server.call("POST", "/v1/recv", {"topic": name} | fields)
    assert answer.status == 200, answer.text
    received: list[dict[str, Any]] = answer.json["messages"]
    return received


# -- send ---


def test_a_message_is_sent_received_and_acked(server: PostroomServer) -> None:
    name = topic()
    sent = server.call("POST", "/v1/send", message(name, b"\x00\xff", idem_key="k", attrs={"a": "b"}))
    assert (sent.status, sent.json["duplicate"]) == (200, False)
    (received,) = receive(server, name, visibility_ms=5_000)
    assert received["msg_id"] == sent.json["msg_id"]
    assert received["payload_b64"] == "AP8="
    assert received["attrs"] == {"a": "b"}
    assert (received["idem_key"], received["attempt"]) == ("k", 1)
    assert received["payload_hash"].startswith("b3:")
    ack = f"/v1/ack/{received['msg_id']}"
    for _ in range(2):
        assert server.call("POST", ack, {"receipt": received["receipt"]}).json == {"ok": True}
    assert receive(server, name) == []


def test_a_repeated_send_is_a_duplicate_or_a_conflict_if_the_caller_asks_for_it(
    server: PostroomServer,
) -> None:
    body = message(topic(), idem_key="once")
    first = server.call("POST", "/v1/send", body)
    again = server.call("POST", "/v1/send", body)
    assert again.json == {"msg_id": first.json["msg_id"], "duplicate": True}
    conflict = server.call("POST", "/v1/send", body, {"X-Idempotency-Mode": "409-conflict"})
    assert (conflict.status, conflict.json["code"]) == (409, "E_DUPLICATE")
    assert conflict.json["msg_id"] == first.json["msg_id"]
    assert server.call("POST", "/v1/send", body, {"X-Idempotency-Mode": "yes"}).status == 400


def test_a_list_is_answered_for_each_of_its_messages(server: PostroomServer) -> None:
    name = topic()
    body = [message(name, idem_key="a"), message("no spaces"), message(name, idem_key="a")]
    answer = server.call("POST", "/v1/send", body)
    sent, refused, duplicate = answer.json["results"]
    assert (answer.status, sent["duplicate"], duplicate["duplicate"]) == (200, False, True)
    assert refused["error"]["code"] == "E_SCHEMA"
    assert duplicate["msg_id"] == sent["msg_id"]


def test_binary_attributes_are_sent_in_base64(server: PostroomServer) -> None:
    name = topic()
    send(server, name, attrs={"text": "ü"}, attrs_b64={"raw": "AP8="})
    (received,) = receive(server, name)
    assert received["attrs"] == {"text": "ü", "raw": "base64:AP8="}


# -- recv ---


def test_a_long_poll_returns_as_soon_as_there_is_a_message(server: PostroomServer) -> None:
    assert receive(server, topic(), wait_ms=10) == []
    name = topic()
    send(server, name, deliver_after_ms=200)
    assert len(receive(server, name, wait_ms=30_000)) == 1


def test_a_receive_takes_several_topics(server: PostroomServer) -> None:
    first, second = topic(), topic()
    send(server, first), send(server, second)
    assert {each["topic"] for each in receive(server, [first, second])} == {first, second}  # type: ignore[arg-type]


def test_a_receive_returns_envelopes_to_those_who_ask_for_them(server: PostroomServer) -> None:
    name = topic()
    send(server, name, content_type="text/plain")
    (received,) = receive(server, name, with_envelope=True)
    assert received["envelope_b64"]
    assert "payload_b64" not in received


def test_a_message_whose_poller_has_gone_goes_to_the_next_one(server: PostroomServer) -> None:
    name = topic()
    gone = server.connect()
    body = f'{{"topic": "{name}", "wait_ms": 60000}}'.encode()
    gone.request("POST", "/v1/recv", body, {"Content-Type": "application/json"})
    time.sleep(0.3)
    gone.close()
    time.sleep(0.3)
    send(server, name)
    (received,) = receive(server, name, wait_ms=5_000)
    assert received["attempt"] == 1


# -- settling ---


def test_a_nacked_message_is_delivered_again(server: PostroomServer) -> None:
    name = topic()
    id_ = send(server, name)
    (received,) = receive(server, name)
    body = {"receipt": received["receipt"], "reason": "no stock", "delay_ms": 0}
    assert server.call("POST", f"/v1/nack/{id_}", body).json == {"ok": True}
    (again,) = receive(server, name, wait_ms=5_000)
    assert again["attempt"] == 2


def test_without_a_receipt_the_latest_delivery_is_settled(server: PostroomServer) -> None:
    name = topic()
    id_ = send(server, name)
    early = server.call("POST", f"/v1/ack/{id_}")
    assert (early.status, early.json["code"]) == (409, "E_STALE_RECEIPT")
    receive(server, name)
    assert server.call("POST", f"/v1/extend/{id_}", {"visibility_ms": 1_000}).json == {"ok": True}
    assert server.call("POST", f"/v1/nack/{id_}", {"delay_ms": 0}).json == {"ok": True}
    receive(server, name, wait_ms=5_000)
    for _ in range(2):
        assert server.call("POST", f"/v1/ack/{id_}").json == {"ok": True}


def test_a_stale_receipt_is_a_conflict_and_an_unknown_message_is_not_found(server: PostroomServer) -> None:
    name = topic()
    id_ = send(server, name)
    (first,) = receive(server, name)
    server.call("POST", f"/v1/nack/{id_}", {"receipt": first["receipt"], "delay_ms": 0})
    receive(server, name, wait_ms=5_000)
    stale = server.call("POST", f"/v1/ack/{id_}", {"receipt": first["receipt"]})
    assert (stale.status, stale.json["code"]) == (409, "E_STALE_RECEIPT")
    unknown = server.call("POST", f"/v1/ack/{uuid.uuid4()}")
    assert (unknown.status, unknown.json["code"]) == (404, "E_NOT_FOUND")
    other = server.call("POST", f"/v1/ack/{uuid.uuid4()}", {"receipt": first["receipt"]})
    assert (other.status, other.json["code"]) == (400, "E_SCHEMA")


def test_a_message_id_may_contain_slashes_and_spaces(server: PostroomServer) -> None:
    name, id_ = topic(), f"order/7 of {uuid.uuid4()}"
    assert send(server, name, message_id=id_) == id_
    receive(server, name)
    path = id_.replace("/", "%2F").replace(" ", "%20")
    assert server.call("POST", f"/v1/ack/{path}").json == {"ok": True}
    assert server.call("GET", f"/v1/messages/{path}").json["status"] == "acked"


def test_many_deliveries_are_settled_at_once(server: PostroomServer) -> None:
    name = topic()
    for _ in range(3):
        send(server, name)
    receipts = [each["receipt"] for each in receive(server, name)]
    extended = server.call("POST", "/v1/extend", {"receipts": receipts, "visibility_ms": 10_000})
    assert [each["ok"] for each in extended.json["results"]] == [True] * 3
    assert server.call("POST", "/v1/nack", {"receipts": receipts[:1], "delay_ms": 60_000}).status == 200
    first, second, third = server.call("POST", "/v1/ack", {"receipts": receipts}).json["results"]
    assert first["error"]["code"] == "E_STALE_RECEIPT"
    assert second == third == {"ok": True}


# -- operators ---


def test_dead_letters_are_listed_in_pages_and_redriven(server: PostroomServer) -> None:
    name = topic()
    assert server.call("PUT", f"/v1/topics/{name}/policy", {"max_attempts": 1, "shards": 1}).status == 200
    assert server.call("GET", f"/v1/topics/{name}/policy").json["policy"]["max_attempts"] == 1
    for _ in range(3):
        send(server, name)
    receipts = [each["receipt"] for each in receive(server, name)]
    server.call("POST", "/v1/nack", {"receipts": receipts, "reason": "poison"})
    page = server.call("GET", f"/v1/dlq?topic={name}&limit=2").json
    rest = server.call("GET", f"/v1/dlq?topic={name}&limit=2&cursor={page['next_cursor']}").json
    assert [each["last_error"] for each in page["items"] + rest["items"]] == ["poison"] * 3
    assert rest["next_cursor"] is None
    redriven = server.call("POST", "/v1/dlq/reprocess", {"topic": name, "limit": 2})
    assert redriven.json == {"redriven": 2}
    assert len(receive(server, name)) == 2
    assert server.call("POST", f"/v1/topics/{name}/purge").json == {"removed": 1}


def test_the_backlog_counts_by_topic_and_shard_now_and_in_the_past(server: PostroomServer) -> None:
    name = topic()
    before = server.call("GET", f"/v1/backlog?topic={name}").json
    send(server, name)
    (row,) = server.call("GET", f"/v1/backlog?topic={name}").json["shards"]
    assert (row["topic"], row["ready"], row["in_flight"]) == (name, 1, 0)
    assert server.call("GET", f"/v1/backlog?topic={name}&at={before['position']}").json["shards"] == []
    assert server.call("GET", "/v1/backlog?at=2999-01-01T00:00:00Z").json["code"] == "E_SCHEMA"


def test_a_message_is_shown_and_explained(server: PostroomServer) -> None:
    name = topic()
    id_ = send(server, name, principal="ann")
    assert server.call("GET", f"/v1/peek?topic={name}").json["messages"][0]["payload"] == "aGVsbG8="
    receive(server, name)
    detail = server.call("GET", f"/v1/messages/{id_}").json
    assert [each["event"] for each in detail["history"]] == ["MessageSent", "MessageReceived"]
    assert detail["item"]["principal"] == "ann"
    assert detail["envelope_b64"]
    assert server.call("GET", f"/v1/messages/{id_}/explanation").json["deliveries"]
    assert server.call("GET", "/v1/messages/none").status == 404


def test_a_search_needs_read_models(server: PostroomServer) -> None:
    answer = server.call("GET", "/v1/messages?topics=a&topics=b&headers[tenant]=acme&limit=5")
    assert (answer.status, answer.json["code"]) == (404, "E_NOT_FOUND")


# -- requests that are refused ---


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "Content-Type"),
        (b"{", "truncated"),
        (b"[]", "length"),
        (b'{"topic": "t"}', "payload_b64"),
        (b'{"topic": "t", "payload_b64": "", "x": 1}', "unknown field `x`"),
        (b'{"topic": "t", "topic": "u", "payload_b64": ""}', "twice"),
        (b'{"topic": "t", "payload_b64": "", "attrs": {"a": "1", "a": "2"}}', "twice"),
        (b'{"topic": "t", "payload_b64": "", "idem_key": "a\\u0000b"}', "NUL"),
        (b'{"topic": "t", "payload_b64": "", "attrs": {"a": "\\u0000"}}', "NUL"),
        (b'{"topic": "t", "payload_b64": "", "priority": 11}', "<= 10"),
        (b'{"topic": "t", "payload_b64": "", "ttl_seconds": 99999999999999999999999}', "ttl_seconds"),
        (b'{"topic": "t", "payload_b64": "", "ttl_seconds": 1e400}', "invalid"),
        (b'{"topic": "t", "payload_b64": "QQ"}', "base64"),
        (b'{"topic": "\\ud800", "payload_b64": ""}', "invalid"),
        (b'{"topic": "t", "payload_b64": "", "x": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "unknown"),
        (b'{"topic": "t", "payload_b64": "", "attrs": ' + b'{"a":' * 10_000, "attrs"),
        (b"[" * 10_000, "invalid"),
    ],
)
def test_a_malformed_body_is_refused_and_leaves_no_trace(
    server: PostroomServer, body: bytes, text: str
) -> None:
    headers = {"Content-Type": "application/json"} if body else {"Content-Type": "text/plain"}
    answer = server.call("POST", "/v1/send", body, headers)
    assert answer.status in (400, 415), answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert text in answer.json["message"]
    assert server.call("GET", "/v1/backlog?topic=t").json["shards"] == []


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=x", "nope=1", "topic=a&topic=b", "cursor=-1", "%ff=1", "topic=%00", "x", "at="],
)
def test_a_malformed_parameter_is_refused(server: PostroomServer, query: str) -> None:
    answer = server.call("GET", f"/v1/dlq?{query}")
    assert (answer.status, answer.json["code"]) == (400, "E_SCHEMA")


def test_what_is_not_there_is_not_found_and_other_methods_are_not_allowed(server: PostroomServer) -> None:
    assert server.call("GET", "/nothing").status == 404
    wrong = server.call("DELETE", "/v1/send")
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    assert server.call("HEAD", "/healthz").status == 200


def test_a_body_must_be_declared_as_json(server: PostroomServer) -> None:
    answer = server.call("POST", "/v1/send", b"{}", {"Content-Type": "text/plain"})
    assert (answer.status, answer.json["code"]) == (415, "E_MEDIA_TYPE")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "10.0.0.1", ""])
def test_a_host_that_is_not_this_machine_is_refused(server: PostroomServer, host: str) -> None:
    assert server.call("GET", "/healthz", headers={"Host": host}).status == 421


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:3000"])
def test_a_web_page_cannot_make_its_browser_purge_a_topic(server: PostroomServer, origin: str) -> None:
    form = {"Origin": origin, "Content-Type": "application/x-www-form-urlencoded"}
    refused = server.call("POST", f"/v1/topics/{topic()}/purge", b"", form)
    assert (refused.status, refused.json["code"]) == (403, "E_ORIGIN")
    assert server.call("GET", "/healthz", headers={"Origin": server.address}).status == 200


def test_a_body_above_the_frame_limit_is_refused(server: PostroomServer) -> None:
    answer = server.call("POST", "/v1/send", message(topic(), bytes(70_000)))
    assert (answer.status, answer.json["code"]) == (413, "E_FRAME_TOO_LARGE")


def test_a_full_shard_is_answered_429_with_a_time_to_retry(server: PostroomServer) -> None:
    name = topic()
    assert server.call("POST", "/v1/send", [message(name) for _ in range(50)]).status == 200
    full = server.call("POST", "/v1/send", message(name))
    assert (full.status, full.json["code"]) == (429, "E_SATURATED")
    assert int(full.headers["retry-after"]) >= 1
    assert full.json["retry_after_ms"] > 0


# -- correlation, state, log ---


def test_the_correlation_id_is_echoed_or_made(server: PostroomServer) -> None:
    assert server.call("GET", "/healthz", headers={"X-Corr-Id": "mine"}).headers["x-corr-id"] == "mine"
    made = server.call("GET", "/nothing")
    assert uuid.UUID(made.headers["x-corr-id"]).version == 7
    assert made.json["corr_id"] == made.headers["x-corr-id"]
    assert server.call("GET", "/healthz", headers={"X-Corr-Id": "x" * 200}).status == 400
    name = topic()
    server.call("POST", "/v1/send", message(name), {"X-Corr-Id": "order-7"})
    assert receive(server, name)[0]["corr_id"] == "order-7"


def test_the_state_of_the_service_is_told(server: PostroomServer) -> None:
    name = topic()
    send(server, name)
    health = server.call("GET", "/healthz")
    assert health.json == {"ok": True}
    assert parsedate_to_datetime(health.headers["date"]).year > 2000
    assert server.call("GET", "/readyz").json == {"degraded": False, "missing": [], "writes": True}
    assert server.call("GET", "/v1/mailbox").json == {"mailbox": "main@local", "dlq_profile": "durable"}
    metrics = server.call("GET", "/metrics").text
    assert f'postroom_queue_depth{{shard="0",topic="{name}"}} 1.0' in metrics
    assert f'postroom_saturation{{shard="0",topic="{name}"}} 0.02' in metrics
    assert "postroom_enqueue_seconds_bucket" in metrics


def test_a_topic_is_paused_listed_and_resumed_and_its_dead_letterings_are_counted(
    server: PostroomServer,
) -> None:
    name = topic()
    server.call("PUT", f"/v1/topics/{name}/policy", {"max_attempts": 1})
    send(server, name)
    server.call("POST", "/v1/nack", {"receipts": [receive(server, name)[0]["receipt"]]})
    assert server.call("PUT", f"/v1/topics/{name}/pause").json == {"ok": True}
    (listed,) = [each for each in server.call("GET", "/v1/topics").json["topics"] if each["topic"] == name]
    assert (listed["paused"], listed["dead"], listed["policy"]["max_attempts"]) == (True, 1, 1)
    metrics = server.call("GET", "/metrics").text
    assert f'postroom_dlq_total{{reason="max_attempts",topic="{name}"}} 1.0' in metrics
    assert f'postroom_topic_paused{{topic="{name}"}} 1.0' in metrics
    assert server.call("PUT", f"/v1/topics/{name}/resume").json == {"ok": True}
    assert f'topic_paused{{topic="{name}"' not in server.call("GET", "/metrics").text
    unknown = server.call("PUT", f"/v1/topics/{name[:-1]}/pause")
    assert (unknown.status, f"did you mean {name}" in unknown.json["message"]) == (404, True)


def test_the_access_log_has_no_payloads_principals_or_tokens(server: PostroomServer) -> None:
    name = topic()
    send(server, name, b"secret payload", principal="secret-ann", idem_key="secret-key")
    headers = {"Authorization": "Bearer secret-token", "X-Corr-Id": "logged-7"}
    server.call("GET", "/v1/messages?principals=secret-ann", headers=headers)
    assert '"logged-7"' in server.log
    assert "secret" not in server.log


# -- starting and stopping ---


def test_a_unix_socket_is_served_to_its_user_only(tmp_path: Path) -> None:
    path = tmp_path / "postroom.sock"
    with PostroomServer(tmp_path / "server", address=f"unix:{path}") as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert server.call("GET", "/healthz", headers={"Host": "anything"}).json == {"ok": True}
        path.unlink()
        path.touch()  # as another server does that takes the path
    assert path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can connect as another user")
def test_another_user_is_refused_even_where_the_socket_is_open_to_all() -> None:
    with TemporaryDirectory(prefix="postroom-tests-") as folder:
        path = Path(folder) / "postroom.sock"
        with PostroomServer(Path(folder) / "server", address=f"unix:{path}"):
            os.chmod(folder, 0o755)
            os.chmod(path, 0o666)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
                raw.settimeout(60)
                os.seteuid(65_534)
                try:
                    raw.connect(str(path))
                finally:
                    os.seteuid(0)
                answer = receive_all(raw)
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert b'"E_CAP_SCOPE"' in answer


def test_the_socket_of_a_killed_server_is_replaced(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'postroom.sock'}"
    with PostroomServer(tmp_path / "server", address=address) as server:
        send(server, "orders")
        server.process.kill()
    with PostroomServer(tmp_path / "server", address=address) as server:
        assert len(receive(server, "orders")) == 1
    assert not (tmp_path / "postroom.sock").exists()


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:80", "nonsense", "127.0.0.1", "unix:"])
def test_other_addresses_are_refused_before_anything_is_created(tmp_path: Path, address: str) -> None:
    postroom = str(Path(sys.executable).parent / "postroom")
    command = [postroom, "serve", "--dev", "--http", address, "--store", str(tmp_path / "store.db")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("postroom: ")
    assert list(tmp_path.iterdir()) == []


def test_a_stop_ends_long_polls_and_streams_and_loses_nothing(tmp_path: Path) -> None:
    with PostroomServer(tmp_path) as server:
        id_ = send(server, "orders")
        poll, stream = server.connect(), server.connect()
        for connection, path in ((poll, "/v1/recv"), (stream, "/v1/recv/stream")):
            body = b'{"topic": "others", "wait_ms": 60000}'
            connection.request("POST", path, body, {"Content-Type": "application/json"})
        time.sleep(0.5)
        started = time.monotonic()
        server.process.stop()
        assert time.monotonic() - started < 30  # far below that of the long poll
        assert poll.getresponse().read() == b'{"messages":[]}'
        assert b'"E_UNAVAILABLE"' in stream.getresponse().read()
        poll.close()
        stream.close()
    assert list_mailboxes(server.store) == ["main@local"]
    with PostroomServer(tmp_path) as server:
        assert [each["msg_id"] for each in receive(server, "orders")] == [id_]


def test_a_stop_aborts_requests_that_never_end(tmp_path: Path) -> None:
    with PostroomServer(tmp_path, stop_timeout="300ms") as server, server.raw() as raw:
        head = b"POST /v1/send HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        raw.sendall(head + b"Content-Length: 100\r\n\r\n{")
        time.sleep(0.3)
        server.process.stop()
        assert receive_all(raw) == b""
        assert "http.requests_aborted" in server.log
        assert "Traceback" not in server.log


def test_curl_is_all_that_is_needed(server: PostroomServer) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    name = topic()

    def curl(*arguments: str) -> str:
        command = ["curl", "-sS", "--fail-with-body", "--max-time", "30", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout

    body = ("-H", "Content-Type: application/json", "-d")
    sent = curl(*body, f'{{"topic":"{name}","payload_b64":"aGVsbG8="}}', f"{server.address}/v1/send")
    assert '"duplicate":false' in sent
    received = curl(*body, f'{{"topic":"{name}"}}', f"{server.address}/v1/recv")
    assert '"payload_b64":"aGVsbG8="' in received
    id_ = received.partition('"msg_id":"')[2].partition('"')[0]
    assert curl("-X", "POST", f"{server.address}/v1/ack/{id_}") == '{"ok":true}'


def test_http_and_grpc_serve_one_mailbox_and_stop_together(tmp_path: Path) -> None:
    with PostroomServer(tmp_path, grpc="127.0.0.1:0") as server:
        id_ = send(server, "orders")
        target = server.addresses[1].removeprefix("grpc://")
        command = [sys.executable, "-c", RECEIVE_OVER_GRPC, target]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout.strip() == id_, done.stderr


def test_two_servers_share_a_mailbox_and_one_goes_on_when_the_other_is_killed(tmp_path: Path) -> None:
    store = str(tmp_path / "store.db")
    with (
        PostroomServer(tmp_path / "first", store) as first,
        PostroomServer(tmp_path / "second", store) as second,
    ):
        id_ = send(first, "orders")
        (received,) = receive(second, "orders", visibility_ms=60_000)
        assert received["msg_id"] == id_
        assert first.call("POST", f"/v1/ack/{id_}", {"receipt": received["receipt"]}).json == {"ok": True}
        first.process.kill()
        assert [each["msg_id"] for each in receive(second, "orders")] == []
        again = send(second, "orders")
        assert [each["msg_id"] for each in receive(second, "orders", wait_ms=30_000)] == [again]
