"""Lazy tree of commands: the module of a command is imported when the command is looked up."""

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import typer
from typer.core import TyperGroup

from postroom.adapters.cli.command import as_command, escape

PACKAGE = "postroom.adapters.cli"


class Command(NamedTuple):
    """A command.

    Arguments:
        target: its function, as `module:function` within this package.
        panel: heading in `--help` under which it is listed.
    """

    target: str
    panel: str | None = None


class Group(NamedTuple):
    """A group of commands.

    Arguments:
        help: its help text; None for the docstring of `target`.
        target: function that runs if no command of the group follows; None shows the help.
        default: command of the group that arguments are for if they do not begin with the name of one.
    """

    help: str | None
    entries: Mapping[str, "Command | Group"]
    panel: str | None = None
    target: str | None = None
    default: str | None = None


Entries = Mapping[str, Command | Group]


class _LazyGroup(TyperGroup):
    entries: ClassVar[Entries] = {}
    default: ClassVar[str | None] = None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if self.default is not None and args and args[0] not in (*self.entries, "--help"):
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.entries)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.entries and cmd_name not in self.commands:
            self.commands[cmd_name] = _build(cmd_name, self.entries[cmd_name])
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.entries and not ctx.resilient_parsing:
            close = get_close_matches(args[0], self.entries, 1)
            ctx.fail(f"Unknown command {args[0]!r}{f'; did you mean {close[0]}?' if close else '.'}")
        return super().resolve_command(ctx, args)


def build_root(callback: Any, entries: Entries, epilog: str) -> Any:
    """Return the click command of the whole command line.

    Arguments:
        callback: runs before every command, see `as_root`.
        epilog: shown at the end of the help.
    """
    app = _typer(entries, add_completion=True)
    app.callback(invoke_without_command=True, epilog=escape(epilog))(callback)
    return _click_command(app)


def _build(name: str, entry: Command | Group) -> Any:
    if isinstance(entry, Command):
        app = _typer()
        app.command(name, rich_help_panel=entry.panel)(as_command(_load(entry.target)))
    else:
        app = _typer(entry.entries, entry.default)
        callback = as_command(_load(entry.target)) if entry.target else lambda: None
        app.callback(
            help=escape(entry.help) or callback.__doc__,
            invoke_without_command=entry.target is not None,
            no_args_is_help=entry.target is None,
            rich_help_panel=entry.panel,
        )(callback)
    command = _click_command(app)
    command.name = name
    return command


def _click_command(app: typer.Typer) -> Any:
    command: Any = typer.main.get_command(app)
    get_help_option = command.get_help_option
    command.get_help_option = lambda ctx: _adapt(get_help_option(ctx))
    for parameter in command.params:
        _adapt(parameter)
    return command


def _adapt(parameter: Any) -> Any:
    if getattr(parameter, "is_flag", False):
        # Newer versions of Typer show the type <bool> beside a flag, as if it took a value.
        parameter.display_type_rich = lambda ctx: None
    return _skip_pydantic(parameter)


def _skip_pydantic(parameter: Any) -> Any:
    """Patch a parameter to return text and defaults without conversion, and return it.

    Typer 0.25 and newer convert every value with pydantic, whose import takes a quarter of a command's start.
    """
    if not hasattr(parameter, "type_descriptor"):
        return parameter  # an older Typer, which does not use pydantic
    convert = parameter.process_value

    def process_value(ctx: Any, value: Any) -> Any:
        is_text = type(value) is str and parameter.type_descriptor.annotation is str
        is_default = value is parameter.default and not parameter.required
        return value if is_text or is_default else convert(ctx, value)

    parameter.process_value = process_value
    return parameter


def _typer(
    entries: Entries | None = None, default: str | None = None, *, add_completion: bool = False
) -> typer.Typer:
    group = type("Group", (_LazyGroup,), {"entries": entries or {}, "default": default})
    return typer.Typer(
        cls=group,
        add_completion=add_completion,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )


def _load(target: str) -> Any:
    module, _, function = target.partition(":")
    return getattr(import_module(f"{PACKAGE}.{module}"), function)
