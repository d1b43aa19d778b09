"""The site of the documentation, before its generator reads it: pages, links, navigation and llms.txt."""

import re
from pathlib import Path

import pytest

from scripts.site import stage
from scripts.site.llms import write_llms
from scripts.site.stage import Page, navigation, read_pages, read_sections, unescape_pipes
from scripts.site.versions import list_version

REPOSITORY = "https://code.example/postroom/postroom"


def paths(items: object) -> list[str]:
    """Return the pages of a navigation."""
    if isinstance(items, str):
        return [items]
    values = items.values() if isinstance(items, dict) else items
    return [path for value in values for path in paths(value)]  # type: ignore[attr-defined]


def test_the_navigation_has_each_page_once_by_diataxis() -> None:
    pages = read_pages()
    shown = navigation(read_sections(pages), pages)
    assert [title for part in shown for title in part] == [
        "Home",
        "Tutorial",
        "How-to guides",
        "Reference",
        "Explanation",
    ]
    assert sorted(paths(shown)) == sorted(pages)


def test_links_to_source_files_lead_to_the_repository_if_its_address_is_known() -> None:
    page = read_pages(REPOSITORY)["grpc.md"].text
    assert f"[`mailbox.proto`]({REPOSITORY}/blob/main/adapters/grpc/v1/mailbox.proto)" in page
    assert "`mailbox.proto` is the package" in read_pages()["grpc.md"].text


def test_links_to_folders_and_to_files_outside_of_docs_lead_to_their_pages() -> None:
    pages = read_pages()
    assert "(examples/orders/README.md)" in pages["index.md"].text
    assert "(changelog.md)" in pages["index.md"].text
    assert re.search(r"\]\(adr/0\d+-[a-z-]+\.md\)", pages["changelog.md"].text)


def test_no_page_of_the_site_has_a_relative_link_that_leads_nowhere(tmp_path: Path) -> None:
    pages = read_pages()
    stage.stage(tmp_path, pages)
    count = 0
    for name, page in pages.items():
        text = re.sub(r"^```.*?^```$|`[^`\n]+`", "", page.text, flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s#:]+)(?:#[^)\s]*)?\)", text):
            count += 1
            assert (tmp_path / name).parent.joinpath(target).is_file(), f"{name}: {target}"
    assert count > 500


def test_lists_within_lists_are_indented_by_four_which_the_generator_needs() -> None:
    for name, page in read_pages().items():
        text = re.sub(r"^```.*?^```$", "", page.text, flags=re.MULTILINE | re.DOTALL)
        assert re.findall(r"^ {1,3}[-*] .*$", text, re.MULTILINE) == [], name


def test_pipes_in_code_are_plain_on_the_site_and_elsewhere_escaped_as_before() -> None:
    page = "| `a \\| b` | c \\| d |\n\n```\n`e \\| f`\n```\n"
    assert unescape_pipes(page) == "| `a | b` | c \\| d |\n\n```\n`e \\| f`\n```\n"


def test_a_link_that_leads_nowhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index.md").write_text("# Home\n\nSee [that](missing.md).\n")
    monkeypatch.setattr(stage, "DOCS", tmp_path)
    monkeypatch.setattr(stage, "ROOT", tmp_path)
    monkeypatch.setattr(stage, "OUTSIDE", {})
    with pytest.raises(ValueError, match=r"index\.md: the link missing\.md leads nowhere\."):
        read_pages()


def test_a_page_that_the_index_leaves_out_is_refused() -> None:
    pages = read_pages() | {"forgotten.md": Page("Forgotten", "", "# Forgotten\n")}
    with pytest.raises(ValueError, match=r"docs/index\.md does not list forgotten\.md\."):
        read_sections(pages)


def test_llms_txt_has_a_line_and_llms_full_txt_the_text_of_each_page(tmp_path: Path) -> None:
    pages = read_pages()
    write_llms(tmp_path, read_sections(pages), pages, "https://docs.example/0.1/")
    index = (tmp_path / "llms.txt").read_text()
    listed = re.findall(r"^- \[[^\n]+\]\(https://docs\.example/0\.1/(\S+)\): \S.*$", index, re.MULTILINE)
    assert sorted(listed) == sorted(pages.keys() - {"index.md"})
    full = (tmp_path / "llms-full.txt").read_text()
    assert [name for name, page in pages.items() if page.text not in full] == []


def test_every_page_has_a_title_and_a_summary_of_one_line() -> None:
    for name, page in read_pages().items():
        assert page.title, name
        assert 10 < len(page.summary) < 400, (name, page.summary)
        assert "\n" not in page.summary


def test_versions_are_listed_newest_first_and_the_address_of_the_site_leads_to_the_latest(
    tmp_path: Path,
) -> None:
    for version, is_latest in (("dev", False), ("0.9", True), ("0.10", True), ("dev", False)):
        list_version(tmp_path, version, is_latest=is_latest)
    text = (tmp_path / "versions.json").read_text()
    assert re.findall(r'"version": "([^"]+)"', text) == ["0.10", "0.9", "dev"]
    assert text.count('"latest"') == 1
    assert 'url=0.10/"' in (tmp_path / "index.html").read_text()
