"""The reference of the command line, from the tree of commands."""

import re
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from postroom.adapters.cli.command import LONG_RUNNING, PANEL
from postroom.adapters.cli.main import COMMANDS, build
from postroom.adapters.cli.values import MEANINGS
from scripts.reference.tables import code, table

HEAD = """# Commands

Every command of `postroom` with its arguments, options and defaults. What commands share, such as output
and exit codes, is described in [the command line](../command-line.md), and the settings in [their
reference](settings.md).

Written by `make operations` from the commands themselves, which print the same with `--help`.

## Options of every command

They may be passed before or after the command. A variable in brackets sets the option, too.

"""
COLUMNS = ("option", "value", "default", "meaning")


def make_commands_page() -> str:
    """Return the page."""
    root = build()
    context = root.make_context("postroom", [], resilient_parsing=True)
    shared = [each for each in root.params if each.rich_help_panel == PANEL]
    own = [each for each in root.params if each not in shared and not each.hidden]
    parts = [
        HEAD,
        table(COLUMNS, map(_row, shared)),
        "\nOf `postroom` itself:\n\n",
        table(COLUMNS, map(_row, own)),
    ]
    parts += [
        "\nExit codes:\n\n",
        table(("code", "meaning"), ((str(n), text) for n, text in MEANINGS.items())),
    ]
    panel: str | None = ""
    for name, entry in sorted(COMMANDS.items(), key=lambda each: _PANELS.index(each[1].panel)):
        if entry.panel != panel:
            panel = entry.panel
            parts.append(f"\n## {panel or 'First steps'}\n")
        parts += _sections(root.get_command(context, name), f"postroom {name}", context)
    return "".join(parts)


_PANELS = list(dict.fromkeys(entry.panel for entry in COMMANDS.values()))


def _sections(command: Any, path: str, parent: Any) -> Iterator[str]:
    """Yield the section of a command, and of those below it."""
    context = command.make_context(path, [], parent=parent, resilient_parsing=True)
    names = command.list_commands(context) if hasattr(command, "list_commands") else []
    own = [each for each in command.params if each.rich_help_panel != PANEL and not each.hidden]
    arguments = [each for each in own if each.param_type_name == "argument"]
    options = [each for each in own if each.param_type_name == "option"]
    usage = [
        path,
        *map(_usage, arguments),
        *(["[OPTIONS]"] if options else []),
        *(["COMMAND"] if names else []),
    ]
    level = "#" * min(2 + path.count(" "), 4)
    yield f"\n{level} {path}\n\n```text\n{' '.join(usage)}\n```\n\n{_text(command.help)}\n"
    if path.removeprefix("postroom ") in LONG_RUNNING:
        yield "\nIt runs until it is interrupted.\n"
    if arguments:
        yield "\n" + table(("argument", "value", "default", "meaning"), map(_row, arguments))
    if options:
        yield "\n" + table(COLUMNS, map(_row, options))
    for name in names:
        yield from _sections(command.get_command(context, name), f"{path} {name}", context)


def _usage(argument: Any) -> str:
    name = _name(argument) + ("..." if argument.nargs != 1 else "")
    return name if argument.required else f"[{name}]"


def _name(argument: Any) -> str:
    return str(argument.metavar or argument.name.rstrip("_").upper()).strip("[].")


def _row(parameter: Any) -> tuple[str, str, str, str]:
    """Return the cells of an argument or option."""
    is_argument = parameter.param_type_name == "argument"
    names = [_name(parameter)] if is_argument else [*parameter.opts, *parameter.secondary_opts]
    default = parameter.default
    if default in (None, False, "", ()) or callable(default):
        default = ""
    shown = ", ".join(map(str, default)) if isinstance(default, tuple | list) else default
    return (
        ", ".join(map(code, names)),
        _value(parameter),
        "required" if parameter.required else code(shown),
        _text(parameter.help),
    )


def _value(parameter: Any) -> str:
    """Return the kind of value, with its bounds; nothing for a flag."""
    if getattr(parameter, "is_flag", False):
        return ""
    kind = parameter.type_descriptor.annotation
    while get_origin(kind) in (list, tuple):
        kind = get_args(kind)[0]
    words = {int: "whole number", float: "number", str: "text", bool: "`true` or `false`"}
    text = words.get(kind, "")
    if get_args(kind):
        text = ", ".join(map(code, get_args(kind)))
    if parameter.metavar and parameter.param_type_name == "option":
        text = code(parameter.metavar)
    if parameter.min is not None or parameter.max is not None:
        text += f", {_bounds(parameter.min, parameter.max)}"
    return text + (", repeatable" if getattr(parameter, "multiple", False) else "")


def _bounds(low: float | None, high: float | None) -> str:
    if low is None:
        return f"at most {high:,}"
    return f"at least {low:,}" if high is None else f"{low:,} to {high:,}"


def _text(text: str | None) -> str:
    """Return the text of a help, in which brackets are escaped for Rich."""
    parts = (text or "").replace("\\[", "[").split("`")
    return "`".join(part if n % 2 else re.sub(r"([*_<])", r"\\\1", part) for n, part in enumerate(parts))
