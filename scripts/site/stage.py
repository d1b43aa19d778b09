"""The pages of docs/ as the generator of the site reads them, and their order.

In the repository, links lead to files, as code hosts need them. On the site, those that leave docs/ lead to
the repository, if its address is known, and are plain text otherwise.
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OUTSIDE = {"changelog.md": "CHANGELOG.md", "vulnerabilities.md": "SECURITY.md"}
"""Pages of the site that are files outside docs/."""
BRANCH = "main"
FOLDERS = {
    "adr/README.md": "adr",
    "cookbook/index.md": "cookbook",
    "reference/api/index.md": "reference/api",
    "reference/errors/index.md": "reference/errors",
}
"""Pages that stand for all pages of their folder."""

MIN_SUMMARY, MAX_SUMMARY = 20, 300
"""Characters of a summary; what a decision's status says is shorter."""

_LINK = r"(?P<mark>!?)\[(?P<label>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)"
_TOKEN = re.compile(rf"^```.*?^```$|{_LINK}|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r"^- (.+(?:\n  .+)*)", re.MULTILINE)


class Page(NamedTuple):
    """A page of the site.

    Arguments:
        title: its heading.
        summary: its first sentence, without markup.
        text: Markdown.
    """

    title: str
    summary: str
    text: str


class Section(NamedTuple):
    """A part of the navigation, as in `docs/index.md`.

    Arguments:
        pages: title in the navigation and path of each page, and of those of its folder.
    """

    title: str
    pages: tuple[tuple[str, str, tuple[str, ...]], ...]


def read_pages(repository: str | None = None) -> dict[str, Page]:
    """Return the pages of the site by path.

    Arguments:
        repository: address of the repository, such as `https://host/owner/name`; None if it is unknown.

    Raises: ValueError naming page and target of a link that leads nowhere.
    """
    sources = {str(file.relative_to(DOCS)): file for file in sorted(DOCS.rglob("*.md"))}
    sources |= {name: ROOT / file for name, file in OUTSIDE.items()}
    return {name: _page(_rewrite_links(file, name, repository)) for name, file in sources.items()}


def stage(target: Path, pages: Mapping[str, Page]) -> None:
    """Write the pages and the other files of docs/ to a folder; what has not changed stays as it is."""
    ignored = shutil.ignore_patterns("*.md", "__pycache__", "*.pyc")
    shutil.copytree(DOCS, target, ignore=ignored, copy_function=_copy_if_newer, dirs_exist_ok=True)
    for name, page in pages.items():
        write(target / name, page.text)


def write(file: Path, text: str) -> None:
    """Write a file if its text has changed: what watches it would else build the whole site again."""
    if not file.exists() or file.read_text() != text:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def _copy_if_newer(source: str, target: str) -> None:
    if not os.path.exists(target) or os.path.getmtime(source) > os.path.getmtime(target):
        shutil.copy2(source, target)


def read_sections(pages: Mapping[str, Page]) -> list[Section]:
    """Return the navigation: headings and lists of the index, each page once.

    Raises: ValueError naming the pages that the index leaves out.
    """
    sections, seen = [], {"index.md"}
    for part in pages["index.md"].text.split("\n## ")[1:]:
        heading, _, body = part.partition("\n")
        entries = []
        for entry in _ENTRY.findall(body):
            link = _TOKEN.search(entry)
            path = link["target"].partition("#")[0] if link is not None and link["target"] else ""
            if path in pages and path not in seen:
                inner = tuple(
                    sorted(
                        each for each in pages if path in FOLDERS and Path(each).is_relative_to(FOLDERS[path])
                    )
                )
                seen |= {path, *inner}
                entries.append((plain(link["label"]), path, inner))
        sections.append(Section(heading, tuple(entries)))
    if missing := pages.keys() - seen:
        raise ValueError(f"docs/index.md does not list {', '.join(sorted(missing))}.")
    return sections


def navigation(sections: list[Section], pages: Mapping[str, Page]) -> list[Any]:
    """Return the navigation as the generator's settings have it."""
    shown: list[Any] = [{"Home": "index.md"}]
    for title, entries in sections:
        items: list[Any] = []
        for name, path, inner in entries:
            others = [each for each in inner if each != path]
            items.append(
                {name: [path, *({pages[each].title: each} for each in others)]} if others else {name: path}
            )
        shown.append({title: items})
    return shown


def unescape_pipes(text: str) -> str:
    """Return a page whose tables have plain pipes in code, where only code hosts need them escaped."""

    def replace(found: re.Match[str]) -> str:
        is_code = found[0].startswith("`") and not found[0].startswith("```")
        return found[0].replace("\\|", "|") if is_code else found[0]

    return _TOKEN.sub(replace, text)


def plain(text: str) -> str:
    """Return Markdown of one line as text without markup."""
    text = _TOKEN.sub(lambda found: found["label"] or found[0].strip("`"), text)
    return " ".join(re.sub(r"[`*\\]", "", text).split())


def _page(text: str) -> Page:
    title = re.search(r"^# (.+)$", text, re.MULTILINE)
    paragraphs = re.split(r"\n\s*\n", text[title.end() :] if title else text)
    prose = (each.strip() for each in paragraphs if re.match(r"[\w\[`*(]", each.lstrip("\n")))
    sentences = (
        each for each in prose if len(each) > MIN_SUMMARY and not each.startswith(("Status:", "Accepted"))
    )
    first = plain(re.sub(r"\s*\n\s*", " ", next(sentences, "")))
    summary = re.split(r"(?<=[.:!?]) (?=[A-Z])", first)[0].rstrip(":")
    return Page(plain(title[1]) if title else "", shorten(summary, MAX_SUMMARY, placeholder=" ..."), text)


def _rewrite_links(file: Path, name: str, repository: str | None) -> str:
    """Return the text of a page with the links of the site.

    Arguments:
        file: the page in the repository.
        name: its path on the site.
    """

    def replace(found: re.Match[str]) -> str:
        target = found["target"]
        if target is None or re.match(r"[a-z]+:|#", target):
            return found[0]
        label = _TOKEN.sub(replace, found["label"])
        path, hash_, anchor = target.partition("#")
        linked = Path(os.path.normpath(file.parent / path))
        if not linked.exists():
            raise ValueError(f"{file.relative_to(ROOT)}: the link {target} leads nowhere.")
        if (place := _place(linked)) is not None:
            return f"{found['mark']}[{label}]({os.path.relpath(place, Path(name).parent)}{hash_}{anchor})"
        if repository is None:
            return label
        kind = "tree" if linked.is_dir() else "blob"
        return f"[{label}]({repository}/{kind}/{BRANCH}/{linked.relative_to(ROOT)}{hash_}{anchor})"

    return _TOKEN.sub(replace, file.read_text())


def _place(file: Path) -> str | None:
    """Return the path on the site of a file of the repository; None if the site does not have it."""
    if file.is_relative_to(DOCS):
        page = next((each for each in (file / "README.md", file / "index.md") if each.exists()), file)
        return None if page.is_dir() else str(page.relative_to(DOCS))
    return next((name for name, source in OUTSIDE.items() if file == ROOT / source), None)


def summaries(
    sections: list[Section], pages: Mapping[str, Page]
) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Yield each part of the navigation with title, path and summary of its pages."""
    for title, entries in sections:
        paths = [
            path
            for _, first, inner in entries
            for path in (first, *(each for each in inner if each != first))
        ]
        yield title, [(pages[path].title, path, pages[path].summary) for path in paths]
