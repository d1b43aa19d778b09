"""Files of the product stay short enough to be read at once."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES = 400
EXCUSED = {
    "application/operations/mailbox.py",  # the table of operations, one after the other
    "application/operations/sync_operations.py",  # generated from the table
}


def long_files() -> set[str]:
    """Return the files of the product that have more than `LINES` lines."""
    layers = ("adapters", "application", "domain", "projections", "postroom/django")
    paths = [path for layer in layers for path in (ROOT / layer).rglob("*.py")]
    return {
        str(path.relative_to(ROOT)) for path in paths if len(path.read_text("utf-8").splitlines()) > LINES
    }


def test_files_of_the_product_have_up_to_400_lines() -> None:
    """One that is longer has two subjects, or repeats itself."""
    assert long_files() - EXCUSED == set()


def test_only_long_files_are_excused() -> None:
    assert long_files() >= EXCUSED
