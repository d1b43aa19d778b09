"""Tree of commands, imported on first use, and their wrapper: shared options, errors and exit codes."""

import asyncio
import copy
import inspect
import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from difflib import get_close_matches
from importlib import import_module
from pkgutil import get_data
from typing import Annotated, Any, ClassVar, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from postroom.adapters.cli.output import Output
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import InvalidSettings, Settings, load_settings
from postroom.adapters.cli.values import Flags, report_errors
from postroom.domain.errors import InvalidRequest

LONG_RUNNING = (
    "own",
    "serve",
    "admin",
    "runner",
    "work",
    "schedule",
    "ingest",
    "outbox relay",
    "inbox consume",
    "views follow",
)
"""Commands that export their spans; others end before it would be worth the import."""
_WITHOUT_SETTINGS = ("explain",)
"""Commands that also work with an invalid settings file, as users run them to find its error."""
_CONFIGURED = (*LONG_RUNNING, "console", "mcp", "proxy")
"""Commands that refuse nothing but their settings and options."""
ALIASES = {"project": "views"}
"""Former names of groups, which go on working and are not listed."""
PANEL = "Options of every command"


def _shared(type_: Any, *names: str, **options: Any) -> Any:
    return Annotated[type_, typer.Option(*names, rich_help_panel=PANEL, **options)]


_OPTIONS = {
    "store": _shared(
        str | None,
        "--store",
        metavar="PATH",
        help="SQLite file, postgresql:// URL or URL of a server; default postroom.db. [POSTROOM_STORE]",
    ),
    "token_file": _shared(
        str | None,
        "--token-file",
        metavar="FILE",
        help="Token for a store that is the URL of a server; - for stdin. [POSTROOM_TOKEN]",
    ),
    "mailbox": _shared(
        str | None,
        "--mailbox",
        metavar="NAME@PROXY",
        help="Mailbox to use, or the NAME of a namespace in the store. [POSTROOM_MAILBOX]",
    ),
    "as_json": _shared(bool, "--json", help="Write results and errors as JSON."),
    "wide": _shared(bool, "--wide", help="Show tables with all columns and full values."),
    "config": _shared(str | None, "--config", metavar="FILE", help="Settings file; default ./postroom.toml."),
    "durability": _shared(
        str | None,
        "--durability",
        metavar="full|relaxed",
        help="Survive power cuts, or only process crashes.",
    ),
    "log_level": _shared(
        str | None,
        "--log-level",
        metavar="LEVEL",
        help="Log on stderr: debug, info, warning (default) or error; also NAME=LEVEL of a logger.",
    ),
    "log_format": _shared(
        str | None,
        "--log-format",
        metavar="json|console|auto",
        help="Form of the log; auto is console on a terminal, else json.",
    ),
    "accept_clock": _shared(
        bool, "--accept-clock", help="Accept a system clock that is far ahead of the last log record."
    ),
    "debug": _shared(bool, "--debug", help="Show the traceback of an error."),
}
_PARAMETERS = [
    inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=False if hint.__origin__ is bool else None,
        annotation=hint,
    )
    for name, hint in _OPTIONS.items()
]


def no_flags() -> Flags:
    """Return the shared options with none of them set."""
    return {each.name: each.default for each in _PARAMETERS}


def as_command(function: Callable[..., Any]) -> Callable[..., None]:
    """Return a callable for Typer that runs `function` with a session and exits with its code.

    Arguments:
        function: takes a `Session` and then its own parameters; may be async. Returns an exit code or None.
    """

    def run(ctx: typer.Context, **arguments: Any) -> None:
        ctx.obj = flags = _merge(ctx.obj or {}, {each.name: arguments.pop(each.name) for each in shared})
        if ctx.invoked_subcommand is None:
            command = ctx.command_path.partition(" ")[2]
            raise typer.Exit(report_errors(flags, lambda: run_command(command, flags, function, arguments)))

    own = list(inspect.signature(function).parameters.values())[1:]
    # A shared option that the command redefines, such as --config of ingest, goes before the command.
    shared = [parameter for parameter in _PARAMETERS if parameter.name not in {each.name for each in own}]
    _set_signature(run, function, [*own, *shared])
    return run


