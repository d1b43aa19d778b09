"""What Postroom logs: through standard logging, without payloads, auth tokens or principals."""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest

from postroom.adapters.cli.command import Entries, Group
from postroom.adapters.cli.main import COMMANDS as TREE
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from tests.e2e.conftest import TIMEOUT_SECONDS, Postroom

PAYLOAD, TOKEN, PRINCIPAL = "canary-payload", "canary-token", "canary-principal"
SECRETS = (PAYLOAD, TOKEN, PRINCIPAL)

LIBRARY_USER = f"""
import asyncio, logging, sys
from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.adapters.system.clock import SystemClock
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.messages import NewMessage
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.errors import Unavailable

if len(sys.argv) > 1:
    logging.basicConfig(level=sys.argv[1], stream=sys.stdout)


class DefectiveLog(MemoryEventLog):
    is_defective = False

    def append(self, records):
        if self.is_defective:
            raise RuntimeError("defect of an adapter")
        super().append(records)


def envelope():
    envelope = PrismEnvelope(envelope_version=1)
    envelope.metadata.message_id, envelope.metadata.topic = "1", "orders"
    envelope.metadata.published_at.seconds = 1_700_000_000
    envelope.payload.value = b"{PAYLOAD}"
    envelope.security.auth_token = b"{TOKEN}"
    envelope.security.publisher_id = "{PRINCIPAL}"
    return envelope.SerializeToString()


async def main():
    log, clock = DefectiveLog("acme@one"), SystemClock()
    engine = MailboxEngine(log, clock)
    await engine.open("test")
    postroom = OwnedMailbox(engine, clock)
    log.is_defective = True
    try:
        await postroom.send_message(NewMessage(topic="orders", payload=b"{PAYLOAD}", principal="{PRINCIPAL}"))
    except Unavailable as error:
        assert "defect of an adapter" in str(error)
    try:
        await postroom.send_envelopes([envelope()])
    except Unavailable:
        pass
    log.is_defective = False
    await asyncio.sleep(0)
    await postroom.send_message(NewMessage(topic="orders", payload=b"{PAYLOAD}", principal="{PRINCIPAL}"))
    await engine.close()


asyncio.run(main())
"""


def run_library_user(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LIBRARY_USER, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=True,
    )


def test_a_library_user_who_configures_no_logging_sees_no_output(tmp_path: Path) -> None:
    done = run_library_user(tmp_path)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_library_user_who_logs_everything_sees_the_traceback_but_no_payload_token_or_principal(
    tmp_path: Path,
) -> None:
    logged = run_library_user(tmp_path, "DEBUG").stdout
    assert "ERROR:postroom.mailbox:mailbox.append_failed mailbox=acme@one" in logged
    assert "RuntimeError: defect of an adapter" in logged
    assert "INFO:postroom.mailbox:mailbox.recovered" in logged
    assert [secret for secret in SECRETS if secret in logged] == []


SETTINGS = f"""
[nats]
url = "nats://relay:{TOKEN}@127.0.0.1:1"

[messaging]
context = "sea"
database = "postgresql://service:{TOKEN}@127.0.0.1:1/service"

[inbox]
consumer = "ORDERS/worker"
handler = "http://127.0.0.1:1/events"
allow = ["http://127.0.0.1:1/ 127.0.0.1/32"]

[streams.ORDERS]
subjects = ["orders.>"]

[archive]
folder = "archive"

[cluster]
node_token = "{TOKEN}-0123456789abcdef0123456789abcdef"

[search]
bodies = ["*"]

[schedules.canary]
cron = "* * * * * *"
topic = "orders"
payload = "{PAYLOAD}"
"""

TASKS = """
from postroom import Worker

worker = Worker()

@worker.consumer("orders")
def handle(data: bytes) -> None:
    raise ValueError("refused")
"""

SHOWING = {
    "peek",
    "recv",
    "show",
    "report traffic",
    "search",
    "searches run",
    "log show",
    "log tail",
    "dlq show",
    "token list",
    "token inspect",
}
"""Commands whose output is what was sent, or who may send it."""

