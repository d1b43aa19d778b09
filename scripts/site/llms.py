"""llms.txt, an index of the pages with a line each, and llms-full.txt, all pages in one."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.site.stage import Page, Section, summaries, write

HEAD = """# Postroom

> Event-sourced mailboxes for Python: queues, workers, schedules, outbox and inbox over SQLite or PostgreSQL,
> with a log that is searched and verified, and read models built by polars or Spark.

All pages in one file: {base}llms-full.txt
"""


def write_llms(folder: Path, sections: Sequence[Section], pages: Mapping[str, Page], base: str) -> None:
    """Write both files.

    Arguments:
        base: address of the site with a slash at its end; empty for relative links.
    """
    index, texts = [HEAD.format(base=base)], [pages["index.md"].text]
    for title, listed in summaries(list(sections), pages):
        index.append(
            f"\n## {title}\n\n"
            + "".join(f"- [{name}]({base}{path}): {text}\n" for name, path, text in listed)
        )
        texts += [f"<!-- {path} -->\n\n{pages[path].text}" for _, path, _ in listed]
    write(folder / "llms.txt", "".join(index))
    write(folder / "llms-full.txt", "\n\n".join(texts))
