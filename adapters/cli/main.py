"""The console script `postroom`: its commands by group, each imported on first use."""

import atexit
import gc
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from postroom.adapters.cli.command import Command, Entries, Group, as_root, build_root
from postroom.adapters.cli.output import Output, prepare_streams
from postroom.adapters.cli.values import DONE, HELP, INTERRUPTED, REFUSED, USAGE, Process, end_soon
from postroom.application.version import own_version

# Typer may bundle its own copy of click, where the base class of usage errors has no public name.
UsageError: Any = typer.BadParameter.__bases__[0]

MESSAGES, QUERIES, OPERATIONS = "Messages", "Queries", "Operations"

COMMANDS: Entries = {
    "demo": Command("demo:demo"),
    "init": Command("config:init"),
    "up": Command("up:up"),
    "send": Command("messages:send", MESSAGES),
    "peek": Command("messages:peek", MESSAGES),
    "recv": Command("messages:recv", MESSAGES),
    "ack": Command("settlements:ack", MESSAGES),
    "nack": Command("settlements:nack", MESSAGES),
    "extend": Command("settlements:extend", MESSAGES),
    "result": Command("settlements:result", MESSAGES),
    "cancel": Command("messages:cancel", MESSAGES),
    "reschedule": Command("messages:reschedule", MESSAGES),
    "import": Command("importer:import_file", MESSAGES),
    "ingest": Group(
        None,
        {
            "dlq": Group(
                "Dead letters of ingestion: list, show, redrive and discard them.",
                {
                    "list": Command("ingest:list_dead_letters"),
                    "show": Command("ingest:show_dead_letter"),
                    "redrive": Command("ingest:redrive"),
                    "discard": Command("ingest:discard"),
                },
            )
        },
        MESSAGES,
        target="ingest:ingest",
    ),
    "work": Command("work:work", MESSAGES),
    "schedule": Group(
        None,
        {
            "list": Command("schedules:list_schedules"),
            "show": Command("schedules:show"),
            "set": Command("schedules:set_schedule"),
            "pause": Command("schedules:pause"),
            "resume": Command("schedules:resume"),
            "run-now": Command("schedules:run_now"),
            "delete": Command("schedules:delete"),
        },
        MESSAGES,
        target="work:schedule",
    ),
    "show": Command("inspect:show", QUERIES),
    "backlog": Command("inspect:backlog", QUERIES),
    "search": Command("search:search", QUERIES),
    "searches": Group(
        "Saved searches of a mailbox, which the console shows: save, list, run and delete them.",
        {
            "list": Command("searches:list_searches"),
            "save": Command("searches:save"),
            "run": Command("searches:run"),
            "delete": Command("searches:delete"),
        },
        QUERIES,
    ),
    "export": Command("search:export", QUERIES),
    "stats": Command("search:stats", QUERIES),
    "activity": Command("search:activity", QUERIES),
    "verify": Command("inspect:verify", OPERATIONS),
    "anchor": Command("log:anchor", OPERATIONS),
    "erase": Command("verification:erase", OPERATIONS),
    "erasure": Group(
        "Keys with which messages of data subjects are encrypted: create their store.",
        {"init": Command("verification:init")},
        OPERATIONS,
    ),
    "audit": Group(None, {"verify": Command("verification:verify")}, OPERATIONS, target="verification:audit"),
    "token": Group(
        "Capabilities: mint, attenuate, inspect, revoke and list tokens, and rotate the keys that sign them.",
        {
            "mint": Command("token:mint"),
            "attenuate": Command("token:attenuate"),
            "inspect": Command("token:inspect"),
            "revoke": Command("token:revoke"),
            "rotate": Command("token:rotate"),
            "list": Command("token:list_capabilities"),
        },
        OPERATIONS,
    ),
    "migrate": Command("maintenance:migrate", OPERATIONS),
    "bench": Command("maintenance:bench", OPERATIONS),
    "dlq": Group(
        "Dead letters of a mailbox: list, group, show, redrive and purge them.",
        {
            "list": Command("dlq:list_dead_letters"),
            "groups": Command("dlq:group_dead_letters"),
            "show": Command("dlq:show_dead_letter"),
            "redrive": Command("dlq:redrive_dead_letters"),
            "purge": Command("dlq:purge_dead_letters"),
        },
        OPERATIONS,
    ),
    "redrive": Group(
        "Jobs on the dead letters, or the waiting messages, of a query: start, follow and undo them.",
        {
            "start": Command("redrive:start"),
            "list": Command("redrive:list_jobs"),
            "show": Command("redrive:show"),
            "pause": Command("redrive:pause"),
            "resume": Command("redrive:resume"),
            "cancel": Command("redrive:cancel"),
            "undo": Command("redrive:undo"),
        },
        OPERATIONS,
    ),
    "own": Command("own:own", OPERATIONS),
    "serve": Command("serve:serve", OPERATIONS),
    "console": Command("console:console", OPERATIONS),
    "mcp": Command("mcp:mcp", OPERATIONS),
    "proxy": Command("cluster:proxy", OPERATIONS),
    "runner": Command("cluster:runner", OPERATIONS),
    "admin": Command("admin:admin", OPERATIONS),
    "lease": Group(
        "Leases of the mailboxes of a cluster: list and release them.",
        {"list": Command("admin:list_leases"), "release": Command("admin:release")},
        OPERATIONS,
    ),
    "route": Group(
        "Routes to the runners of mailboxes: list them.", {"list": Command("admin:list_routes")}, OPERATIONS
    ),
    "apply": Command("mailbox:apply", OPERATIONS),
    "mailbox": Group(
        "Mailboxes of a store: list them, show and change their settings.",
        {
            "list": Command("mailbox:list_mailboxes"),
            "show": Command("mailbox:show"),
            "set": Command("mailbox:set_settings"),
        },
        OPERATIONS,
    ),
    "topic": Group(
        "Topics: list, show, pause, resume and purge them, set their policies, list consumers and workers.",
        {
            "list": Command("topic:list_topics"),
            "show": Command("topic:show"),
            "consumers": Command("topic:list_consumers"),
            "workers": Command("work:list_workers"),
            "pause": Command("topic:pause"),
            "resume": Command("topic:resume"),
            "policy": Command("topic:policy"),
            "purge": Command("topic:purge"),
        },
        OPERATIONS,
    ),
    "subscription": Group(
        "Topics that get a copy of each message of others: list, create, rewind and delete them.",
        {
            "list": Command("subscriptions:list_subscriptions"),
            "show": Command("subscriptions:show"),
            "set": Command("subscriptions:set_subscription"),
            "rewind": Command("subscriptions:rewind"),
            "delete": Command("subscriptions:delete"),
        },
        OPERATIONS,
    ),
    "doctor": Command("config:doctor", OPERATIONS),
    "explain": Command("config:explain", OPERATIONS),
    "config": Group(
        "Settings: show them, and where each comes from.", {"show": Command("config:show")}, OPERATIONS
    ),
    "views": Group(
        "Read models for search, activity and backlog: rebuild, follow, verify and roll back.",
        {
            "rebuild": Command("views:rebuild"),
            "follow": Command("views:follow"),
            "status": Command("views:status"),
            "contexts": Command("views:contexts"),
            "verify": Command("views:verify"),
            "roll-back": Command("views:roll_back"),
            "simulate": Command("topic:simulate"),
        },
        OPERATIONS,
    ),
    "report": Group(
        "Reports on the events of a store: latency, retries, traffic, service levels, and policies.",
        {
            "latency": Command("report:latency"),
            "retries": Command("report:retries"),
            "traffic": Command("report:traffic"),
            "sla": Command("report:sla"),
            "whatif": Command("report:whatif"),
            "run": Command("report:run"),
        },
        OPERATIONS,
    ),
    "log": Group(
        "Events of a mailbox's log: show them, or the last of them as they are written.",
        {"show": Command("log:show"), "tail": Command("log:tail")},
        OPERATIONS,
    ),
    "segments": Group(
        "Copies of logs in Parquet, which are the archive after retention: build, list, verify and compact.",
        {
            "build": Command("segments:build"),
            "list": Command("segments:list_segments"),
            "verify": Command("segments:verify"),
            "compact": Command("segments:compact"),
        },
        OPERATIONS,
    ),
    "backup": Group(
        "Back up a store, and verify backups.",
        {"create": Command("maintenance:create"), "verify": Command("maintenance:verify")},
        OPERATIONS,
        default="create",
    ),
    "restore": Command("maintenance:restore", OPERATIONS),
    "import-store": Command("maintenance:import_store", OPERATIONS),
    "outbox": Group(
        "Transactional outbox of a service: relay its events, list and retry those that failed.",
        {
            "relay": Command("outbox:relay"),
            "capture": Command("outbox:capture"),
            "backlog": Command("outbox:backlog"),
            "list": Command("outbox:list_events"),
            "retry": Command("outbox:retry"),
            "discard": Command("outbox:discard"),
            "cleanup": Command("outbox:cleanup"),
        },
        OPERATIONS,
    ),
    "inbox": Group(
        "Idempotent inbox of a service: consume a stream, operate on dead letters.",
        {
            "consume": Command("inbox:consume"),
            "backlog": Command("inbox:backlog"),
            "cleanup": Command("inbox:cleanup"),
            "dlq": Group(
                "Dead letters of the inbox: list, redrive or discard them.",
                {
                    "list": Command("inbox:list_dead_letters"),
                    "redrive": Command("inbox:redrive"),
                    "discard": Command("inbox:discard"),
                },
            ),
        },
        OPERATIONS,
    ),
    "streams": Group(
        "NATS streams and consumers: compare them with the settings file and apply it.",
        {
            "apply": Command("streams:apply"),
            "diff": Command("streams:diff"),
            "list": Command("streams:list_streams"),
        },
        OPERATIONS,
    ),
}


