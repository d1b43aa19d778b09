"""`postroom inbox`: the worker, and what operators do about messages that could not be dealt with."""

import asyncio
import signal
import time
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from typer import Option

from postroom.adapters.cli.failures import REFUSED
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.streams import consumer_definition
from postroom.adapters.cli.values import WrongUsage, format_duration, parse_duration

if TYPE_CHECKING:
    from postroom.adapters.compose.inbox import InboxSettings, Letter, MessagingSettings
    from postroom.domain.streams import ConsumerDefinition

Database = Annotated[
    str | None, Option("--database", metavar="URL", help="The service's own database. (messaging.database)")
]
Context = Annotated[
    str | None,
    Option("--context", metavar="NAME", help="Whose inbox it is, such as sea. (messaging.context)"),
]
Nats = Annotated[str | None, Option("--nats", metavar="URL", help="Where NATS is. (nats.url)")]
Consumer = Annotated[
    str | None,
    Option("--consumer", metavar="NAME", help="One of those defined, or STREAM/DURABLE. (inbox.consumer)"),
]
Handler = Annotated[
    str | None, Option("--handler", metavar="URL", help="Where events are posted to. (inbox.handler)")
]
Allow = Annotated[
    list[str] | None,
    Option(
        "--allow",
        metavar="'PREFIX [NETWORK...]'",
        help="What the handler's URL must begin with, and where it may lie. (inbox.allow)",
    ),
]
Subject = Annotated[
    str, Option("--subject", metavar="SUBJECT", help="Only of these original subjects; * and > allowed.")
]
OfConsumer = Annotated[str | None, Option("--consumer", metavar="DURABLE", help="Only of this consumer.")]


async def consume(
    session: Session,
    once: Annotated[bool, Option("--once", help="Deal with what is there, then end.")] = False,
    consumer: Consumer = None,
    handler: Handler = None,
    allow: Allow = None,
    concurrency: Annotated[
        int | None, Option(metavar="N", help="Messages in hand at once. (inbox.concurrency)")
    ] = None,
    database: Database = None,
    context: Context = None,
    nats: Nats = None,
) -> None:
    """Take messages of a stream to their handler, each until it is dealt with once, until interrupted.

    200 and 409 acknowledge a message, 422 makes it a dead letter, and all else is tried again. Any number of
    workers may run beside each other.
    """
    from postroom.adapters.compose.inbox import NatsSettings, open_worker

    given = {"consumer": consumer, "handler": handler, "allow": allow, "concurrency": concurrency}
    messaging, settings = _settings(session, database, context, given)
    definition = _consumer(session, settings.consumer)
    where = session.settings.section("nats", NatsSettings, {"url": nats})
    stop = asyncio.Event()
    async with open_worker(messaging, where, definition, settings) as worker:
        _on_signals(stop)
        session.out.note(f"Taking messages of {definition.name} to {settings.handler}.")
        await worker.run(stop, until_idle=once)
    done = worker.counts
    if session.out.as_json:
        session.out.json(done)
    else:
        session.out.line(
            f"{done['processed']:,} processed, {done['duplicate']:,} were before, {done['failed']:,} failed "
            f"and to be tried again, {done['dead_lettered']:,} dead letters"
        )


async def backlog(session: Session, database: Database = None, context: Context = None) -> None:
    """Count the messages that are received and not dealt with, and tell since when the oldest waits."""
    from postroom.adapters.compose.inbox import open_inbox

    messaging, settings = _settings(session, database, context)
    async with open_inbox(messaging, settings) as inbox:
        found = await inbox.get_backlog()
    if session.out.as_json:
        session.out.json(found)
    else:
        session.out.table(
            ("context", "count", "oldest"),
            [
                (
                    found.context,
                    found.count,
                    None if found.oldest_at is None else _age(found.oldest_at.timestamp()),
                )
            ],
        )


async def cleanup(
    session: Session,
    older_than: Annotated[
        str | None,
        Option("--older-than", metavar="DURATION", help="Since they were processed. (inbox.retention)"),
    ] = None,
    database: Database = None,
) -> None:
    """Forget messages that were processed long ago; what is unprocessed or a dead letter stays.

    A message that comes again afterwards is dealt with again: keep them for longer than the stream does.
    """
    from postroom.adapters.compose.inbox import open_inbox

    messaging, settings = _settings(session, database)
    if older_than is not None:
        settings = msgspec.structs.replace(settings, retention_ms=parse_duration(older_than))
    async with open_inbox(messaging, settings) as inbox:
        removed = await inbox.cleanup.clean()
    if session.out.as_json:
        session.out.json({"removed": removed})
    elif removed is None:
        session.out.line("another cleanup is at work, so this one left it to that")
    else:
        session.out.line(f"{removed:,} processed messages removed")


