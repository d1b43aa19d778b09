"""What makes a function a command: options that all share, settings, errors as one line, an exit code."""

import asyncio
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer

from postroom.adapters.cli.failures import BROKEN_PIPE, INTERRUPTED, REFUSED, describe, exit_code
from postroom.adapters.cli.output import Output
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import load_settings
from postroom.domain.errors import PostroomError

PANEL = "Options of every command"
Flags = dict[str, Any]
"""What the shared options say, by name; None or False where they say nothing."""


def _shared(type_: Any, *names: str, **options: Any) -> Any:
    return Annotated[type_, typer.Option(*names, rich_help_panel=PANEL, **options)]


_OPTIONS = {
    "store": _shared(
        str | None,
        "--store",
        metavar="PATH",
        help="SQLite file, or postgresql://... URL; default postroom.db. [POSTROOM_STORE]",
    ),
    "mailbox": _shared(
        str | None, "--mailbox", metavar="NAME@PROXY", help="Mailbox to use. [POSTROOM_MAILBOX]"
    ),
    "as_json": _shared(bool, "--json", help="Answer in JSON, and report errors in JSON."),
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


def add_command(app: typer.Typer, name: str, function: Callable[..., Any], **options: Any) -> None:
    """Add a command to `app`.

    Arguments:
        function: takes a `Session` and then its own parameters; may be async. Returns an exit code or None.
        options: as `typer.Typer.command` takes them.
    """

    def run(ctx: typer.Context, **given: Any) -> None:
        flags = merge_flags(ctx.obj or {}, {each.name: given.pop(each.name) for each in shared})
        command = ctx.command_path.partition(" ")[2]
        raise typer.Exit(_guarded(flags, lambda: _run(command, flags, function, given)))

    own = list(inspect.signature(function).parameters.values())[1:]
    # A shared option whose name a command takes for itself can be given before the command.
    shared = [parameter for parameter in _PARAMETERS if parameter.name not in {each.name for each in own}]
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    _sign(run, [context, *own, *shared])
    run.__doc__ = function.__doc__
    app.command(name, **options)(run)


def add_shared_options(app: typer.Typer, function: Callable[..., None]) -> None:
    """Let `app` take the shared options before its command too.

    Arguments:
        function: is called with the context and any options of its own.
    """

    def run(ctx: typer.Context, **given: Any) -> None:
        ctx.obj = {name: given.pop(name) for name in _OPTIONS}
        function(ctx, **given)

    own = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for p in inspect.signature(function).parameters.values()
    ]
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    _sign(run, [context, *own[1:], *_PARAMETERS])
    run.__doc__ = function.__doc__
    app.callback(invoke_without_command=True)(run)


def merge_flags(outer: Flags, inner: Flags) -> Flags:
    """Return the shared options given before and after the command; those after it win."""
    return {name: inner.get(name) or outer.get(name) for name in _OPTIONS}


def _sign(function: Any, parameters: list[inspect.Parameter]) -> None:
    function.__signature__ = inspect.Signature(parameters)
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def _run(command: str, flags: Flags, function: Callable[..., Any], given: dict[str, Any]) -> int:
    settings = load_settings(flags, os.environ, flags["config"])
    from postroom.adapters.cli.logs import configure_logs

    configure_logs(settings.log_level)
    session = Session(command, settings, Output(flags["as_json"]))
    answer = function(session, **given)
    code = asyncio.run(answer) if inspect.iscoroutine(answer) else answer
    session.out.flush()
    return code or 0


def _guarded(flags: Flags, run: Callable[[], int]) -> int:
    out = Output(flags["as_json"])
    try:
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
        # Whoever read our output has left; without this Python complains once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except typer.BadParameter:
        raise
    except Exception as error:
        if flags["debug"]:
            traceback.print_exc()
        hint = "" if flags["debug"] else " Run it again with --debug and report what it shows."
        out.error({"code": "E_DEFECT", "message": f"This is a defect of Postroom: {error!r}.{hint}"})
        return REFUSED
