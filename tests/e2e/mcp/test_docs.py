"""The transcript of docs/mcp.md is what happens."""

from tests.e2e.conftest import ROOT, Postroom

PAGE = (ROOT / "docs" / "mcp.md").read_text("utf-8")


def test_the_page_shows_what_happens(postroom: Postroom) -> None:
    postroom.ok("token", "rotate", "--store", "orders.db")
    assert len(postroom.run_page(PAGE, ("console", "sh"))) == 5
