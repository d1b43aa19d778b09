import gzip
import json
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple

import pytest

from postroom.adapters.sqlite.event_log import mailbox_names
from tests.support.console import Session, read_files, read_steps
from tests.support.fork_server import popen, shared_server

SCRIPT = Path(sys.executable).with_name("postroom")
ROOT = Path(__file__).parents[2]
PROGRAMS = {"postroom": SCRIPT, "python": sys.executable}
PLAIN = re.compile(
    r"(?P<program>postroom|python) (?!-m)(?P<arguments>(?:'[^']*'|\"[^\"$`\\]*\"|[^'\"|&;$`*?<>(){}\\\n#~])*)"
    r"(?:> (?P<file>[a-z]+))?"
)
"""Shell commands that run one program, at most with its output in a file."""
ASSIGNMENT = re.compile(r"\w+=")
OPERATOR = re.compile(r"[|;&\n]|^(cd|export|for) ")
TIMEOUT_SECONDS = 900
"""A command that hangs fails, also on a machine that is sixteen times as slow."""


class Done(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def error(self) -> Any:
        return json.loads(self.err)


class Postroom:
    """The console script, run in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "postroom.db"
        self._running: list[tuple[str, subprocess.Popen[bytes], socket.socket]] = []
        # What the developer has set must not reach the tests; Spark needs the rest.
        self.environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("POSTROOM_", "PYTEST_ADDOPTS"))
        }

    def __call__(self, *arguments: str, stdin: bytes = b"", **environment: str) -> Done:
        variables = self.environment | environment
        command = [str(SCRIPT), *arguments]
        done = shared_server().run(command, self.folder, variables, stdin, TIMEOUT_SECONDS)
        return Done(done.returncode, done.stdout.decode(), done.stderr.decode())

    def ok(self, *arguments: str, stdin: bytes = b"", **environment: str) -> Done:
        done = self(*arguments, stdin=stdin, **environment)
        assert done.code == 0, done
        return done

    def shell(self, command: str) -> str:
        """Run a shell command; return what it prints on a terminal of 80 columns."""
        with TemporaryFile() as printed, ExitStack() as stack:
            out: IO[bytes] = printed
            if (match := PLAIN.fullmatch(command)) and match["file"]:
                out = stack.enter_context((self.folder / match["file"]).open("wb"))
            self._popen(command, out, printed).wait(TIMEOUT_SECONDS)
            printed.seek(0)
            return printed.read().decode()

    def _popen(
        self, command: str, stdout: IO[bytes], stderr: IO[bytes], **variables: str
    ) -> "subprocess.Popen[bytes]":
        environment = self.environment | {
            "PATH": f"{SCRIPT.parent}:{self.environment['PATH']}",
            # Unbuffered, both reach one pipe in the order in which they reach a terminal.
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "80",
            **variables,
        }
        if match := PLAIN.fullmatch(command):  # a fork takes a tenth of the time
            arguments = [str(PROGRAMS[match["program"]]), *shlex.split(match["arguments"])]
        else:
            arguments = ["sh", "-c", command]
        return popen(arguments, self.folder, environment, stdout=stdout, stderr=stderr)

    def run_on(self, command: str, is_shown: Callable[[str], bool]) -> str:
        """Run a shell command until it ends, or is ready; then it runs until `close`.

        Arguments:
            is_shown: whether it has printed enough. A command is ready that has printed something expected,
                or that tells its service manager so.

        Returns: what it printed so far. It must succeed.
        """
        manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        address = f"\0postroom-test-{os.getpid()}-{secrets.token_hex(8)}"
        manager.bind(address)
        file = self.folder / f".output-{len(self._running)}"
        is_ready, is_notified = False, not is_shown("")
        # Of a command without operators, no shell is left that would get its signals.
        script = command if PLAIN.fullmatch(command) or OPERATOR.search(command) else f"exec env {command}"
        with file.open("wb") as out:
            process = self._popen(script, out, out, NOTIFY_SOCKET=f"@{address[1:]}")
        self._running.append((command, process, manager))
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while process.poll() is None and not is_ready:
            assert time.monotonic() < deadline, f"{command} was not ready in time: {file.read_text()}"
            with suppress(BlockingIOError):
                is_notified |= b"READY=1" in manager.recv(4_096)
            is_ready = is_notified and "--once" not in command and is_shown(file.read_text())
            time.sleep(0.005)
        printed = file.read_text("utf-8", "replace")
        if process.poll():
            self._running.pop()
            manager.close()
            pytest.fail(f"$ {command} ended with {process.returncode}\n{printed}")
        assert "start.unavailable" not in printed, f"$ {command}\n{printed}"
        return printed

    def run_page(self, page: str, languages: Sequence[str] = ("console",)) -> list[str]:
        """Write the files that a page shows, run its commands, and compare what they print.

        Arguments:
            languages: of the blocks whose commands run: `console`, `sh`, or both.

        Returns: the commands.
        """
        for name, content in read_files(page).items():
            file = self.folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        session = Session(self.shell, self.run_on)
        steps = list(read_steps(page, languages))
        for step in steps:
            words = shlex.split(step.command.removeprefix("export "))
            if all(ASSIGNMENT.match(word) for word in words):
                self.environment |= dict(word.split("=", 1) for word in words)
            else:
                session(step)
        return [step.command for step in steps]

    def close(self) -> None:
        """End the commands that run on."""
        codes = {}
        while self._running:
            command, process, manager = self._running.pop()
            process.terminate()
            codes[command] = process.wait(TIMEOUT_SECONDS)
            manager.close()
        assert {command: code for command, code in codes.items() if code not in (0, -signal.SIGTERM)} == {}

    def start(self, *arguments: str, piped: bool = False) -> "subprocess.Popen[bytes]":
        stdin = subprocess.PIPE if piped else subprocess.DEVNULL
        pipe = subprocess.PIPE
        return popen([SCRIPT, *arguments], self.folder, self.environment, stdin, pipe, pipe)

    def wait_for_owner(self, process: "subprocess.Popen[bytes]", mailbox: str = "main@local") -> None:
        """Return once `process` owns the mailbox, as the lock file says, and has created its log."""
        lock = self.store.with_name(f"{self.store.name}-owner-{mailbox}")
        while not (
            lock.exists()
            and f"process {process.pid} " in lock.read_text()
            and mailbox in mailbox_names(self.store)
        ):
            assert process.poll() is None, process.communicate()
            time.sleep(0.005)


@pytest.fixture
def postroom(tmp_path: Path) -> Iterator[Postroom]:
    running = Postroom(tmp_path)
    yield running
    running.close()


WEBHOOKS = {
    "sample": ROOT / "docs" / "examples" / "notebook" / "webhooks.ndjson",
    "recorded": ROOT.parent / "shared" / "data" / "github-webhooks.ndjson.gz",
}


@pytest.fixture(scope="session", params=WEBHOOKS)
def webhooks(request: pytest.FixtureRequest) -> Path:
    """A file of webhook deliveries: a small one of our own, and a larger one that need not be there."""
    path: Path = WEBHOOKS[request.param]
    if not path.exists():
        pytest.skip(f"The recorded deliveries are not part of the repository; put them at {path}.")
    return path


def read_lines(path: Path) -> list[bytes]:
    """Return the lines of a file, which may be gzipped."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        return [line.rstrip(b"\n") for line in file]
