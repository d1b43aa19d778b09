"""`postroom inbox`: the worker, and administration of its inbox and dead letters."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from typer import Argument, Option

from postroom.adapters.cli.dlq import (
    DISCARDED,
    DryRun,
    Remark,
    Row,
    check_selection,
    report,
    show_backlog,
    show_cleanup,
    show_dead_letters,
)
from postroom.adapters.cli.filters import takes
from postroom.adapters.cli.running import monitoring, opened, running
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.streams import consumer_definition
from postroom.adapters.cli.values import REFUSED, Database, MetricsPort, Nats, WrongUsage, parse_duration
from postroom.adapters.cli.work import load_object
from postroom.application.extras import explain_missing_extra
from postroom.application.text import pluralize
from postroom.domain.names import describe_choices

if TYPE_CHECKING:
    from postroom.adapters.compose.brokers import ConsumerDefinition
    from postroom.adapters.compose.inbox import (
        DeadLetterAdmin,
        InboxDeadLetter,
        InboxSettings,
        MessagingSettings,
    )
    from postroom.application.inbox.delivery import EventHandlers

EXTRAS = "http,nats,postgres"
"""Extras of all commands of the inbox together, so that one installation is enough."""

Context = Annotated[
    str | None,
    Option("--context", metavar="NAME", help="Context of the inbox, such as sea. [messaging.context]"),
]
Consumer = Annotated[
    str | None,
    Option(
        "--consumer",
        metavar="NAME",
        help="Consumer defined in [consumers], or STREAM/DURABLE. [inbox.consumer]",
    ),
]
Handler = Annotated[
    str | None, Option("--handler", metavar="URL", help="URL that events are posted to. [inbox.handler]")
]
Functions = Annotated[
    str | None,
    Option(
        "--handlers",
        metavar="MODULE:NAME",
        help="EventHandlers to call instead of URLs, such as shop:handlers.",
    ),
]
Allow = Annotated[
    list[str] | None,
    Option(
        "--allow",
        metavar="'PREFIX [NETWORK...]'",
        help="Permitted URL prefix of the handler, and its networks; may be repeated. [inbox.allow]",
    ),
]


async def consume(
    session: Session,
    once: Annotated[bool, Option("--once", help="Process the pending messages, then exit.")] = False,
    consumer: Consumer = None,
    handler: Handler = None,
    handlers: Functions = None,
    allow: Allow = None,
    concurrency: Annotated[
        int | None, Option(metavar="N", help="Maximum number of messages in progress. [inbox.concurrency]")
    ] = None,
    database: Database = None,
    context: Context = None,
    nats: Nats = None,
    metrics_port: MetricsPort = None,
) -> None:
    """Deliver messages of a stream to the handlers of their event types, until interrupted.

    200 and 409 acknowledge a message, 422 dead-letters it, and everything else is retried. Several workers
    share the messages.
    """
    functions = _load_functions(handler, handlers)
    with explain_missing_extra(EXTRAS):
        from postroom.adapters.compose.inbox import NatsSettings, open_monitored_worker

    options = {"consumer": consumer, "handler": handler, "allow": allow, "concurrency": concurrency}
    messaging, settings = _settings(session, database, context, options)
    definition = _consumer(session, settings.consumer)
    server = session.settings.section("nats", NatsSettings, {"url": nats})
    stop = asyncio.Event()
    async with opened(
        lambda: open_monitored_worker(messaging, server, definition, settings, handler=functions),
        is_patient=not once,
    ) as (worker, monitor):
        destination = handlers or ", ".join(dict.fromkeys(settings.urls.values()))
        with monitoring(session, metrics_port, monitor):
            async with running(session, _stop_or_cancel(stop)):
                session.out.note(f"Delivering messages of {definition.name} to {destination}.")
                await worker.run(stop, until_idle=once)
    counts = worker.counts
    session.out.result(
        counts,
        f"{counts['processed']:,} processed, {pluralize(counts['duplicate'], 'duplicate')}, "
        f"{counts['failed']:,} failed and will be retried, "
        f"{pluralize(counts['dead_lettered'], 'dead letter')}",
    )


async def backlog(session: Session, database: Database = None, context: Context = None) -> None:
    """Count the received messages that are not processed yet, and show the age of the oldest.

    If workers are ordered, also count the messages in their queues and in the fullest partition.
    """
    with explain_missing_extra(EXTRAS):
        from postroom.adapters.compose.inbox import open_inbox

    messaging, settings = _settings(session, database, context)
    async with open_inbox(messaging, settings) as inbox:
        counts = await inbox.get_backlog()
    show_backlog(session.out, counts)
    if counts.queues and not session.out.as_json:
        from postroom.adapters.cli.output import Id, Time

        session.out.table(
            ("queue", "count", "oldest", "partitions", "fullest", "its count"),
            [
                (
                    Id(each.consumer),
                    each.count,
                    Time(each.oldest_at),
                    each.partitions,
                    each.fullest,
                    each.fullest_count,
                )
                for each in counts.queues
            ],
        )


async def cleanup(
    session: Session,
    older_than: Annotated[
        str | None,
        Option("--older-than", metavar="DURATION", help="Age since processing. [inbox.retention]"),
    ] = None,
    database: Database = None,
) -> None:
    """Delete messages processed longer ago than the retention; others and dead letters are never deleted.

    A message redelivered after its deletion is processed again, so the retention must exceed the stream's.
    """
    with explain_missing_extra(EXTRAS):
        from postroom.adapters.compose.inbox import open_inbox

    messaging, settings = _settings(session, database)
    if older_than is not None:
        settings = msgspec.structs.replace(settings, retention_ms=parse_duration(older_than))
    async with open_inbox(messaging, settings) as inbox:
        removed = await inbox.cleanup.clean()
    show_cleanup(session.out, removed, "processed message")


class DeadLetterSelection(NamedTuple):
    """Dead letters that a command selects, and their location."""

    subject: str
    consumer: str | None
    database: str | None
    context: str | None
    nats: str | None


def dead_letter_selection(
    session: Session,
    subject: Annotated[
        str,
        Option(metavar="SUBJECT", help="Only dead letters of this original subject; * and > are wildcards."),
    ] = ">",
    consumer: Annotated[
        str | None, Option(metavar="DURABLE", help="Only dead letters of this consumer.")
    ] = None,
    database: Database = None,
    context: Context = None,
    nats: Nats = None,
) -> DeadLetterSelection:
    """Return the selection that the options of a command describe."""
    return DeadLetterSelection(subject, consumer, database, context, nats)


@takes(dead_letter_selection)
async def list_dead_letters(
    session: Session,
    selection: DeadLetterSelection,
    limit: Annotated[int, Option(min=1, help="Maximum number of dead letters.")] = 100,
) -> None:
    """List dead letters in the order of their original stream, with the reason."""
    async with _open_admin(session, selection) as admin:
        letters = await admin.list(selection.subject, selection.consumer)
    _show(session, letters[:limit])
    if len(letters) > limit:
        session.out.note(f"There are {len(letters):,}; show more with --limit.")


@takes(dead_letter_selection)
async def redrive(
    session: Session,
    selection: DeadLetterSelection,
    dry_run: DryRun = False,
    limit: Annotated[int | None, Option(min=1, help="Maximum number of dead letters.")] = None,
    handler: Handler = None,
    handlers: Functions = None,
    allow: Allow = None,
) -> int:
    """Deliver dead letters to the handler again, one at a time, in the order of their original stream.

    Those processed are removed. One that fails remains, as do the later dead letters of its aggregate.
    """
    outcomes: Counter[str] = Counter()
    functions = _load_functions(handler, handlers)
    options = None if dry_run else {"handler": handler, "allow": allow}
    async with _open_admin(session, selection, options, functions) as admin:
        letters = (await admin.list(selection.subject, selection.consumer))[:limit]
        if dry_run:
            _show(session, letters)
            return 0
        async for each in admin.redrive(letters):
            outcomes[each.outcome] += 1
            if each.reason and not session.out.as_json:
                session.out.prose(f"{each.outcome}: {each.reason}", f"{each.letter.record.message_id} ")
    session.out.result(
        outcomes,
        f"{outcomes['processed']:,} processed, {pluralize(outcomes['duplicate'], 'duplicate')}, "
        f"{outcomes['failed']:,} failed, {outcomes['held']:,} held back by those",
    )
    return REFUSED if outcomes["failed"] else 0


@takes(dead_letter_selection)
async def discard(
    session: Session,
    selection: DeadLetterSelection,
    ids: Annotated[
        list[str] | None, Argument(metavar="[ID]...", help="Message ids as listed, or Nats-Msg-Ids.")
    ] = None,
    every: Annotated[bool, Option("--all", help="Discard all that match --subject and --consumer.")] = False,
    reason: Remark = DISCARDED,
) -> None:
    """Remove dead letters without processing them; each remains in the history of its message."""
    check_selection(ids, every, "dead letters to discard", "inbox dlq list")
    async with _open_admin(session, selection) as admin:
        letters = await admin.list(selection.subject, selection.consumer, ids or ())
        await admin.discard(letters, reason)
    report(session, "discarded", len(letters), "; kept in the history, table aggregate_events")


@asynccontextmanager
async def _open_admin(
    session: Session,
    selection: DeadLetterSelection,
    handler: dict[str, Any] | None = None,
    functions: "EventHandlers | None" = None,
) -> AsyncIterator["DeadLetterAdmin"]:
    """Open the dead letters.

    Arguments:
        handler: options of the handler; None only lists and discards.
        functions: functions to call instead of the handler.
    """
    with explain_missing_extra(EXTRAS):
        from postroom.adapters.compose.inbox import NatsSettings, open_dead_letters

    messaging, settings = _settings(session, selection.database, selection.context, handler)
    server = session.settings.section("nats", NatsSettings, {"url": selection.nats})
    async with open_dead_letters(
        messaging, server, settings, can_redrive=handler is not None, handler=functions
    ) as admin:
        yield admin


def _load_functions(handler: str | None, functions: str | None) -> "EventHandlers | None":
    """Return the `EventHandlers` that `--handlers` names, if any."""
    from postroom.application.inbox.delivery import EventHandlers

    if functions is None:
        return None
    if handler is not None:
        raise WrongUsage("--handler and --handlers exclude each other; pass one of them.")
    return load_object(functions, EventHandlers)


def _settings(
    session: Session,
    database: str | None,
    context: str | None = None,
    options: dict[str, Any] | None = None,
) -> "tuple[MessagingSettings, InboxSettings]":
    from postroom.adapters.compose.inbox import InboxSettings, MessagingSettings

    return (
        session.settings.section("messaging", MessagingSettings, {"database": database, "context": context}),
        session.settings.section("inbox", InboxSettings, options),
    )


def _consumer(session: Session, name: str) -> "ConsumerDefinition":
    """Return the consumer of that name; without a name, return the only consumer that is defined."""
    from postroom.adapters.compose.brokers import ConsumerDefinition

    consumers = session.settings.sections["consumers"]
    file = session.settings.file or "postroom.toml"
    if name in consumers:
        return consumer_definition(name, consumers[name], file)
    if "/" in name:
        stream, _, durable = name.partition("/")
        return ConsumerDefinition(stream=stream, durable=durable)
    if not name and len(consumers) == 1:
        ((only, table),) = consumers.items()
        return consumer_definition(only, table, file)
    if name:
        raise WrongUsage(
            f"[consumers] in {file} has no consumer {name}; {describe_choices(name, consumers)} An existing "
            "one may also be named as STREAM/DURABLE."
        )
    names = ", ".join(consumers) or "none are defined"
    raise WrongUsage(
        f"No consumer is selected; pass --consumer with one of [consumers] in {file} ({names}), or with "
        "STREAM/DURABLE of an existing one."
    )


def _stop_or_cancel(stop: asyncio.Event) -> Callable[[], None]:
    """Return a function that stops the worker at its first call, and cancels its messages at the second."""
    task = asyncio.current_task()
    assert task is not None

    def end() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    return end


def _show(session: Session, letters: "list[InboxDeadLetter]") -> None:
    from postroom.adapters.cli.output import Id, time_or_text

    show_dead_letters(
        session,
        [letter.record for letter in letters],
        lambda each: Row(
            Id(each.message_id),
            each.original_subject,
            each.reason,
            each.attempts,
            each.last_error,
            time_or_text(each.at),
            {"sequence": each.sequence},
        ),
        origin="subject",
    )