COMMANDS = {
    "init": "init new-project",
    "import": "import --deliver -",
    "send": f"send orders {PAYLOAD} --principal {PRINCIPAL} --attr note={PAYLOAD} --id own",
    "peek": "peek orders",
    "recv": "recv orders --max 1",
    "ack": "ack r.AAAA",
    "result": "result own",
    "nack": "nack r.AAAA",
    "extend": "extend r.AAAA --visibility 5s",
    "cancel": f"cancel unknown --reason {PAYLOAD}",
    "reschedule": "reschedule unknown --at 2026-12-01T08:00Z",
    "work": "work tasks:worker --once",
    "ingest": "ingest --once --subject orders.> --durable archive",
    "ingest dlq list": "ingest dlq list --dlq dead.orders",
    "ingest dlq show": "ingest dlq show 1 --dlq dead.orders",
    "ingest dlq redrive": "ingest dlq redrive --dlq dead.orders",
    "ingest dlq discard": "ingest dlq discard 1 --dlq dead.orders",
    "show": "show own --payload",
    "backlog": "backlog",
    "log show": "log show",
    "log tail": "log tail --json",
    "verify": "verify",
    "anchor": "anchor anchors.jsonl",
    "erase": "erase --subject somebody",
    "erasure init": "erasure init",
    "migrate": "migrate",
    "outbox relay": "outbox relay --once",
    "outbox capture": "outbox capture --once --table events",
    "outbox backlog": "outbox backlog",
    "outbox list": "outbox list",
    "outbox retry": "outbox retry 0196a1b2-0000-7000-8000-000000000000",
    "outbox discard": "outbox discard 0196a1b2-0000-7000-8000-000000000000 --reason x",
    "outbox cleanup": "outbox cleanup",
    "inbox consume": "inbox consume --once",
    "inbox backlog": "inbox backlog",
    "inbox cleanup": "inbox cleanup",
    "inbox dlq list": "inbox dlq list",
    "inbox dlq redrive": "inbox dlq redrive",
    "inbox dlq discard": "inbox dlq discard 0196a1b2-0000-7000-8000-000000000000",
    "explain": "explain E_STORE",
    "streams apply": "streams apply --yes",
    "streams diff": "streams diff",
    "streams list": "streams list",
    "views rebuild": "views rebuild --engine spark",
    "views follow": "views follow --once",
    "views status": "views status",
    "views contexts": "views contexts",
    "views verify": "views verify",
    "views simulate": "views simulate --max-attempts 1",
    "report latency": "report latency",
    "report retries": "report retries",
    "report traffic": "report traffic",
    "report sla": "report sla",
    "report whatif": "report whatif --attempts 1,8",
    "report run": "report run tasks",
    "search": "search --match canary*",
    "stats": "stats",
    "activity": "activity",
    "config show": "config show",
    "mailbox list": "mailbox list",
    "mailbox show": "mailbox show",
    "mailbox set": "mailbox set policy.max_attempts=5",
    "apply": "apply --dry-run",
    "import-store": "import-store old.db new.db",
    "topic list": "topic list",
    "topic show": "topic show orders",
    "topic consumers": "topic consumers",
    "topic workers": "topic workers",
    "topic pause": "topic pause orders",
    "topic resume": "topic resume orders",
    "topic purge": "topic purge other --yes",
    "schedule set": "schedule set nightly orders --every 1d",
    "schedule list": "schedule list",
    "schedule show": "schedule show nightly",
    "schedule pause": "schedule pause nightly",
    "schedule resume": "schedule resume nightly",
    "schedule run-now": "schedule run-now nightly",
    "schedule delete": "schedule delete nightly --yes",
    "subscription set": "subscription set audit orders",
    "subscription list": "subscription list",
    "subscription show": "subscription show audit",
    "subscription rewind": "subscription rewind audit --to beginning --yes",
    "subscription delete": "subscription delete audit --yes",
    "searches save": "searches save Orders topics=orders",
    "searches list": "searches list",
    "searches run": "searches run Orders",
    "searches delete": "searches delete Orders",
    "export": "export json out --payload",
    "views roll-back": "views roll-back",
    "segments build": "segments build",
    "segments compact": "segments compact",
    "segments list": "segments list",
    "segments verify": "segments verify",
    "dlq list": "dlq list",
    "dlq groups": "dlq groups",
    "dlq show": "dlq show own",
    "dlq redrive": "dlq redrive orders",
    "dlq purge": "dlq purge orders --yes",
    "redrive start": "redrive start --topic orders",
    "redrive list": "redrive list",
    "redrive show": "redrive show 0196a1b2-0000-7000-8000-000000000000",
    "redrive pause": "redrive pause 0196a1b2-0000-7000-8000-000000000000",
    "redrive resume": "redrive resume 0196a1b2-0000-7000-8000-000000000000",
    "redrive cancel": "redrive cancel 0196a1b2-0000-7000-8000-000000000000",
    "redrive undo": "redrive undo 0196a1b2-0000-7000-8000-000000000000",
    "topic policy": "topic policy orders",
    "token rotate": "token rotate",
    "token mint": f"token mint {PRINCIPAL} --operation send --out token",
    "token attenuate": "token attenuate --token-file token --topic orders --out narrower",
    "token inspect": "token inspect --token-file token",
    "token list": "token list",
    "token revoke": "token revoke 00000000000000000000000000000000",
    "audit": "audit",
    "audit verify": "audit verify",
    "backup create": "backup create backup",
    "backup verify": "backup verify backup",
    "restore": "restore backup --into restored.db",
    "doctor": "doctor",
    "mcp": "mcp",
    "lease list": "lease list --admin 127.0.0.1:1",
    "lease release": "lease release main@local --force --admin 127.0.0.1:1",
    "route list": "route list --admin 127.0.0.1:1",
}


