"""Parts of pages in Markdown."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; a pipe or line break in a cell is escaped."""
    lines = [columns, ["---"] * len(columns), *([_cell(each) for each in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("\\|", "|").replace("|", "\\|")


def code(text: object) -> str:
    """Return text as code, whatever backticks it has; nothing for empty text."""
    text = str(text)
    if "`" in text:
        return f"`` {text} ``"
    return f"`{text}`" if text else ""


ADRS = Path(__file__).parents[2] / "docs/adr"


def link_adrs(text: str, folder: str) -> str:
    """Return text in which mentions such as `ADR 0115` are links.

    Arguments:
        folder: path of the records, relative to the page.
    """

    def link(mention: re.Match[str]) -> str:
        file = next(ADRS.glob(f"{mention[1]}-*.md"))
        return f"[{mention[0]}]({folder}/{file.name})"

    return re.sub(r"ADR (\d{4})", link, text)
