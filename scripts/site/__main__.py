"""Build the site of the documentation, or serve it while its pages are edited.

python -m scripts.site [--version NAME] [--latest] [--output FOLDER] [--serve HOST:PORT]

The site of a version is FOLDER/VERSION, beside versions.json. Its address and that of the repository are
POSTROOM_SITE_URL and POSTROOM_REPOSITORY_URL; without them, all links are relative, and those to source files
are text.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from watchfiles import watch

from scripts.site.cards import draw_card
from scripts.site.llms import write_llms
from scripts.site.stage import (
    DOCS,
    OUTSIDE,
    ROOT,
    Page,
    navigation,
    read_pages,
    read_sections,
    stage,
    unescape_pipes,
    write,
)
from scripts.site.versions import list_version

HERE = Path(__file__).parent
WORK = ROOT / ".site"
"""What the generator reads."""
CARD = "assets/cards/{}.png"
WATCH_MS = 500
"""Interval at which the end of the server is checked for."""


def main() -> None:
    """Build or serve the site, and end with 1 if a page has a link that leads nowhere."""
    parser = argparse.ArgumentParser(prog="python -m scripts.site")
    parser.add_argument("--version", default="dev", help="name of the folder and in the list of versions")
    parser.add_argument(
        "--latest", action="store_true", help="the version that the address of the site shows"
    )
    parser.add_argument(
        "--serve", metavar="HOST:PORT", help="serve it, and build it again when a page changes"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "dist/site", help="folder of all versions")
    options = parser.parse_args()
    if not re.fullmatch(r"\w[\w.-]*", options.version):
        parser.error(f"the version {options.version!r} must have letters, digits, dots and dashes only")
    started = time.perf_counter()
    shutil.rmtree(WORK, ignore_errors=True)
    try:
        pages = prepare(options.version)
    except ValueError as error:
        sys.exit(str(error))
    if options.serve:
        serve(options.version, options.serve)
        return
    generator = [Path(sys.executable).with_name("zensical"), "build", "--clean", "--strict"]
    done = subprocess.run([*generator, "--config-file", WORK / "mkdocs.yml"], cwd=WORK, check=False)
    if done.returncode:
        sys.exit("The site was not built; see the links above.")
    target = options.output / options.version
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(WORK / "built", target)
    for name, page in pages.items():
        write(target / name, page.text)
    list_version(options.output, options.version, is_latest=options.latest)
    count = len(list(target.rglob("*.html")))
    print(f"{count} pages in {target}, in {time.perf_counter() - started:.1f} s.")


def prepare(version: str) -> dict[str, Page]:
    """Write what the generator reads, and return the pages.

    Raises: ValueError for a link that leads nowhere, or a page that the index leaves out.
    """
    repository = _address("POSTROOM_REPOSITORY_URL")
    pages = read_pages(repository)
    sections = read_sections(pages)
    site = _address("POSTROOM_SITE_URL")
    base = None if site is None else f"{site}/{version}/"
    stage(WORK / "docs", {name: page._replace(text=_with_facts(name, page)) for name, page in pages.items()})
    write_llms(WORK / "docs", sections, pages, base or "")
    write(WORK / "docs/style.css", (HERE / "theme/style.css").read_text())
    settings: dict[str, Any] = {
        "docs_dir": "docs",
        "site_dir": "built",
        "nav": navigation(sections, pages),
        **({} if base is None else {"site_url": base}),
    }
    text = (HERE / "settings.yml").read_text() + yaml.safe_dump(settings, sort_keys=False)
    text = text.replace("theme:\n", f"theme:\n  custom_dir: {json.dumps(str(HERE / 'theme'))}\n")
    if repository is not None:  # a link; as `repo_url`, every page would ask GitHub for its stars
        link = json.dumps([{"icon": "lucide/git-branch", "link": repository, "name": "Repository"}])
        text = text.replace("extra:\n", f"extra:\n  social: {link}\n")
    write(WORK / "mkdocs.yml", text)
    if base is not None:
        for name, page in pages.items():
            if _card(name) == CARD.format(name.removesuffix(".md")):
                draw_card(WORK / "docs" / _card(name), page.title, page.summary)
    return pages


def _address(variable: str) -> str | None:
    return os.environ.get(variable, "").rstrip("/") or None


def _with_facts(name: str, page: Page) -> str:
    """Return a page with what the theme says of it in its head."""
    facts = json.dumps({"description": page.summary, "card": _card(name)}, ensure_ascii=False)
    return f"---\n{facts}\n---\n\n{unescape_pipes(page.text)}"


def _card(name: str) -> str:
    """Return the path of a page's picture; decisions share one."""
    return CARD.format("adr/README" if name.startswith("adr/") else name.removesuffix(".md"))


def serve(version: str, address: str) -> None:
    """Serve the site until interrupted, and write the pages again when one changes."""
    generator = [Path(sys.executable).with_name("zensical"), "serve", "--dev-addr", address]
    with subprocess.Popen([*generator, "--config-file", WORK / "mkdocs.yml"], cwd=WORK) as server:
        try:
            for changes in watch(
                DOCS,
                *(ROOT / file for file in OUTSIDE.values()),
                yield_on_timeout=True,
                rust_timeout=WATCH_MS,
            ):
                if server.poll() is not None:
                    break
                if changes:
                    try:
                        prepare(version)
                    except ValueError as error:
                        print(error, file=sys.stderr)
        except KeyboardInterrupt:
            server.terminate()


if __name__ == "__main__":
    main()
