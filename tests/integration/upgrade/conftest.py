import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from postroom.application.version import own_version
from tests.support.releases import LAST, ROOT, install_release
from tests.support.waiting import SECONDS

PROGRAM = Path(__file__).with_name("program.py")
WORKS = "works"


class Version:
    """A version of Postroom: its interpreter and its command."""

    def __init__(self, name: str, python: Path) -> None:
        self.name = name
        self.programs = python.parent
        # Python would find the package in the working folder first.
        self.environment = os.environ | {"PYTHONSAFEPATH": "1"}
        self._python = python

    def run(self, step: str, address: object, facts: Mapping[str, Any] | None = None) -> Any:
        """Return what a step of `program.py` prints; raise Refused with the sentence that it ends with."""
        known = json.dumps(facts or {})
        done = self._done([self._python, PROGRAM, step, str(address)], known)
        if done.returncode:
            raise Refused(re.findall(r"^[A-Z]\w*[a-z]: .+", done.stderr, re.MULTILINE)[-1])
        return json.loads(done.stdout)

    def command(self, *arguments: object, folder: Path | None = None) -> tuple[int, str]:
        """Return the exit code of a command in a folder, and what it printed, its error included."""
        done = self._done([self.programs / "postroom", *map(str, arguments)], "", folder)
        return done.returncode, done.stdout + done.stderr

    def _done(
        self, command: list[str | Path], text: str, folder: Path | None = None
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command,
            cwd=folder or self.programs,
            env=self.environment,
            input=text,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )


class Refused(Exception):
    """A sentence by which a version refuses something."""


@pytest.fixture(scope="session")
def former() -> Version:
    """The last release, installed from a wheel of its commit."""
    return Version(LAST, install_release(LAST))


@pytest.fixture(scope="session")
def present() -> Version:
    """This version."""
    return Version(own_version(), Path(sys.executable))


def outcome(meeting: str, former: str, present: str) -> str:
    """Return the outcome that the documentation states for a meeting of both versions.

    Arguments:
        meeting: what both use.
        former, present: what they do.
    """
    return read_outcomes()[meeting, former, present]


def read_outcomes() -> dict[tuple[str, str, str], str]:
    """Return the table of the documentation."""
    page = (ROOT / "docs" / "versions.md").read_text("utf-8").partition("<!-- outcomes -->")[2]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| (.+) \|$", page, re.MULTILINE)
    return {(meeting, former, present): text for meeting, former, present, text in rows[1:]}


def refused(error: object, *names: object) -> str:
    """Return the outcome of a refusal, with the given paths and addresses in capitals."""
    sentence = str(error).split(": ", 1)[1] if re.match(r"(postroom|[A-Z]\w+): ", str(error)) else str(error)
    for name in names:
        sentence = sentence.replace(str(name), "STORE")
    return f"refused: {sentence.strip()}"
