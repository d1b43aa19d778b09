"""The generated reference: complete, and with units; that it is up to date is checked by `make check`."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import postroom
from postroom.adapters.cli.main import build
from postroom.adapters.cli.settings import SECTIONS
from postroom.domain.errors import PostroomError

REFERENCE = Path(__file__).parents[2] / "docs/reference"
API = {file: file.read_text("utf-8") for file in sorted((REFERENCE / "api").glob("*.md"))}
UNITS = re.compile(
    r"_(?:ms|us|seconds|bytes)$|\b(?:ms|µs|seconds?|bytes?|from [01]|0 for|number|numbers|how often|position|"
    r"positions|epoch|maximum|at most|\d+ to \d+|messages|deliveries|attempts?|records|connections|version|"
    r"largest|ratio|refusals|size|RFC 3339|of the log|limit|times|share|servers|of the form)\b"
)
"""What says in which unit a number is, or what it counts."""


def sections() -> dict[str, str]:
    """Return the section of each public name."""
    found: dict[str, str] = {}
    for file, text in API.items():
        if file.name != "index.md":
            for part in text.split("\n## ")[1:]:
                name, _, body = part.partition("\n")
                assert name not in found, f"{name} has two sections"
                found[name] = body
    return found


SECTIONS_BY_NAME = sections()


def rows(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, type and meaning of each argument or field in the tables of a section."""
    for line in text.splitlines():
        cells = re.split(r" (?<!\\)\| ", line.strip("| "))
        if line.startswith("| `") and len(cells) in (3, 4):
            yield cells[0].strip("`"), cells[1], cells[3] if len(cells) == 4 else ""


def test_every_public_name_has_one_section_and_is_in_the_index() -> None:
    assert {*SECTIONS_BY_NAME} == {*postroom.__all__}
    index = API[REFERENCE / "api/index.md"]
    assert [name for name in postroom.__all__ if f"[`{name}`](" not in index] == []


@pytest.mark.parametrize("name", postroom.__all__)
def test_a_name_has_a_sentence_an_example_and_all_arguments_with_meanings(name: str) -> None:
    section = SECTIONS_BY_NAME[name]
    value = getattr(postroom, name)
    assert re.search(r"^[A-Z`][^|]{20,}\.", section, re.MULTILINE)
    assert section.count("\nExample:\n\n```python\n") == 1
    if isinstance(value, type) and issubclass(value, PostroomError):
        assert f"../errors/{value.code}.md" in section
    documented = {argument for argument, _, _ in rows(section)}
    if inspect.isfunction(value):
        assert {*inspect.signature(value).parameters} <= documented
    fields = getattr(value, "__struct_fields__", getattr(value, "_fields", ()))
    assert {field for field in fields if not field.startswith("_")} <= documented
    assert [argument for argument, _, meaning in rows(section) if len(meaning) < 5] == []


def test_numbers_say_what_they_count_or_in_which_unit_they_are() -> None:
    silent = [
        f"{name}: {argument}: {meaning}"
        for name, section in SECTIONS_BY_NAME.items()
        for argument, type_, meaning in rows(section)
        if re.search(r"^`(?:Annotated\[)?(?:int|float)\b", type_)
        if not UNITS.search(argument) and not UNITS.search(meaning)
    ]
    assert silent == []


def test_every_command_has_a_section_with_its_options() -> None:
    page = (REFERENCE / "commands.md").read_text("utf-8")
    parts = dict(re.findall(r"^#{3,4} (postroom [^\n]+)\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL))
    root = build()
    context = root.make_context("postroom", [], resilient_parsing=True)
    seen = 0

    def visit(command: object, path: str) -> None:
        nonlocal seen
        seen += 1
        inner = command.make_context(path, [], parent=context, resilient_parsing=True)  # type: ignore[attr-defined]
        for parameter in command.params:  # type: ignore[attr-defined]
            if parameter.param_type_name == "option" and parameter.rich_help_panel is None:
                missing = [each for each in parameter.opts if f"`{each}`" not in parts[path]]
                assert not missing or parameter.hidden, (path, missing)
        for name in getattr(command, "list_commands", lambda _: ())(inner):
            visit(command.get_command(inner, name), f"{path} {name}")  # type: ignore[attr-defined]

    for name in root.list_commands(context):
        visit(root.get_command(context, name), f"postroom {name}")
    assert len(parts) == seen > 100


def test_every_section_of_the_settings_file_has_a_table_with_types_and_meanings() -> None:
    page = (REFERENCE / "settings.md").read_text("utf-8")
    parts = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    assert {*parts} == {"Top level", "policy", "topics", "limits", *SECTIONS}
    for section, text in parts.items():
        cells = [
            re.split(r" (?<!\\)\| ", line.strip("| ")) for line in text.splitlines() if line[:3] == "| `"
        ]
        assert cells or section == "topics", section
        assert [each[0] for each in cells if len(each) < 4 or not each[1] or len(each[3]) < 5] == [], section
