"""`from postroom import ...`: complete, lazy and typed, from the checkout and from the wheel."""

import ast
import re
import sys
from importlib import import_module
from pathlib import Path

import mypy.api
import pytest

import postroom
from tests.packaging.conftest import ROOT, run

CONSUMER = """
from postroom import NewMessage, Sent, open_mailbox


async def main() -> Sent:
    async with open_mailbox("orders.db", "acme@one") as mailbox:
        return await mailbox.send_message(NewMessage(topic="orders", payload=b"{}"))
"""
MISTAKEN = "from postroom import NewMessage, open_mailbx\nNewMessage(topic=1)\n"


@pytest.mark.parametrize("name", postroom.__all__)
def test_every_public_name_is_the_one_that_its_module_defines(name: str) -> None:
    module = import_module(f"postroom.{postroom._MODULES[name]}")
    assert getattr(postroom, name) is getattr(module, name)


def test_type_checkers_and_the_interpreter_see_the_same_names() -> None:
    tree = ast.parse((ROOT / "postroom" / "__init__.py").read_text("utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and not node.orelse and node.body[1:])
    imported = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == {name: f"postroom.{module}" for name, module in postroom._MODULES.items()}
    assert sorted(imported) == sorted(postroom.__all__)
    assert sorted(imported) == sorted(dir(postroom))


def test_a_name_that_does_not_exist_is_reported_as_in_any_module() -> None:
    with pytest.raises(AttributeError, match="module 'postroom' has no attribute 'open_mailbx'"):
        getattr(postroom, "open_mailbx")  # noqa: B009  mypy knows that there is none


def test_importing_postroom_loads_no_module_of_its_own_and_no_dependency() -> None:
    code = (
        "import importlib, sys, typing; before = set(sys.modules); import postroom; "
        "print(*set(sys.modules) - before)"
    )
    assert run(sys.executable, "-c", code).split() == ["postroom"]


def test_users_of_the_readme_and_the_docs_import_from_postroom_alone() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs" / "examples").rglob("*.py")]
    pages.append(ROOT / "tests" / "typing" / "api.py")
    private = {
        str(page.relative_to(ROOT)): lines
        for page in pages
        if "adr" not in page.parts
        and (
            lines := re.findall(
                r"^\s*(?:from|import) postroom\.(?!(?:spark|testing)\b).*", page.read_text("utf-8"), re.M
            )
        )
    }
    assert private == {}


@pytest.mark.extended
def test_strict_type_checks_pass_for_a_consumer_of_the_wheel_and_find_its_mistakes(
    consumer: Path, tmp_path: Path
) -> None:  # `make check` does so for the checkout, with tests/typing/api.py
    (tmp_path / "service.py").write_text(CONSUMER)
    (tmp_path / "mistaken.py").write_text(MISTAKEN)
    options = ["--strict", "--python-executable", str(consumer / ".venv/bin/python")]
    options += ["--cache-dir", str(tmp_path / "cache")]
    report, errors, _ = mypy.api.run([*options, *map(str, tmp_path.glob("*.py"))])
    assert errors == ""
    assert "service.py" not in report
    assert 'Module "postroom" has no attribute "open_mailbx"' in report
    assert 'Argument "topic" to "NewMessage" has incompatible type "int"' in report
    assert report.endswith("(checked 2 source files)\n")