def as_root(function: Callable[..., None]) -> Callable[..., None]:
    """Return a callable for Typer that parses the shared options before a command.

    Arguments:
        function: called with the context and its own options.
    """

    def run(ctx: typer.Context, **arguments: Any) -> None:
        ctx.obj = {name: arguments.pop(name) for name in _OPTIONS}
        function(ctx, **arguments)

    _set_signature(run, function, [*list(inspect.signature(function).parameters.values())[1:], *_PARAMETERS])
    return run


def escape(text: str | None) -> str | None:
    """Return help text with its brackets escaped: Rich reads `[nats.url]` as markup and drops it."""
    return text and text.replace("[", "\\[")


def _set_signature(run: Any, function: Callable[..., Any], parameters: list[inspect.Parameter]) -> None:
    """Set the signature and help text that Typer reads."""
    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [context, *map(_escape_help, parameters)]
    run.__signature__ = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = escape(_join_lines(function.__doc__ or ""))


def _join_lines(docstring: str) -> str:
    """Return a docstring with each paragraph on one line, which Typer wraps at the width of the terminal."""
    return "\n\n".join(" ".join(each.split()) for each in inspect.cleandoc(docstring).split("\n\n"))


def _escape_help(parameter: inspect.Parameter) -> inspect.Parameter:
    hint, option = parameter.annotation.__origin__, copy.copy(parameter.annotation.__metadata__[0])
    option.help = escape(option.help)
    return parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[hint, option])


def _merge(outer: Flags, inner: Flags) -> Flags:
    """Merge the shared options before and after the command; those after it take precedence."""
    return {name: outer.get(name) if inner.get(name) in (None, False) else inner[name] for name in _OPTIONS}


def run_command(
    command: str, flags: Flags, function: Callable[..., Any], arguments: Mapping[str, Any]
) -> int:
    """Call the function of a command with a session, and return its exit code.

    Arguments:
        command: its name, for display.
        flags: see `no_flags`.
        function: see `as_command`.

    Raises: PostroomError.
    """

    def load(file: str | None = None) -> Settings:
        return load_settings(flags, os.environ, file or flags["config"])

    def check(changed: Settings) -> None:
        from postroom.adapters.cli.config import all_settings

        for _ in all_settings(session.with_settings(changed)):
            pass

    settings = Settings() if command in _WITHOUT_SETTINGS else load()
    from postroom.adapters.cli.logs import configure_logs

    configure_logs(settings.log_level, settings.log_format)
    output = Output(flags["as_json"], wide=flags["wide"])
    session = Session(command, settings, output, accept_clock=flags["accept_clock"], load=load, check=check)
    try:
        with _tracing(command, settings):
            answer = function(session, **arguments)
            code = asyncio.run(answer) if inspect.iscoroutine(answer) else answer
    except InvalidRequest as error:
        if command in _CONFIGURED and type(error) is InvalidRequest:
            raise InvalidSettings(str(error)) from error
        raise
    session.out.flush()
    return code or 0


def _tracing(command: str, settings: Settings) -> AbstractContextManager[None]:
    if command not in LONG_RUNNING:
        return nullcontext()
    from postroom.adapters.compose.process import TracingSettings, export_traces

    endpoint = settings.section("tracing", TracingSettings).otlp_endpoint
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise InvalidSettings(
            f"[tracing]: otlp_endpoint is {endpoint!r}; expected the URL of a collector, http://HOST:PORT."
        )
    return export_traces(endpoint)


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
        default: command of the group that runs if the arguments do not begin with a command's name.
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

    def format_help(self, ctx: Any, formatter: Any) -> None:
        commands = self.commands
        self.commands = {name: _summarize(name, entry) for name, entry in self.entries.items()}
        try:
            super().format_help(ctx, formatter)
        finally:
            self.commands = commands

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and ALIASES.get(args[0]) in self.entries:
            args = [ALIASES[args[0]], *args[1:]]
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


def _summarize(name: str, entry: Command | Group) -> Any:
    """Return a command with only a help text, read from its source: importing all modules takes a second."""
    text = entry.help if isinstance(entry, Group) else None
    if text is None and entry.target is not None:
        module, _, function = entry.target.partition(":")
        source = (get_data(PACKAGE, f"{module}.py") or b"").decode()
        pattern = rf'^(?:async )?def {function}\(.*?-> [^\n]+:\n    """(.+?)"""'
        docstring = re.search(pattern, source, re.DOTALL | re.MULTILINE)
        text = _join_lines(docstring[1]) if docstring else None
    return TyperCommand(name, help=escape(text), rich_help_panel=entry.panel)


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
