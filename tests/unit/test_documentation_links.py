import re
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", ".github")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])

_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?)$", re.MULTILINE)
_FOLDERS = "adapters|application|domain|postroom|projections|scripts|tests"
_SOURCE = re.compile(rf"(?<![\w/])((?:{_FOLDERS})/[\w/.-]+\.(?:py|sh))\b")


def links(page: Path) -> list[str]:
    """Return the targets of a page's relative links."""
    targets = _LINK.findall(_CODE.sub("", page.read_text("utf-8")))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub derives them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in _HEADING.findall(text)}


def is_broken(page: Path, target: str) -> bool:
    path, _, anchor = unquote(target).partition("#")
    file = (page.parent / path).resolve() if path else page
    return not file.exists() or (bool(anchor) and anchor not in anchors(file))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_of_a_page_resolves(page: Path) -> None:
    assert not [target for target in links(page) if is_broken(page, target)]


def test_pages_have_links_to_check() -> None:
    assert sum(len(links(page)) for page in PAGES) > 50


@pytest.mark.parametrize("target", ["missing.md", "glossary.md#missing", "#missing"])
def test_a_broken_link_is_detected(target: str) -> None:
    assert is_broken(ROOT / "docs" / "index.md", target)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_source_files_named_by_a_page_exist(page: Path) -> None:
    named = set(_SOURCE.findall(page.read_text("utf-8")))

    assert not [file for file in named if not (ROOT / file).is_file()]


def test_pages_name_source_files_to_check() -> None:
    assert sum(len(_SOURCE.findall(page.read_text("utf-8"))) for page in PAGES) > 20


def test_the_script_for_spark_submit_can_be_run() -> None:
    page = (ROOT / "docs" / "spark.md").read_text("utf-8")
    scripts = re.findall(r"spark-submit\b[^\n]* (projections/\S+\.py)", page)

    assert scripts
    assert all('if __name__ == "__main__"' in (ROOT / script).read_text("utf-8") for script in scripts)
