import gzip
import json
import os
import re
import shlex
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple

import pytest

from postroom.adapters.sqlite.event_log import mailbox_names
from tests.support.fork_server import popen, shared_server

SCRIPT = Path(sys.executable).with_name("postroom")
ROOT = Path(__file__).parents[2]
PROGRAMS = {"postroom": SCRIPT, "python": sys.executable}
PLAIN = re.compile(
    r"(?P<program>postroom|python) (?!-m)(?P<arguments>(?:'[^']*'|\"[^\"$`\\]*\"|[^'\"|&;$`*?<>(){}\\\n#~])*)"
    r"(?:> (?P<file>[a-z]+))?"
)
"""Shell commands that run one program, at most with its output in a file."""
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
        # What the developer has set must not reach the tests; Spark needs the rest.
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("POSTROOM_")}

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
        environment = self.environment | {
            "PATH": f"{SCRIPT.parent}:{self.environment['PATH']}",
            # Unbuffered, both reach one pipe in the order in which they reach a terminal.
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "80",
        }
        arguments = ["sh", "-c", command]
        if match := PLAIN.fullmatch(command):  # a fork takes a tenth of the time
            arguments = [str(PROGRAMS[match["program"]]), *shlex.split(match["arguments"])]
        with TemporaryFile() as printed, ExitStack() as stack:
            out: IO[bytes] = printed
            if match and match["file"]:
                out = stack.enter_context((self.folder / match["file"]).open("wb"))
            popen(arguments, self.folder, environment, stdout=out, stderr=printed).wait(TIMEOUT_SECONDS)
            printed.seek(0)
            return printed.read().decode()

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
def postroom(tmp_path: Path) -> Postroom:
    return Postroom(tmp_path)


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
