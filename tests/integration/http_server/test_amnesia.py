"""`serve --amnesia` opens nothing for writing, and a durable server keeps dead letters (svc-mailbox G-6)."""

import json
import socket
import struct
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers.http import PostroomServer
from tests.support.system_calls import STRACE, tracer, writes
from tests.support.waiting import wait_until

needs_strace = pytest.mark.skipif(STRACE is None, reason="strace is not installed")
LIMIT = 16 << 20
POLICY = {"visibility": "30s", "shards": 1, "max_attempts": 2}
AMNESIA: dict[str, Any] = {"amnesia": True, "policy": POLICY, "limits": {"max_store_bytes": LIMIT}}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no bytecode written before the command is known."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")


def send(server: PostroomServer, topic: str, payload: bytes = b"hello") -> int:
    body = {"topic": topic, "payload_b64": b64encode(payload).decode()}
    answer = server.call("POST", "/v1/send", body)
    if answer.status == 429:
        assert answer.json["code"] == "E_SATURATED"
        assert int(answer.headers["retry-after"]) >= 1
    return answer.status


def dead_letter(server: PostroomServer, topic: str) -> None:
    """Send a message, and nack it until it is a dead letter."""
    assert send(server, topic) == 200
    for _ in range(POLICY["max_attempts"]):  # type: ignore[call-overload]  # an int
        (received,) = server.call("POST", "/v1/recv", {"topic": topic}).json["messages"]
        body = {"receipts": [received["receipt"]], "delay_ms": 0}
        assert server.call("POST", "/v1/nack", body).status == 200
    assert len(server.call("GET", f"/v1/dlq?topic={topic}").json["items"]) == 1


