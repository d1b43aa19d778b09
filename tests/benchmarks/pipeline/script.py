"""The SQL of the benchmarks."""

from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "sql"


def script(name: str) -> str:
    """Return a file of `adapters/cli/bench/sql`."""
    return (_FOLDER / name).read_text("utf-8")
