"""`postroom outbox`: the relay, capture of tables, and administration of an outbox."""

from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import msgspec
from typer import Argument, Option

from postroom.adapters.cli.dlq import (
    DISCARDED,
    Remark,
    check_selection,
    report,
    show_backlog,
    show_cleanup,
)
from postroom.adapters.cli.outbox_target import (
    EXTRAS,
    EventSource,
    Exchange,
    Format,
    Target,
    Topic,
    publishing_settings,
    scheme_of,
    target_from_url,
)
from postroom.adapters.cli.running import monitoring, opened, running
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import Database, MetricsPort, Nats, WrongUsage, parse_duration
from postroom.application.extras import explain_missing_extra
from postroom.application.text import pluralize

if TYPE_CHECKING:
    from postroom.adapters.compose.outbox import CaptureSettings, MessagingSettings, OutboxSettings


Context = Annotated[
    str | None,
    Option("--context", metavar="NAME", help="First token of the events' subjects. [messaging.context]"),
]
EventId = Annotated[list[str], Argument(metavar="ID...", help="Ids of events.")]


async def relay(
    session: Session,
    once: Annotated[bool, Option("--once", help="Publish the pending events, then exit.")] = False,
    database: Database = None,
    context: Context = None,
    to: Target = None,
    topic: Topic = None,
    exchange: Exchange = None,
    format_: Format = None,
    source: EventSource = None,
    nats: Nats = None,
    metrics_port: MetricsPort = None,
) -> None:
    """Publish the events of an outbox to NATS JetStream, Kafka, RabbitMQ or a mailbox, until interrupted.

    Several relays share the events and preserve the order of each aggregate.
    """
    settings = publishing_settings(
        session, to=to, topic=topic, exchange=exchange, format_=format_, source=source
    )
    if nats is not None:
        if to is not None:
            raise WrongUsage("--to and --nats both name a target; pass one of them.")
        settings = msgspec.structs.replace(settings, to=None)
    with explain_missing_extra(EXTRAS[scheme_of(settings.to)]):
        from postroom.adapters.compose.outbox import open_monitored_relay

        messaging, _ = _settings(session, database, context)
    if not messaging.context:
        raise WrongUsage("No context is configured; pass --context, or set context under [messaging].")
    target = target_from_url(session, settings.to, nats)
    async with (
        opened(lambda: open_monitored_relay(messaging, target, settings), is_patient=not once) as (
            event_relay,
            monitor,
        ),
        running(session, event_relay.stop),
    ):
        if once:
            while await event_relay.relay_once():
                pass
        else:
            session.out.note(f"Relaying the events of {messaging.context} to {target.shown_url}.")
            with monitoring(session, metrics_port, monitor):
                await event_relay.run()
    counts = event_relay.counts
    session.out.result(
        counts,
        f"{counts.published:,} published, {counts.failed:,} failed and will be retried, "
        f"{counts.parked:,} parked",
    )


async def backlog(session: Session, database: Database = None, context: Context = None) -> None:
    """Count the events that are not published yet, and show the age of the oldest.

    If a table is captured, show the state of its replication slot, too.
    """
    from postroom.adapters.compose.outbox import open_outbox

    messaging, settings = _settings(session, database, context)
    async with open_outbox(messaging, settings) as outbox:
        counts = await outbox.get_backlog()
    if not session.settings.sections.get("capture"):
        show_backlog(session.out, counts)
        return
    from postroom.adapters.compose.outbox import CaptureSettings, get_slot_state

    slot = await get_slot_state(messaging, session.settings.section("capture", CaptureSettings))
    if session.out.as_json:
        session.out.json(msgspec.structs.asdict(counts) | {"slot": slot})
        return
    show_backlog(session.out, counts)
    session.out.table(slot.__struct_fields__, [msgspec.structs.astuple(slot)])


async def list_events(
    session: Session,
    parked: Annotated[
        bool, Option("--parked", help="Only parked events, which are not retried automatically.")
    ] = False,
    limit: Annotated[int, Option(min=1, help="Maximum number of events.")] = 100,
    database: Database = None,
) -> None:
    """List the events that could not be published, oldest first, with the error."""
    from postroom.adapters.cli.output import Id, Time
    from postroom.adapters.compose.outbox import open_outbox

    messaging, settings = _settings(session, database)
    async with open_outbox(messaging, settings) as outbox:
        events = await outbox.list_failed_events(limit, only_parked=parked)
    session.out.records(
        {"events": events},
        ("event", "type", "aggregate", "attempts", "retry", "last error"),
        events,
        lambda each: (
            Id(each.id),
            f"{each.event_type} v{each.event_version}",
            f"{each.aggregate_type} {each.aggregate_id}",
            each.attempts,
            "parked" if each.retry_at is None else Time(each.retry_at),
            each.error,
        ),
        only_wide=("aggregate", "attempts"),
    )