def drop_client(server: PostroomServer) -> None:
    """Reset the connection of a client in the middle of a request."""
    with server.raw() as raw:
        raw.sendall(b"POST /v1/send HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def soak(server: PostroomServer) -> None:
    """Make every kind of call."""
    for _ in range(20):
        assert send(server, "orders", bytes(5_000)) == 200
    received = server.call("POST", "/v1/recv", {"topic": "orders", "max_messages": 20}).json["messages"]
    receipts = [each["receipt"] for each in received]
    assert server.call("POST", "/v1/ack", {"receipts": receipts[:10]}).status == 200
    assert (
        server.call("POST", "/v1/extend", {"receipts": receipts[10:], "visibility_ms": 60_000}).status == 200
    )
    assert server.call("POST", "/v1/nack", {"receipts": receipts[10:], "delay_ms": 0}).status == 200
    dead_letter(server, "failures")
    found = server.call("GET", "/v1/messages?topics=fail*&statuses=dead&text=failures")
    assert [each["topic"] for each in found.json["items"]] == ["failures"]
    assert server.call("POST", "/v1/dlq/reprocess", {"topic": "failures"}).json == {"redriven": 1}
    assert server.call("PUT", "/v1/topics/orders/pause").status == 200
    assert server.call("PUT", "/v1/topics/orders/resume").status == 200
    assert server.call("POST", "/v1/topics/failures/purge", {"ready": True}).json == {"removed": 1}
    for path in ("backlog", "topics", "peek?topic=orders", f"messages/{received[-1]['msg_id']}"):
        assert server.call("GET", f"/v1/{path}").status == 200
    assert server.call("GET", f"/v1/messages/{received[0]['msg_id']}").status == 404
    assert server.call("POST", "/v1/send", bytes(2 << 20)).status == 413
    for malformed in (b"{", b"[]", b'{"topic": 1}'):
        assert server.call("POST", "/v1/send", malformed).status == 400
    drop_client(server)
    assert server.call("GET", "/readyz").status == 200


def flood(server: PostroomServer) -> None:
    """Send five times what the server may hold."""
    payload = bytes(700_000)
    statuses = [send(server, "flood", payload) for _ in range(5 * LIMIT // len(payload))]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) * len(payload) <= LIMIT


def peak_bytes(pid: int) -> int:
    """Return the largest resident memory that a process had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


@needs_strace
def test_a_soak_in_amnesia_mode_writes_nothing_and_stays_within_its_memory(tmp_path: Path) -> None:
    log = tmp_path / "calls.log"
    with PostroomServer(tmp_path / "server", "memory:", command_prefix=tracer(log), **AMNESIA) as server:
        soak(server)
        before = peak_bytes(server.process.pid)
        flood(server)
        assert peak_bytes(server.process.pid) - before < 4 * LIMIT
        assert 'postroom_dlq_profile{dlq_profile="ephemeral"} 1.0' in server.call("GET", "/metrics").text
        for path in ("dlq", "topics", "backlog"):
            assert server.call("GET", f"/v1/{path}").json["dlq_profile"] == "ephemeral"
        limits = Path(f"/proc/{server.process.pid}/limits").read_text()
        assert limits[limits.index("Max core file size") :].split()[4] == "0"
    wait_until(lambda: "+++ exited with 0 +++" in log.read_text())
    calls = log.read_text()
    assert list(writes(calls)) == []
    assert "PR_SET_DUMPABLE, SUID_DUMP_DISABLE" in calls
    assert sorted(each.name for each in server.folder.iterdir()) == ["postroom.toml", "server.log"]
    last = json.loads(server.log.splitlines()[-1])
    assert (last["event"], last["dead_letters"]) == ("amnesia.forgotten", 0)
    assert last["unsettled"] > 10


@needs_strace
def test_a_durable_server_is_seen_to_write_and_keeps_its_dead_letters(tmp_path: Path) -> None:
    log = tmp_path / "calls.log"
    server = PostroomServer(tmp_path / "server", command_prefix=tracer(log), policy=POLICY)
    with server:
        dead_letter(server, "failures")
        server.process.kill()
    assert any("store.db" in each for each in writes(log.read_text()))
    with server:
        letters = server.call("GET", "/v1/dlq").json
        assert (letters["dlq_profile"], len(letters["items"])) == ("durable", 1)
        assert server.call("GET", "/v1/backlog").json["dlq_profile"] == "durable"


@pytest.mark.parametrize(
    ("call", "is_write"),
    [
        ('openat(AT_FDCWD</tmp>, "notes", O_WRONLY|O_CREAT|O_CLOEXEC, 0666) = 3</tmp/notes>', True),
        ('openat(AT_FDCWD</tmp>, "/dev/shm/notes", O_RDWR) = 3</dev/shm/notes>', True),
        ('openat(AT_FDCWD</tmp>, "/dev/null", O_RDWR) = 3</dev/null>', False),
        ('openat(AT_FDCWD</tmp>, "notes", O_RDONLY|O_CLOEXEC) = 3</tmp/notes>', False),
        ('openat(AT_FDCWD</tmp>, "/tmp", O_RDWR|O_TMPFILE) = 3</tmp/#1 (deleted)>', True),
        ('mkdir("__pycache__", 0777) = 0', True),
        ("mmap(NULL, 4096, PROT_READ|PROT_WRITE, MAP_SHARED, 3</tmp/notes>, 0) = 0x7f", True),
        ("mmap(NULL, 4096, PROT_READ|PROT_WRITE, MAP_PRIVATE, 3</tmp/notes>, 0) = 0x7f", False),
        ("mmap(NULL, 4096, PROT_READ|PROT_WRITE, MAP_SHARED|MAP_ANONYMOUS, -1, 0) = 0x7f", False),
        ('bind(3<socket:[1]>, {sa_family=AF_UNIX, sun_path="/tmp/socket"}, 110) = 0', True),
        ("io_uring_setup(64, {flags=IORING_SETUP_SQPOLL}) = 4<anon_inode:[io_uring]>", True),
        ("io_uring_setup(64, {flags=0}) = 4<anon_inode:[io_uring]>", False),
        ("bind(3<socket:[1]>, {sa_family=AF_INET, sin_port=htons(1)}, 16) = 0", False),
    ],
)
def test_a_call_is_a_write_if_it_changes_a_file(call: str, is_write: bool) -> None:
    assert list(writes(f"1234 {call}")) == ([f"1234 {call}"] if is_write else [])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--store", "orders.db"], "the store is in memory, not orders.db"),
        (["--http", "unix:orders.sock"], "a Unix socket is a file"),
    ],
)
def test_amnesia_mode_refuses_what_makes_a_file(arguments: list[str], reason: str, tmp_path: Path) -> None:
    postroom = str(Path(sys.executable).parent / "postroom")
    command = [postroom, "serve", "--dev", "--amnesia", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert reason in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_freed_memory_is_overwritten() -> None:
    script = (
        "import ctypes\n"
        "from postroom.adapters.system.host import protect_memory\n"
        "protect_memory()\n"
        "payload = b''.join([b'secret!!'] * 200)\n"
        "address = id(payload) + 64\n"
        "del payload\n"
        "print(b'secret!!' in ctypes.string_at(address, 1_400))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