def main() -> None:
    """Run the command line and end its process; other programs call `invoke`."""
    # Else the interpreter visits every object several times before it ends. DuckDB would complain of leaks.
    atexit.register(lambda: None if "duckdb" in sys.modules else gc.freeze())
    Process.is_own = True
    code = invoke(sys.argv[1:])
    end_soon(code)
    sys.exit(code)


def invoke(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code; the process goes on.

    Arguments:
        arguments: the words after `postroom`.
    """
    prepare_streams()
    out = Output("--json" in arguments)
    try:
        return build().main(list(arguments), prog_name="postroom", standalone_mode=False) or DONE
    except UsageError as error:
        where = error.ctx.command_path if error.ctx is not None else "postroom"
        message = error.format_message().strip()
        if message:  # empty if a group without a command showed its help
            stop = "" if message.endswith((".", "?")) else "."
            out.error({"code": "E_USAGE", "message": f"{message}{stop} See {where} --help."})
        return USAGE
    except typer.Abort:
        return INTERRUPTED
    except OSError as error:
        out.error({"code": "E_USAGE", "message": str(error)})
        return REFUSED


def build() -> Any:
    """Return the click command of the whole command line."""
    return build_root(as_root(root), COMMANDS, HELP)


def root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Postroom: event-sourced mailboxes. Send, receive and settle messages, and search their history.

    Settings come from flags, then from the environment (POSTROOM_*), then from postroom.toml.
    """
    if version:
        typer.echo(f"postroom {own_version()}")
    elif ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