async def list_dead_letters(
    session: Session,
    subject: Subject = ">",
    consumer: OfConsumer = None,
    limit: Annotated[int, Option(min=1, help="Dead letters at most.")] = 100,
    database: Database = None,
    context: Context = None,
    nats: Nats = None,
) -> None:
    """List dead letters in the order of the stream they came from, with what they died of."""
    from postroom.adapters.compose.inbox import NatsSettings, open_dead_letters

    messaging, settings = _settings(session, database, context)
    where = session.settings.section("nats", NatsSettings, {"url": nats})
    async with open_dead_letters(messaging, where, settings, only_look=True) as office:
        letters = await office.list(subject, consumer)
    _show(session, letters[:limit])
    if len(letters) > limit:
        session.out.note(f"There are {len(letters):,}; see more with --limit.")


async def redrive(
    session: Session,
    dry_run: Annotated[bool, Option("--dry-run", help="Only show what would be put back.")] = False,
    subject: Subject = ">",
    consumer: OfConsumer = None,
    limit: Annotated[int | None, Option(min=1, help="Dead letters at most; the first ones.")] = None,
    handler: Handler = None,
    allow: Allow = None,
    database: Database = None,
    context: Context = None,
    nats: Nats = None,
) -> int:
    """Hand dead letters to the handler again, in the order of the stream they came from, one at a time.

    Those that are processed leave the dead letters. One that fails stays, and so do the later ones of its
    aggregate.
    """
    from postroom.adapters.compose.inbox import NatsSettings, open_dead_letters

    messaging, settings = _settings(session, database, context, {"handler": handler, "allow": allow})
    where = session.settings.section("nats", NatsSettings, {"url": nats})
    endings: dict[str, int] = {}
    async with open_dead_letters(messaging, where, settings, only_look=dry_run) as office:
        letters = (await office.list(subject, consumer))[:limit]
        if dry_run:
            _show(session, letters)
            return 0
        async for each in office.redrive(letters):
            endings[each.ending] = endings.get(each.ending, 0) + 1
            if each.reason and not session.out.as_json:
                session.out.line(f"{each.letter.record.message_id} {each.ending}: {each.reason}")
    if session.out.as_json:
        session.out.json(endings)
    else:
        session.out.line(
            f"{endings.get('processed', 0):,} processed, {endings.get('duplicate', 0):,} were before, "
            f"{endings.get('failed', 0):,} failed, {endings.get('held', 0):,} held back behind those"
        )
    return REFUSED if endings.get("failed") else 0


def _settings(
    session: Session,
    database: str | None,
    context: str | None = None,
    given: dict[str, Any] | None = None,
) -> "tuple[MessagingSettings, InboxSettings]":
    from postroom.adapters.compose.inbox import InboxSettings, MessagingSettings

    return (
        session.settings.section("messaging", MessagingSettings, {"database": database, "context": context}),
        session.settings.section("inbox", InboxSettings, given),
    )


def _consumer(session: Session, name: str) -> "ConsumerDefinition":
    """Return the consumer to read: the one that is named, or the only one that is defined."""
    from postroom.domain.streams import ConsumerDefinition

    defined = session.settings.sections["consumers"]
    file = session.settings.file or "postroom.toml"
    if name in defined:
        return consumer_definition(name, defined[name], file)
    if "/" in name:
        stream, _, durable = name.partition("/")
        return ConsumerDefinition(stream=stream, durable=durable)
    if not name and len(defined) == 1:
        ((only, table),) = defined.items()
        return consumer_definition(only, table, file)
    known = ", ".join(defined) or "there are none yet"
    raise WrongUsage(
        f"Say which consumer to read: --consumer with one of [consumers] in {file} ({known}), or with "
        "STREAM/DURABLE of one that is there."
    )


def _on_signals(stop: asyncio.Event) -> None:
    """Finish what is in hand at the first signal, and end at once at the second."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def end() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)


def _show(session: Session, letters: "list[Letter]") -> None:
    if session.out.as_json:
        session.out.json({"dead_letters": [letter.record for letter in letters]})
        return
    session.out.table(
        ("message", "subject", "sequence", "reason", "attempts", "last error", "at"),
        [
            (
                record.message_id,
                record.original_subject,
                record.sequence,
                record.reason,
                record.attempts,
                record.last_error,
                record.at,
            )
            for record in (letter.record for letter in letters)
        ],
    )


def _age(since: float) -> str:
    return format_duration(max(0, int((time.time() - since) * 1_000)))
