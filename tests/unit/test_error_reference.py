"""The entries of error codes: one for each code, with texts that Postroom writes."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from postroom.application.error_reference import error_entries, find_error_entry, write_error_entry
from postroom.domain.errors import NotFound
from tests.unit.test_documentation_links import is_broken

ROOT = Path(__file__).parents[2]
LAYERS = ("domain", "application", "projections", "adapters")


@cache
def trees() -> tuple[ast.Module, ...]:
    """Return the product's code."""
    files = (file for layer in LAYERS for file in sorted((ROOT / layer).rglob("*.py")))
    return tuple(ast.parse(file.read_text("utf-8")) for file in files if not file.name.endswith("_pb2.py"))


def codes() -> Iterator[str]:
    """Yield the codes that the code assigns or passes."""
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and re.fullmatch(r"E_[A-Z_]+", str(node.value)):
                yield str(node.value)
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "code":
                assigned = re.fullmatch(r"'([A-Z_]+)'", ast.unparse(node.value))
                yield from [] if assigned is None else assigned.groups()


@cache
def texts() -> tuple[tuple[str, ...], ...]:
    """Return the texts that the code makes: their literal parts, and empty ones for values."""
    found = []
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else None for part in node.values)
                found.append(tuple("" if part is None else str(part) for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append((node.value,))
    return tuple(found)


def is_written(example: str) -> bool:
    """Return whether the code makes a text, at least a fifth of which is literal."""
    for parts in texts():
        literal = [part for part in parts if part]
        if sum(map(len, literal)) * 5 >= len(example) and all(part in example for part in literal):
            pattern = "".join(re.escape(part) if part else ".*" for part in parts)
            if re.fullmatch(pattern, example, re.DOTALL):
                return True
    return False


def test_each_code_has_an_entry_and_each_entry_a_code() -> None:
    assert {*error_entries()} == {*codes()}


@pytest.mark.parametrize("code", error_entries())
def test_the_example_is_a_text_that_the_code_writes(code: str) -> None:
    example = error_entries()[code].example
    assert is_written(example), example


def test_a_text_that_the_code_does_not_write_is_detected() -> None:
    assert not is_written("Nobody has ever read this sentence on a terminal.")


@pytest.mark.parametrize("code", error_entries())
def test_an_entry_is_made_of_sentences_and_leads_to_pages(code: str) -> None:
    entry = error_entries()[code]
    for text in (entry.cause, entry.remedy):
        assert re.fullmatch(r"[A-Z`].*\.", text), text
        assert "  " not in text
    assert not entry.title.endswith(".")
    assert entry.see
    assert [page for page in entry.see if is_broken(ROOT / "docs/index.md", page)] == []


def test_a_code_is_found_in_any_spelling_and_an_unknown_one_names_the_closest() -> None:
    for spelling in ("E_STORE", "e_store", "store", "Store"):
        assert find_error_entry(spelling)[0] == "E_STORE"
    assert find_error_entry("future_event")[0] == "FUTURE_EVENT"
    with pytest.raises(NotFound, match=r"There is no error code E_STOR; did you mean E_STORE"):
        find_error_entry("E_STOR")
    with pytest.raises(NotFound, match="no error code"):
        find_error_entry("x" * 10_000)


def test_an_entry_as_text_has_its_code_cause_example_and_remedy() -> None:
    text = write_error_entry(*find_error_entry("E_STORE"))
    assert [part.partition(":")[0] for part in text.split("\n\n")] == [
        "E_STORE",
        "Cause",
        "Example",
        "Remedy",
    ]
