"""Wrapper of every command: shared options, settings, one-line errors and exit codes."""

import asyncio
import copy
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any

import typer

from postroom.adapters.cli.exit_codes import BROKEN_PIPE, INTERRUPTED, REFUSED, describe, exit_code
from postroom.adapters.cli.output import Output
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import InvalidSettings, Settings, load_settings
from postroom.application.extras import explain_missing_extra
from postroom.domain.errors import InvalidRequest, PostroomError

LONG_RUNNING = (
    "serve",
    "admin",
    "runner",
    "work",
    "schedule",
    "ingest",
    "outbox relay",
    "inbox consume",
    "project follow",
)
"""Commands that export their spans; others end before it would be worth the import."""
_CONFIGURED = (*LONG_RUNNING, "console", "proxy")
"""Commands that refuse nothing but their settings and options."""
PANEL = "Options of every command"
Flags = dict[str, Any]
"""The shared options by name; None or False if omitted."""


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
        str | None, "--mailbox", metavar="NAME@PROXY", help="Mailbox to use. [POSTROOM_MAILBOX]"
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
        help="Log on stderr: debug, info, warning (default) or error.",
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


def as_command(function: Callable[..., Any]) -> Callable[..., None]:
    """Return a callable for Typer that runs `function` with a session and exits with its code.

    Arguments:
        function: takes a `Session` and then its own parameters; may be async. Returns an exit code or None.
    """

    def run(ctx: typer.Context, **arguments: Any) -> None:
        ctx.obj = flags = _merge(ctx.obj or {}, {each.name: arguments.pop(each.name) for each in shared})
        if ctx.invoked_subcommand is None:
            command = ctx.command_path.partition(" ")[2]
            raise typer.Exit(_report_errors(flags, lambda: _run(command, flags, function, arguments)))

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


def _run(command: str, flags: Flags, function: Callable[..., Any], arguments: dict[str, Any]) -> int:
    def load(file: str | None = None) -> Settings:
        return load_settings(flags, os.environ, file or flags["config"])

    def check(changed: Settings) -> None:
        from postroom.adapters.cli.config import all_settings

        for _ in all_settings(session.with_settings(changed)):
            pass

    settings = load()
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
    from postroom.adapters.compose.tracing import TracingSettings, export_traces

    endpoint = settings.section("tracing", TracingSettings).otlp_endpoint
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise InvalidSettings(
            f"[tracing]: otlp_endpoint is {endpoint!r}; expected the URL of a collector, http://HOST:PORT."
        )
    return export_traces(endpoint)


def _describe_os_error(error: OSError | UnicodeEncodeError) -> str:
    """Return one sentence with the file and the reason."""
    if isinstance(error, UnicodeEncodeError):
        return f"The argument {error.object!r} is not valid UTF-8."
    if error.filename is None:
        return f"The operating system reports: {error}."
    return f"{error.filename}: {error.strerror}."


def _report_errors(flags: Flags, run: Callable[[], int]) -> int:
    """Run a command and return its exit code; write an error as one line instead of a traceback."""
    out = Output(flags["as_json"])
    try:
        with explain_missing_extra():
            return run()
    except PostroomError as error:
        if flags["debug"]:
            traceback.print_exc()
        out.error(describe(error))
        return exit_code(error)
    except KeyboardInterrupt:
        out.error({"code": "E_INTERRUPTED", "message": "Interrupted."})
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout is gone; otherwise Python reports a second BrokenPipeError at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except typer.BadParameter:
        raise
    except (OSError, UnicodeEncodeError) as error:
        if flags["debug"]:
            traceback.print_exc()
        out.error({"code": "E_IO", "message": _describe_os_error(error)})
        return REFUSED
    except Exception as error:
        from postroom.application.telemetry import summarize

        if flags["debug"]:
            traceback.print_exc()
        hint = "" if flags["debug"] else " Run it again with --debug and report the traceback."
        out.error({"code": "E_DEFECT", "message": f"This is a defect of Postroom: {summarize(error)}.{hint}"})
        return REFUSED
