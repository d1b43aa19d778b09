"""Commands print whatever the standard streams are: closed, or with an encoding that lacks characters."""

import json
import shlex
import subprocess

import pytest

from tests.e2e.conftest import SCRIPT, TIMEOUT_SECONDS, Postroom

TEXT = "ü→😀"
COMMANDS = [
    ["peek", TEXT],
    ["peek", TEXT, "--json"],
    ["show", TEXT],
    ["log", "show"],
    ["backlog"],
    ["config", "show"],
    ["peek", "--help"],
]


@pytest.fixture
def sent(postroom: Postroom) -> Postroom:
    postroom.ok("send", TEXT, TEXT, "--id", TEXT)
    return postroom


def run(
    postroom: Postroom, arguments: list[str], redirection: str = "", **environment: str
) -> subprocess.CompletedProcess[bytes]:
    """Run a command in a process of its own, which a shell starts."""
    return subprocess.run(
        ["sh", "-c", f"exec {shlex.join([str(SCRIPT), *arguments])} {redirection}"],
        cwd=postroom.folder,
        env=postroom.environment | environment,
        capture_output=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


@pytest.mark.parametrize("command", COMMANDS, ids=shlex.join)
def test_a_command_whose_stdout_is_closed_succeeds(sent: Postroom, command: list[str]) -> None:
    done = run(sent, command, ">&-", PYTHONIOENCODING="utf-8")

    assert (done.returncode, done.stderr) == (0, b"")


def test_a_message_sent_with_all_streams_closed_is_stored(sent: Postroom) -> None:
    assert run(sent, ["send", "orders", "payload"], "<&- >&- 2>&-").returncode == 0
    assert run(sent, ["show", "unknown"], "<&- >&- 2>&-").returncode != 0

    sent.ok("verify")
    assert [each["topic"] for each in sent.ok("peek", "orders", "--json").lines] == ["orders"]


@pytest.mark.parametrize("command", COMMANDS, ids=shlex.join)
def test_a_command_escapes_what_the_encoding_lacks(sent: Postroom, command: list[str]) -> None:
    done = run(sent, command, PYTHONIOENCODING="ascii")

    assert (done.returncode, done.stderr) == (0, b"")
    if "--json" in command:
        assert [json.loads(line)["topic"] for line in done.stdout.splitlines()] == [TEXT]
    elif TEXT in command and "show" in command:
        assert b"\\u00fc\\u2192\\ud83d\\ude00" in done.stdout


def test_an_error_in_json_is_valid_in_every_encoding(sent: Postroom) -> None:
    done = run(sent, ["show", f"{TEXT}2", "--json"], PYTHONIOENCODING="latin-1", LANG="C")

    assert done.returncode != 0
    assert f"{TEXT}2" in json.loads(done.stderr.decode("latin-1"))["message"]
