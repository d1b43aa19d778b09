"""The SQL of the benchmarks."""

import re
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "sql"


def script(name: str) -> str:
    """Return a file of `adapters/cli/bench/sql`."""
    return (_FOLDER / name).read_text("utf-8")


def statements(name: str) -> list[str]:
    """Return the statements of a file without its comments."""
    text = re.sub(r"--.*", "", script(name))
    return [statement.strip() for statement in text.split(";") if statement.strip()]