def command_names(entries: Entries = TREE, path: tuple[str, ...] = ()) -> Iterator[str]:
    for name, entry in entries.items():
        if isinstance(entry, Group):
            yield from command_names(entry.entries, (*path, name))
        if not isinstance(entry, Group) or entry.target:
            yield " ".join((*path, name))


@pytest.mark.timeout(1_200)  # starts fifty processes, one of them with Spark
def test_no_command_prints_a_token_or_logs_a_payload_or_principal(postroom: Postroom) -> None:
    missing = set(command_names()) - set(COMMANDS) - {"demo", "bench"}  # which send messages of their own
    # Those that run until a signal have the next test.
    missing -= {"admin", "console", "own", "proxy", "runner", "serve", "schedule", "up"}
    assert missing == set(), "a command is not covered"
    (postroom.folder / "archive").mkdir()
    (postroom.folder / "postroom.toml").write_text(SETTINGS)
    (postroom.folder / "tasks.py").write_text(TASKS)
    envelope = PrismEnvelope(envelope_version=1)
    envelope.metadata.message_id, envelope.metadata.topic = "1", "orders"
    envelope.metadata.published_at.seconds = 1_700_000_000
    envelope.payload.value = PAYLOAD.encode()
    envelope.security.auth_token = TOKEN
    envelope.security.publisher_id = PRINCIPAL
    line = b64encode(envelope.SerializeToString())
    settings = {"POSTROOM_INBOX__SIGNING_KEY": "ab" * 32}

    for name, command in COMMANDS.items():
        done = postroom("--log-level", "debug", "--debug", *command.split(), stdin=line, **settings)
        assert name not in ("import", "send", "recv", "search", "export") or done.code == 0, done
        assert done.code != 2, done
        assert TOKEN not in done.out + done.err, name
        shown = done.err if name in SHOWING else done.out + done.err
        assert [secret for secret in SECRETS if secret in shown] == [], name
    exported = (postroom.folder / "out").read_bytes()
    assert PAYLOAD.encode() in exported
    assert TOKEN.encode() not in exported
    assert b64encode(TOKEN.encode()).rstrip(b"=") not in exported


def test_no_service_prints_a_token_or_logs_a_payload_or_principal(postroom: Postroom) -> None:
    (postroom.folder / "postroom.toml").write_text(SETTINGS)
    (postroom.folder / "tasks.py").write_text(TASKS)
    address = postroom.folder / "http"
    runner = f"runner --dev --runner-id r1 --proxy-id p1 --admin 127.0.0.1:1 --listen unix:{address}-grpc"
    words = {
        "schedule": b"schedule.sent",
        f"serve --dev --http unix:{address}": b"Serving",
        "console": b"The console",
        "own": b"Owning",
        "up tasks:worker --http 127.0.0.1:0": b"Console",
        "admin --standalone --listen 127.0.0.1:0": b"Admin at",
        "proxy --admin 127.0.0.1:1 --proxy-id one --listen 127.0.0.1:0": b"Proxy one at",
        runner: b"Runner",
    }
    for command, word in words.items():
        process = postroom.start("--log-level", "debug", "--debug", *command.split())
        try:
            printed = read_until(word, process)
            if command.startswith("serve"):
                assert request_over(address) == 200
            process.send_signal(signal.SIGTERM)
            printed += b"".join(process.communicate(timeout=TIMEOUT_SECONDS))
        finally:
            process.kill()
        assert process.returncode == 0, printed
        secrets = [*map(str.encode, SECRETS), b64encode(PAYLOAD.encode())]
        assert [secret for secret in secrets if secret in printed] == [], command


def read_until(word: bytes, process: "subprocess.Popen[bytes]") -> bytes:
    """Return what a process prints up to the line with `word`."""
    printed = b""
    with selectors.DefaultSelector() as streams:
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            streams.register(stream, selectors.EVENT_READ)
        while word not in printed:
            ready = streams.select(TIMEOUT_SECONDS)
            assert ready, f"the process did not print {word!r}"
            for key, _ in ready:
                printed += os.read(key.fd, 4096)
            assert process.poll() is None, printed
    return printed


def request_over(address: Path) -> int:
    """Send a message in an HTTP request over a Unix socket; return the status of the answer."""
    body = {"topic": "orders", "payload_b64": b64encode(PAYLOAD.encode()).decode(), "principal": PRINCIPAL}
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    connection = HTTPConnection("localhost", timeout=TIMEOUT_SECONDS)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(address))
    with closing(connection):
        connection.request("POST", "/v1/send", json.dumps(body), headers)
        return connection.getresponse().status
