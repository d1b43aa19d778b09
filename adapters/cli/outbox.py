"""`postroom outbox`: the relay, and what operators do about events that can't be published."""

import asyncio
import signal
import time
from datetime import datetime
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import msgspec
from typer import Argument, Option

from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import WrongUsage, format_duration, parse_duration

if TYPE_CHECKING:
    from postroom.adapters.compose.outbox import MessagingSettings, OutboxSettings

Database = Annotated[
    str | None, Option("--database", metavar="URL", help="The service's own database. \\[messaging.database]")
]
Context = Annotated[
    str | None,
    Option("--context", metavar="NAME", help="First word of the events' subjects. \\[messaging.context]"),
]
Nats = Annotated[str | None, Option("--nats", metavar="URL", help="Where NATS is. \\[nats.url]")]
EventId = Annotated[list[str], Argument(metavar="ID...", help="Ids of events.")]


async def relay(
    session: Session,
    once: Annotated[bool, Option("--once", help="Publish what is there, then end.")] = False,
    database: Database = None,
    context: Context = None,
    nats: Nats = None,
) -> None:
    """Publish the events of an outbox to {context}.event.{name}.v{n}, until interrupted.

    Any number of relays may run beside each other: the order of each aggregate is kept.
    """
    from postroom.adapters.compose.relay import NatsSettings, open_relay

    messaging, settings = _settings(session, database, context)
    if not messaging.context:
        raise WrongUsage("Say which context the events are of: --context, or context under [messaging].")
    where = session.settings.section("nats", NatsSettings, {"url": nats})
    async with open_relay(messaging, where, settings) as running:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, running.stop)
        if once:
            while await running.relay_once():
                pass
        else:
            session.out.note(f"Relaying the events of {messaging.context} to {where.url}.")
            await running.run()
    done = running.relayed
    if session.out.as_json:
        session.out.json(done)
    else:
        session.out.line(
            f"{done.published:,} published, {done.failed:,} refused and to be tried again, "
            f"{done.parked:,} parked"
        )


async def backlog(session: Session, database: Database = None, context: Context = None) -> None:
    """Count the events that wait to be published, and tell since when the oldest does."""
    from postroom.adapters.compose.outbox import open_outbox

    messaging, settings = _settings(session, database, context)
    async with open_outbox(messaging, settings) as outbox:
        found = await outbox.get_backlog()
    if session.out.as_json:
        session.out.json(found)
    else:
        session.out.table(
            ("context", "count", "oldest"), [(found.context, found.count, _age(found.oldest_at))]
        )


async def list_events(
    session: Session,
    parked: Annotated[
        bool, Option("--parked", help="Only those that are not tried again by themselves.")
    ] = False,
    limit: Annotated[int, Option(min=1, help="Events at most.")] = 100,
    database: Database = None,
) -> None:
    """List the events that the stream refused, oldest first, with the reason."""
    from postroom.adapters.compose.outbox import open_outbox

    messaging, settings = _settings(session, database)
    async with open_outbox(messaging, settings) as outbox:
        found = await outbox.list_failed_events(limit, only_parked=parked)
    if session.out.as_json:
        session.out.json({"events": found})
        return
    session.out.table(
        ("event", "type", "aggregate", "attempts", "next attempt", "last error"),
        [
            (
                each.id,
                f"{each.event_type} v{each.event_version}",
                f"{each.aggregate_type} {each.aggregate_id}",
                each.attempts,
                "never (parked)" if each.retry_at is None else f"{each.retry_at:%Y-%m-%d %H:%M:%S} UTC",
                each.error,
            )
            for each in found
        ],
    )


async def retry(
    session: Session,
    ids: Annotated[list[str] | None, Argument(metavar="[ID]...", help="Ids of events.")] = None,
    every: Annotated[bool, Option("--all", help="All that are parked.")] = False,
    database: Database = None,
) -> None:
    """Have events that the stream refused tried again at once, with fresh attempts."""
    from postroom.adapters.compose.outbox import open_outbox

    if bool(ids) == every:
        raise WrongUsage("Name the events to retry, or all that are parked with --all; see outbox list.")
    messaging, settings = _settings(session, database)
    async with open_outbox(messaging, settings) as outbox:
        count = await (outbox.retry_events.all() if every else outbox.retry_events(_ids(ids or [])))
    if session.out.as_json:
        session.out.json({"retried": count})
    else:
        session.out.line(f"{count:,} events are tried again")


async def discard(
    session: Session,
    ids: EventId,
    reason: Annotated[str, Option(help="Why; kept in the event's history.")] = "discarded by an operator",
    database: Database = None,
) -> None:
    """Take events out of the outbox unpublished, so that the later ones of their aggregates go on."""
    from postroom.adapters.compose.outbox import open_outbox

    messaging, settings = _settings(session, database)
    async with open_outbox(messaging, settings) as outbox:
        count = await outbox.discard_events(_ids(ids), reason)
    if session.out.as_json:
        session.out.json({"discarded": count})
    else:
        session.out.line(f"{count:,} events discarded; their payloads are in aggregate_events")


async def cleanup(
    session: Session,
    older_than: Annotated[
        str | None,
        Option("--older-than", metavar="DURATION", help="Since they were published. \\[outbox.retention]"),
    ] = None,
    database: Database = None,
) -> None:
    """Remove events that were published long ago; what is unpublished stays, however old it is."""
    from postroom.adapters.compose.outbox import open_outbox

    messaging, settings = _settings(session, database)
    if older_than is not None:
        settings = msgspec.structs.replace(settings, retention_ms=parse_duration(older_than))
    async with open_outbox(messaging, settings) as outbox:
        removed = await outbox.cleanup.clean()
    if session.out.as_json:
        session.out.json({"removed": removed})
    elif removed is None:
        session.out.line("another cleanup is at work, so this one left it to that")
    else:
        session.out.line(f"{removed:,} published events removed")


def _settings(
    session: Session, database: str | None, context: str | None = None
) -> tuple["MessagingSettings", "OutboxSettings"]:
    from postroom.adapters.compose.outbox import MessagingSettings, OutboxSettings

    given = {"database": database, "context": context}
    return (
        session.settings.section("messaging", MessagingSettings, given),
        session.settings.section("outbox", OutboxSettings),
    )


def _ids(texts: list[str]) -> list[UUID]:
    try:
        return [UUID(text) for text in texts]
    except ValueError:
        raise WrongUsage(f"Events have UUIDs for ids; one of {', '.join(texts)} is none.") from None


def _age(since: datetime | None) -> str | None:
    return None if since is None else format_duration(max(0, (time.time() - since.timestamp()) * 1_000))
