import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fork_server import ForkServer
from tests.support.waiting import wait_until

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
def server() -> Iterator[ForkServer]:
    with ForkServer(["decimal"]) as server:
        yield server


def test_a_run_has_what_it_was_given_and_its_output_and_exit_code_come_back(
    server: ForkServer, script: Path, tmp_path: Path
) -> None:
    for who in ("first", "second"):
        done = server.run([str(script), "a b", "ü"], tmp_path, os.environ | {"WHO": who}, b"in", 60)
        told = [[str(script), "a b", "ü"], str(tmp_path), who, "in", True]
        assert (done.returncode, json.loads(done.stdout), done.stderr) == (3, told, b"spoken\n")


def test_a_run_ended_by_a_signal_says_so(server: ForkServer, script: Path, tmp_path: Path) -> None:
    assert server.run([str(script), "kill"], tmp_path, os.environ, b"", 60).returncode == -signal.SIGKILL


def test_a_run_that_takes_too_long_is_ended(server: ForkServer, script: Path, tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        server.run([str(script), "hang"], tmp_path, os.environ, b"", 0.1)


def test_a_run_with_variables_for_the_interpreter_has_an_interpreter_of_its_own(
    server: ForkServer, script: Path, tmp_path: Path
) -> None:
    done = server.run([str(script)], tmp_path, os.environ | {"PYTHONUTF8": "1"}, b"", 60)
    assert json.loads(done.stdout)[-1] is False


def test_code_and_modules_run_as_python_would_run_them(server: ForkServer, tmp_path: Path) -> None:
    code = "import sys; print(__name__, sys.argv, 'decimal' in sys.modules)"
    (tmp_path / "told.py").write_text(code)
    for arguments, argv in (
        (["-c", code, "x"], ["-c", "x"]),
        (["-m", "told", "x"], [str(tmp_path / "told.py"), "x"]),
    ):
        done = server.run(arguments, tmp_path, os.environ, b"", 60)
        assert (done.stdout.decode(), done.stderr) == (f"__main__ {argv} True\n", b"")


def test_a_process_has_what_tests_use_of_popen(server: ForkServer, script: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = server.start(
            [str(script), "hang"], tmp_path, os.environ, subprocess.PIPE, file, subprocess.STDOUT
        )
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.terminate()
    assert (process.wait(60), process.poll()) == (-signal.SIGTERM, -signal.SIGTERM)
    assert process.stdin is not None
    process.stdin.close()
    process.kill()  # of a process that has ended, nobody is


def test_a_process_that_nobody_waits_for_any_more_is_killed(
    server: ForkServer, script: Path, tmp_path: Path
) -> None:
    process = server.start([str(script), "hang"], tmp_path, os.environ, stdout=None, stderr=None)
    pid = process.pid
    del process
    wait_until(lambda: not runs(pid))


def runs(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
