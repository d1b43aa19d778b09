"""The processes of HTTP servers: their sockets, their ends, and several of them."""

import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from postroom.adapters.compose import list_mailboxes
from tests.support.http_messages import receive, send, topic
from tests.support.servers.http import PostroomServer, receive_all
from tests.support.waiting import SECONDS

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
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=tmp_path, check=False)
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
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
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
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
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
