"""The console script `postroom`."""

import sys
from typing import Annotated, Any

import typer

from postroom.adapters.cli import (
    activity,
    archive,
    benchmark,
    contexts,
    demo,
    export,
    follow,
    importer,
    inbox,
    ingest,
    messages,
    migrate,
    operate,
    outbox,
    queues,
    search,
    simulate,
    streams,
)
from postroom.adapters.cli import project as project_commands
from postroom.adapters.cli.command import add_command, add_shared_options
from postroom.adapters.cli.failures import EXIT_CODES, INTERRUPTED, REFUSED, USAGE
from postroom.adapters.cli.output import Output

# Typer carries its own copy of click, in which the class of all usage errors has no public name.
UsageError: Any = typer.BadParameter.__bases__[0]

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich", epilog=EXIT_CODES)
dlq = typer.Typer(help="Dead letters: look at them, put them back, remove them.", no_args_is_help=True)
outbox_app = typer.Typer(
    help="The outbox of a service: publish its events, and see to those that can't be.", no_args_is_help=True
)
streams_app = typer.Typer(
    help="Streams and consumers of NATS, as the settings file defines them.", no_args_is_help=True
)
inbox_app = typer.Typer(
    help="The inbox of a service: messages of a stream, each dealt with once.", no_args_is_help=True
)
inbox_dlq = typer.Typer(
    help="Messages that nobody could deal with: look at them, put them back.", no_args_is_help=True
)
topic = typer.Typer(help="What single topics promise.", no_args_is_help=True)
archive_app = typer.Typer(
    help="What retention stored of the logs before it removed it.", no_args_is_help=True
)
project = typer.Typer(help="The read models that search reads, built by Spark.", no_args_is_help=True)


def main() -> None:
    """Run the command line and exit with its code."""
    arguments = sys.argv[1:]
    out = Output("--json" in arguments)
    try:
        code = app(arguments, prog_name="postroom", standalone_mode=False)
    except UsageError as error:
        where = error.ctx.command_path if error.ctx is not None else "postroom"
        message = error.format_message().strip()
        if message:  # none: the help was asked for, and shown
            out.error({"code": "E_USAGE", "message": f"{message} See {where} --help."})
        code = USAGE
    except typer.Abort:
        code = INTERRUPTED
    except OSError as error:
        out.error({"code": "E_USAGE", "message": str(error)})
        code = REFUSED
    sys.exit(code)


def root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Postroom: event-sourced mailboxes. Send, receive and settle messages; search all there ever were.

    Settings come from flags, then from the environment (POSTROOM_*), then from postroom.toml.
    """
    if version:
        from importlib.metadata import version as version_of

        typer.echo(f"postroom {version_of('postroom')}")
    elif ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


add_shared_options(app, root)
MESSAGES, LOOK, OPERATE = "Messages", "Looking", "Operating"
add_command(app, "demo", demo.demo)
add_command(app, "send", messages.send, rich_help_panel=MESSAGES)
add_command(app, "recv", messages.recv, rich_help_panel=MESSAGES)
add_command(app, "ack", messages.ack, rich_help_panel=MESSAGES)
add_command(app, "nack", messages.nack, rich_help_panel=MESSAGES)
add_command(app, "extend", messages.extend, rich_help_panel=MESSAGES)
add_command(app, "import", importer.import_file, rich_help_panel=MESSAGES)
add_command(app, "ingest", ingest.ingest, rich_help_panel=MESSAGES)
add_command(app, "show", queues.show, rich_help_panel=LOOK)
add_command(app, "backlog", queues.backlog, rich_help_panel=LOOK)
add_command(app, "search", search.search, rich_help_panel=LOOK)
add_command(app, "export", export.export, rich_help_panel=LOOK)
add_command(app, "stats", search.stats, rich_help_panel=LOOK)
add_command(app, "activity", activity.activity, rich_help_panel=LOOK)
add_command(app, "verify", queues.verify, rich_help_panel=OPERATE)
add_command(app, "migrate", migrate.migrate, rich_help_panel=OPERATE)
add_command(app, "bench", benchmark.bench, rich_help_panel=OPERATE)
add_command(dlq, "list", operate.list_dead_letters)
add_command(dlq, "show", operate.show_dead_letter)
add_command(dlq, "reprocess", operate.reprocess_dead_letters)
add_command(dlq, "purge", operate.purge_dead_letters)
add_command(topic, "policy", operate.policy)
add_command(project, "rebuild", project_commands.rebuild)
add_command(project, "follow", follow.follow)
add_command(project, "status", search.project_status)
add_command(project, "contexts", contexts.contexts)
add_command(project, "verify", project_commands.verify)
add_command(project, "roll-back", project_commands.roll_back)
add_command(project, "simulate", simulate.simulate)
add_command(archive_app, "list", archive.list_segments)
add_command(archive_app, "verify", archive.verify)
add_command(outbox_app, "relay", outbox.relay)
add_command(outbox_app, "backlog", outbox.backlog)
add_command(outbox_app, "list", outbox.list_events)
add_command(outbox_app, "retry", outbox.retry)
add_command(outbox_app, "discard", outbox.discard)
add_command(outbox_app, "cleanup", outbox.cleanup)
app.add_typer(outbox_app, name="outbox", rich_help_panel=OPERATE)
add_command(streams_app, "apply", streams.apply)
add_command(streams_app, "diff", streams.diff)
add_command(streams_app, "list", streams.list_streams)
add_command(inbox_app, "consume", inbox.consume)
add_command(inbox_app, "backlog", inbox.backlog)
add_command(inbox_app, "cleanup", inbox.cleanup)
add_command(inbox_dlq, "list", inbox.list_dead_letters)
add_command(inbox_dlq, "redrive", inbox.redrive)
inbox_app.add_typer(inbox_dlq, name="dlq")
app.add_typer(inbox_app, name="inbox", rich_help_panel=OPERATE)
app.add_typer(streams_app, name="streams", rich_help_panel=OPERATE)
app.add_typer(project, name="project", rich_help_panel=OPERATE)
app.add_typer(archive_app, name="archive", rich_help_panel=OPERATE)
app.add_typer(dlq, name="dlq", rich_help_panel=OPERATE)
app.add_typer(topic, name="topic", rich_help_panel=OPERATE)
