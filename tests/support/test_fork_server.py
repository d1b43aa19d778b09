import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fork_server import ForkServer

SCRIPT = """
import json, os, signal, sys, time

print(json.dumps([sys.argv, os.getcwd(), os.environ.get("WHO"), sys.stdin.read(), "decimal" in sys.modules]))
print("spoken", file=sys.stderr)
if "kill" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
if "hang" in sys.argv:
    time.sleep(600)
sys.exit(3)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def server(script: Path) -> Iterator[ForkServer]:
    with ForkServer(script, ["decimal"]) as server:
        yield server


def test_a_run_has_what_it_was_given_and_its_output_and_exit_code_come_back(
    server: ForkServer, script: Path, tmp_path: Path
) -> None:
    for who in ("first", "second"):
        done = server.run(["a b", "ü"], tmp_path, os.environ | {"WHO": who}, b"in", 60)
        told = [[str(script), "a b", "ü"], str(tmp_path), who, "in", True]
        assert (done.returncode, json.loads(done.stdout), done.stderr) == (3, told, b"spoken\n")


def test_a_run_ended_by_a_signal_says_so(server: ForkServer, tmp_path: Path) -> None:
    assert server.run(["kill"], tmp_path, os.environ, b"", 60).returncode == -signal.SIGKILL


def test_a_run_that_takes_too_long_is_ended(server: ForkServer, tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        server.run(["hang"], tmp_path, os.environ, b"", 0.1)


def test_a_run_with_variables_for_the_interpreter_has_an_interpreter_of_its_own(
    server: ForkServer, tmp_path: Path
) -> None:
    done = server.run([], tmp_path, os.environ | {"PYTHONUTF8": "1"}, b"", 60)
    assert json.loads(done.stdout)[-1] is False
