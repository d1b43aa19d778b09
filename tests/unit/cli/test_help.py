import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from postroom.adapters.cli.main import build
from postroom.adapters.cli.values import MEANINGS

BRACKETED = re.compile(r"\[[^\]]+\]")
RETIRED = re.compile(r"\b(reprocess|put (it|them) back|looking|promises?|knows|tells?|what is there)\b", re.I)


def commands(command: Any, *path: str) -> Iterator[tuple[str, ...]]:
    yield path
    context = typer.Context(command)
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        yield from commands(command.get_command(context, name), *path, name)


@cache
def find(path: tuple[str, ...]) -> Any:
    command: Any = build()
    for name in path:
        command = command.get_command(typer.Context(command), name)
    return command


EVERY_COMMAND = list(commands(build()))


def texts(path: tuple[str, ...]) -> list[str]:
    """Return the help texts of a command as their author wrote them, before they were escaped for Rich."""
    command = find(path)
    helps = [command.help, command.epilog, *(getattr(each, "help", None) for each in command.params)]
    return [(each or "").replace("\\[", "[") for each in helps]


@pytest.fixture
def show_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    def show(*path: str, columns: int = 2_000) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        build().main([*path, "--help"], prog_name="postroom", standalone_mode=False)
        return capsys.readouterr().out

    return show


def test_help_texts_have_brackets_to_check() -> None:
    assert sum(len(BRACKETED.findall(text)) for path in EVERY_COMMAND for text in texts(path)) > 50


@pytest.mark.parametrize("path", EVERY_COMMAND, ids=" ".join)
def test_help_has_every_bracketed_text_and_breaks_paragraphs_at_the_width_of_the_terminal_only(
    path: tuple[str, ...], show_help: Callable[..., str]
) -> None:
    bracketed = {bracket for text in texts(path) for bracket in BRACKETED.findall(text)}

    shown = show_help(*path)

    assert not [text for text in bracketed if text not in shown]
    before, _, _ = shown.partition("╭")
    described = [line.strip() for line in before.splitlines()]
    assert [line for line, after in pairwise(described) if line and after] == []


@pytest.mark.parametrize("path", EVERY_COMMAND, ids=" ".join)
def test_every_command_and_option_has_a_help_text(path: tuple[str, ...]) -> None:
    command = find(path)
    undescribed = [each.name for each in command.params if not getattr(each, "help", None)]

    assert (bool(command.help), undescribed) == (True, [])


@pytest.mark.parametrize("path", EVERY_COMMAND, ids=" ".join)
def test_help_uses_the_terms_of_the_field_and_names_settings_in_brackets(path: tuple[str, ...]) -> None:
    assert not [text for text in texts(path) if RETIRED.search(text)]
    assert not [text for text in texts(path) if re.search(r"\([a-z]+\.[a-z_]+\)", text)]


def test_there_are_bracketed_texts_to_look_for() -> None:
    every = [text for path in EVERY_COMMAND for text in texts(path)]

    assert any("[nats.url]" in text for text in every)
    assert any("[POSTROOM_STORE]" in text for text in every)


@pytest.mark.parametrize(
    "path", [path for path in EVERY_COMMAND if hasattr(find(path), "entries")], ids=" ".join
)
def test_a_group_lists_every_command_with_the_first_paragraph_of_its_help(
    path: tuple[str, ...], show_help: Callable[..., str]
) -> None:
    shown = show_help(*path)

    for name in find(path).entries:
        purpose = find((*path, name)).help.partition("\n\n")[0].replace("\\[", "[")
        assert re.search(rf"│ {name} +{re.escape(purpose)} +│", shown), name


def test_the_help_imports_no_module_of_a_command() -> None:
    script = """
import sys
from postroom.adapters.cli.main import main
try:
    main()
finally:
    print(sorted(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, "--help"], capture_output=True, text=True, timeout=60
    )

    assert "Exit codes" in done.stdout
    assert "postroom.adapters.cli.messages" not in done.stdout


def test_the_former_name_of_a_group_works_and_is_not_listed(show_help: Callable[..., str]) -> None:
    assert "views status" in show_help("project", "status")
    assert show_help("project") == show_help("views")
    assert "project" not in build().list_commands(typer.Context(build()))
    assert not re.search(r"│ project ", show_help(columns=200))


def test_the_help_ends_with_the_exit_codes(show_help: Callable[..., str]) -> None:
    shown = show_help()

    assert all(f"{code} {meaning}" in shown for code, meaning in MEANINGS.items())


def test_the_page_of_the_command_line_lists_the_exit_codes() -> None:
    page = Path(__file__).parents[3].joinpath("docs", "command-line.md").read_text("utf-8")

    assert re.findall(r"^\| (\d+) \| (.+) \|$", page, re.MULTILINE) == [
        (str(code), meaning) for code, meaning in MEANINGS.items()
    ]


def test_flags_are_shown_without_a_value(show_help: Callable[..., str]) -> None:
    assert "<bool>" not in show_help("recv")
