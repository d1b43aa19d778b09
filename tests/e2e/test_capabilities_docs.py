"""The commands of docs/capabilities.md do what the page shows."""

from tests.e2e.conftest import ROOT, Postroom
from tests.support.console import Session, read_steps

PAGE = ROOT / "docs" / "capabilities.md"


def test_the_page_shows_what_happens(postroom: Postroom) -> None:
    steps = list(read_steps(PAGE.read_text("utf-8")))
    session = Session(postroom.shell)
    for step in steps:
        session(step)
    assert len(steps) == 7
