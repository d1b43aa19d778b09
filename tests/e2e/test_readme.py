"""What the README shows works, and it is short."""

import re
import shlex
from pathlib import Path

import pytest

from tests.e2e.conftest import Postroom
from tests.e2e.test_up import Up

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[list[str]]:
    """Return the lines of a block of the shell as words, without comments."""
    lines = [shlex.split(part, comments=True) for line in block.splitlines() for part in line.split("&&")]
    return [words for words in lines if words]


@pytest.fixture
def project(postroom: Postroom) -> Postroom:
    """A folder as the first lines of the README leave it."""
    (pip, init, (cd, folder), *_) = commands(BLOCKS[0][1])
    assert (pip[:2], cd) == (["pip", "install"], "cd")
    postroom.ok(*init[1:])
    postroom.folder /= folder
    return postroom


def test_the_first_lines_show_a_handled_message(project: Postroom) -> None:
    *_, up, send = commands(BLOCKS[0][1])
    assert (up[:2], send[:2]) == (["postroom", "up"], ["postroom", "send"])
    running = Up(project, *up[2:])
    try:
        running.wait_for("Console: ")
        project.ok(*send[1:])
        running.wait_for("{'id': 1}")
    finally:
        assert running.stop() == 0


def test_the_worker_handles_what_the_transaction_has_sent(project: Postroom) -> None:
    modules = [code for language, code in BLOCKS if language == "python"]
    for code in modules:
        name = code.partition("\n")[0].removeprefix("# ")
        (project.folder / name).write_text(code)
    running = Up(project, "tasks:worker")
    try:
        running.wait_for("Console: ")
        project.shell("python order.py")
        running.wait_for("charged order 2")
    finally:
        assert running.stop() == 0


def test_the_readme_has_at_most_700_words() -> None:
    assert len(README.split()) <= 700