async def retry(
    session: Session,
    ids: Annotated[list[str] | None, Argument(metavar="[ID]...", help="Ids of events.")] = None,
    every: Annotated[bool, Option("--all", help="Retry all parked events.")] = False,
    database: Database = None,
) -> None:
    """Retry failed events immediately, with their attempts reset.

    Rows that a capture could not read are read again, with [capture] of now.
    """
    from postroom.adapters.compose.outbox import CaptureSettings, open_outbox

    check_selection(ids, every, "events to retry", "outbox list")
    messaging, settings = _settings(session, database)
    has_capture = bool(session.settings.sections.get("capture"))
    capture = session.settings.section("capture", CaptureSettings) if has_capture else None
    async with open_outbox(messaging, settings, capture) as outbox:
        count = await (outbox.retry_events.all() if every else outbox.retry_events(_ids(ids or [])))
    session.out.result({"retried": count}, f"{pluralize(count, 'event')} will be retried")


async def discard(
    session: Session,
    ids: EventId,
    reason: Remark = DISCARDED,
    database: Database = None,
) -> None:
    """Remove events without publishing them; this unblocks the later events of their aggregates."""
    from postroom.adapters.compose.outbox import open_outbox

    messaging, settings = _settings(session, database)
    async with open_outbox(messaging, settings) as outbox:
        count = await outbox.discard_events(_ids(ids), reason)
    report(session, "discarded", count, "; payloads are kept in table aggregate_events", "event")


async def cleanup(
    session: Session,
    older_than: Annotated[
        str | None,
        Option("--older-than", metavar="DURATION", help="Age since publication. [outbox.retention]"),
    ] = None,
    database: Database = None,
) -> None:
    """Delete events published longer ago than the retention; unpublished events are never deleted."""
    from postroom.adapters.compose.outbox import open_outbox

    messaging, settings = _settings(session, database)
    if older_than is not None:
        settings = msgspec.structs.replace(settings, retention_ms=parse_duration(older_than))
    async with open_outbox(messaging, settings) as outbox:
        removed = await outbox.cleanup.clean()
    show_cleanup(session.out, removed, "published event")


def _settings(
    session: Session, database: str | None, context: str | None = None
) -> tuple["MessagingSettings", "OutboxSettings"]:
    from postroom.adapters.compose.outbox import MessagingSettings, OutboxSettings

    options = {"database": database, "context": context}
    return (
        session.settings.section("messaging", MessagingSettings, options),
        session.settings.section("outbox", OutboxSettings),
    )


def _ids(texts: list[str]) -> list[UUID]:
    try:
        return [UUID(text) for text in texts]
    except ValueError:
        raise WrongUsage(f"Event ids are UUIDs; one of {', '.join(texts)} is not.") from None


Table = Annotated[
    str | None, Option("--table", metavar="NAME", help="Table, as name or schema.name. [capture.table]")
]


async def capture(
    session: Session,
    create: Annotated[
        bool,
        Option("--create", help="Create the publication and the replication slot if missing, then exit."),
    ] = False,
    once: Annotated[bool, Option("--once", help="Publish the committed rows, then exit.")] = False,
    table: Table = None,
    database: Database = None,
    context: Context = None,
    to: Target = None,
    topic: Topic = None,
    exchange: Exchange = None,
    format_: Format = None,
    source: EventSource = None,
    metrics_port: MetricsPort = None,
) -> None:
    """Publish the rows that any service inserts into a table, read by logical decoding, until interrupted.

    One process at a time reads the replication slot; a second one takes over when it ends.
    """
    settings = publishing_settings(
        session, to=to, topic=topic, exchange=exchange, format_=format_, source=source
    )
    with explain_missing_extra(EXTRAS[scheme_of(settings.to)]):
        from postroom.adapters.compose.outbox import MessagingSettings, create_slot, open_monitored_capture

    messaging = session.settings.section(
        "messaging", MessagingSettings, {"database": database, "context": context}
    )
    captured = capture_settings(session, table)
    if create:
        is_new = await create_slot(messaging, captured)
        text = (
            f"created replication slot {captured.slot}"
            if is_new
            else f"replication slot {captured.slot} exists"
        )
        session.out.result({"slot": captured.slot, "created": is_new}, text)
        return
    if not messaging.context:
        raise WrongUsage("No context is configured; pass --context, or set context under [messaging].")
    target = target_from_url(session, settings.to)
    async with (
        opened(
            lambda: open_monitored_capture(messaging, captured, target, settings), is_patient=not once
        ) as (capture, monitor),
        running(session, capture.stop),
    ):
        if once:
            await capture.run_once()
        else:
            session.out.note(f"Capturing {captured.table} for {target.shown_url}.")
            with monitoring(session, metrics_port, monitor):
                await capture.run()
    counts = capture.counts
    session.out.result(counts, f"{counts.published:,} published, {counts.held:,} held in the outbox table")


def capture_settings(session: Session, table: str | None = None) -> "CaptureSettings":
    """Return the settings of `[capture]`; `table` takes precedence.

    Raises: WrongUsage if no table is configured.
    """
    from postroom.adapters.compose.outbox import CaptureSettings

    if table is None and "table" not in session.settings.sections.get("capture", {}):
        raise WrongUsage("No table is configured; pass --table, or set table under [capture].")
    return session.settings.section("capture", CaptureSettings, {"table": table})
