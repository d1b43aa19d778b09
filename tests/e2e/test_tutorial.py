import re

from tests.e2e.conftest import ROOT
from tests.support.console import Session, read_steps

JVM_WARNING = re.compile(r"^WARNING: .*\n", re.MULTILINE)
PAGE = ROOT / "docs" / "tutorial.md"


def test_the_commands_of_the_tutorial_print_what_it_shows(postroom):
    steps = list(read_steps(PAGE.read_text("utf-8")))
    session = Session(lambda command: JVM_WARNING.sub("", postroom.shell(command)))
    for step in steps:
        session(step)

    assert len(steps) >= 10
