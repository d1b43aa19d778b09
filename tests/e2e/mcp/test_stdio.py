"""`postroom mcp` as a process: its streams, its end, its errors."""

import json
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.e2e.conftest import TIMEOUT_SECONDS, Postroom
from tests.support.mcp import call, stdio_agent
from tests.support.waiting import until_answer

INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 3,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "editor", "version": "1"},
    },
}
NO_REQUESTS = [
    b"\xff\xfe",
    b"",
    b"{}",
    b"[]",
    b"null",
    b"[" * 100_000,
    b'{"jsonrpc": "2.0", "id": 1, "method": "no/such/method"}',
    b'{"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": []}',
    b'{"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 7}}',
    b'{"jsonrpc": "2.0", "id": "\\ud800", "method": "ping"}',
]


def talk(postroom: Postroom, lines: list[bytes], *options: str) -> tuple[int, list[Any], str]:
    """Write lines to a new process and close its input; return its code, its answers, and its log."""
    process = postroom.start("mcp", *options, piped=True)
    out, err = process.communicate(b"\n".join(lines) + b"\n", timeout=TIMEOUT_SECONDS)
    return process.returncode, [json.loads(line) for line in out.splitlines()], err.decode()


def test_lines_that_are_no_requests_end_nothing_and_the_log_is_on_standard_error(postroom: Postroom) -> None:
    postroom.ok("send", "orders", "{}")
    code, answers, log = talk(
        postroom, [*NO_REQUESTS, json.dumps(INITIALIZE).encode()], "--log-level", "debug"
    )
    assert code == 0
    assert {each["jsonrpc"] for each in answers} == {"2.0"}  # nothing else is on standard output
    assert [each["result"]["serverInfo"]["name"] for each in answers if each.get("id") == 3] == ["postroom"]
    assert log


def test_a_line_that_is_too_long_ends_the_connection_and_the_log_says_so(postroom: Postroom) -> None:
    postroom.ok("send", "orders", "{}")
    code, answers, log = talk(postroom, [b"x" * (5 << 20), json.dumps(INITIALIZE).encode()])
    assert (code, answers) == (0, [])
    assert "mcp.message_too_long" in log


def test_a_signal_ends_it_although_the_agent_keeps_its_input_open(postroom: Postroom) -> None:
    postroom.ok("send", "orders", "{}")
    process = postroom.start("mcp", piped=True)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(INITIALIZE).encode() + b"\n")
    process.stdin.flush()
    assert json.loads(process.stdout.readline())["id"] == 3
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT_SECONDS) == 0
    process.communicate()


def test_an_agent_that_stops_reading_or_is_killed_leaves_no_process(postroom: Postroom) -> None:
    postroom.ok("send", "orders", "{}")
    process = postroom.start("mcp", piped=True)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.close()  # nobody reads the answers
    process.stdin.write(json.dumps(INITIALIZE).encode() + b"\n")
    process.stdin.close()
    assert process.wait(TIMEOUT_SECONDS) == 0
    assert process.stderr is not None
    process.stderr.close()


async def test_two_agents_and_a_worker_use_one_mailbox(postroom: Postroom) -> None:
    id_ = postroom.ok("send", "orders", "{}").out.strip()
    async with stdio_agent(postroom.folder) as first, stdio_agent(postroom.folder) as second:
        (received,) = postroom.ok("recv", "orders", "--json").lines
        for agent in (first, second):
            assert (await call(agent, "get_message", msg_id=id_))["status"] == "in_flight"
        postroom.ok("ack", received["receipt"])
        assert (await call(second, "get_message", msg_id=id_))["status"] == "acked"


async def test_a_token_that_is_revoked_ends_what_its_agent_may_do(postroom: Postroom) -> None:
    postroom.ok("send", "orders", "{}")
    postroom.ok("token", "rotate")
    token = postroom.ok("token", "mint", "agent", "--operation", "read-headers").out.strip()
    environment = postroom.environment | {"POSTROOM_TOKEN": token}
    async with stdio_agent(postroom.folder, environment=environment) as agent:
        assert (await call(agent, "list_topics"))["topics"][0]["topic"] == "orders"
        postroom.ok("token", "revoke", "--principal", "agent")

        async def is_refused() -> bool:
            return (await agent.call_tool("list_topics", {})).is_error

        await until_answer(is_refused)


@pytest.mark.parametrize(
    ("arguments", "environment", "code", "sentence"),
    [
        (["--store", "missing.db"], {}, 3, "There is no store at missing.db"),
        (["--store", "https://127.0.0.1:1"], {}, 2, "uses the store itself, not a server"),
        (["--store", "memory:"], {}, 2, "memory:"),
        (["--token-file", "-"], {}, 2, "The agent uses standard input"),
        ([], {"POSTROOM_MCP__MAX_CALLS": "0"}, 2, "max_calls must be at least 1"),
        ([], {"POSTROOM_TOKEN": "junk"}, 2, "There is no key to check capabilities with"),
    ],
)
def test_what_it_can_not_serve_is_told_in_a_sentence(
    postroom: Postroom, arguments: list[str], environment: dict[str, Any], code: int, sentence: str
) -> None:
    postroom.ok("send", "orders", "{}")
    done = postroom("mcp", *arguments, **environment)
    assert sentence in done.err
    assert (done.code, done.out) == (code, "")


def test_without_the_extra_the_command_names_it(postroom: Postroom) -> None:
    program = (
        "import sys; sys.modules['mcp'] = None; sys.argv = ['postroom', 'mcp'];"
        "from postroom.adapters.cli.main import main; main()"
    )
    postroom.ok("send", "orders", "{}")
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=postroom.folder, capture_output=True, text=True, check=False
    )
    assert "run: pip install 'postroom[mcp]'." in done.stderr
