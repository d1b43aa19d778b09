"""`postroom outbox`: the relay, capture of tables, and administration of an outbox."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, NamedTuple
from uuid import UUID

import msgspec
from typer import Argument, Option

from postroom.adapters.cli.dlq import DISCARDED, Remark, check_selection, report, show_backlog, show_cleanup
from postroom.adapters.cli.filters import takes
from postroom.adapters.cli.remote import TARGET_EXTRAS, event_target, scheme_of
from postroom.adapters.cli.running import monitoring, opened, running
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import Database, MetricsPort, Nats, WrongUsage, parse_duration
from postroom.application.extras import explain_missing_extra
from postroom.application.metrics import Metric, Monitor
from postroom.application.outbox.formats import FormatName
from postroom.application.text import pluralize

if TYPE_CHECKING:
    from postroom.adapters.compose.outbox import CaptureSettings, MessagingSettings, OutboxSettings
    from postroom.application.outbox.relay import OutboxRelay


Context = Annotated[
    str | None,
    Option("--context", metavar="NAME", help="First token of the events' subjects. [messaging.context]"),
]
EventId = Annotated[list[str], Argument(metavar="ID...", help="Ids of events.")]


class Publishing(NamedTuple):
    """Target and form of the messages that a command publishes.

    Arguments:
        names_target: whether the command has the option `--to`.
    """

    settings: "OutboxSettings"
    names_target: bool


def publishing(
    session: Session,
    to: Annotated[
        str | None,
        Option(
            metavar="URL",
            help="Target: nats://, kafka://, amqp:// or mailbox:ADDRESS#NAME. [outbox.to, or nats.url]",
        ),
    ] = None,
    topic: Annotated[
        str | None,
        Option(
            metavar="TEMPLATE",
            help="Subject, topic or routing key, such as {context}.{aggregate_type}. [outbox.topic]",
        ),
    ] = None,
    exchange: Annotated[
        str | None,
        Option(metavar="NAME", help="Exchange of RabbitMQ; default: its default exchange. [outbox.exchange]"),
    ] = None,
    format_: Annotated[
        FormatName | None, Option("--format", help="Form of the messages. [outbox.format]")
    ] = None,
    source: Annotated[
        str | None,
        Option(
            metavar="URI",
            help="Source of CloudEvents, such as https://shop.example/orders. [outbox.source]",
        ),
    ] = None,
) -> "Publishing":
    """Return the settings of `[outbox]`, in which options of the command take precedence.

    Raises: WrongUsage for a `source` if events are not published as CloudEvents.
    """
    from postroom.application.outbox.relay import OutboxSettings

    options = {"to": to, "topic": topic, "exchange": exchange, "format": format_, "source": source}
    settings = session.settings.section("outbox", OutboxSettings, options)
    if source and settings.format == "postroom":
        raise WrongUsage(
            "--source is an attribute of CloudEvents; pass --format cloudevents-binary or "
            "cloudevents-structured, or set format under [outbox]."
        )
    return Publishing(settings, to is not None)


@takes(publishing)
async def relay(
    session: Session,
    options: "Publishing",
    once: Annotated[bool, Option("--once", help="Publish the pending events, then exit.")] = False,
    database: Database = None,
    context: Context = None,
    nats: Nats = None,
    metrics_port: MetricsPort = None,
) -> None:
    """Publish the events of an outbox to NATS JetStream, Kafka, RabbitMQ or a mailbox, until interrupted.

    Several relays share the events and preserve the order of each aggregate.
    """
    settings = options.settings
    if nats is not None:
        if options.names_target:
            raise WrongUsage("--to and --nats both name a target; pass one of them.")
        settings = msgspec.structs.replace(settings, to=None)
    with explain_missing_extra(TARGET_EXTRAS[scheme_of(settings.to)]):
        from postroom.adapters.compose.outbox import open_monitored_relay

        messaging, _ = _settings(session, database, context)
    target = event_target(session, messaging, settings.to, nats)
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


class ConfiguredRelay:
    """The relay that `[messaging]` and `[outbox]` describe, in a process that does more than relay.

    Raises: the errors of `relay` for settings that can't be used.
    """

    def __init__(self, session: Session) -> None:
        settings, _ = publishing(session)
        with explain_missing_extra(TARGET_EXTRAS[scheme_of(settings.to)]):
            from postroom.adapters.compose.outbox import open_monitored_relay

            messaging, _ = _settings(session, None)
        target = event_target(session, messaging, settings.to)
        self._open = partial(open_monitored_relay, messaging, target, settings)
        self._relay: OutboxRelay | None = None
        self._monitor: Monitor | None = None
        self._is_stopped = False

    async def run(self) -> None:
        """Publish events until stopped."""
        async with self._open() as (self._relay, self._monitor):
            try:
                if not self._is_stopped:
                    await self._relay.run()
            finally:
                self._monitor = None

    def stop(self) -> None:
        """End after the current batch."""
        self._is_stopped = True
        if self._relay is not None:
            self._relay.stop()

    async def measure(self) -> Sequence[Metric]:
        """Return the metrics of the relay while it runs."""
        return () if self._monitor is None else await self._monitor.collect()

    async def find_missing(self) -> list[str]:
        """Return the names of the servers that the relay can't use."""
        return [] if self._monitor is None else await self._monitor.find_missing()


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

    Rows that a capture could not read are read again, with the current settings of [capture].
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


@takes(publishing)
async def capture(
    session: Session,
    options: "Publishing",
    create: Annotated[
        bool,
        Option("--create", help="Create the publication and the replication slot if missing, then exit."),
    ] = False,
    once: Annotated[bool, Option("--once", help="Publish the committed rows, then exit.")] = False,
    table: Table = None,
    database: Database = None,
    context: Context = None,
    metrics_port: MetricsPort = None,
) -> None:
    """Publish the rows that any service inserts into a table, read by logical decoding, until interrupted.

    One process at a time reads the replication slot; a second one takes over when it ends.
    """
    settings = options.settings
    with explain_missing_extra(TARGET_EXTRAS[scheme_of(settings.to)]):
        from postroom.adapters.compose.outbox import create_slot, open_monitored_capture

        messaging, _ = _settings(session, database, context)
    captured = capture_settings(session, table)
    if create:
        is_new = await create_slot(messaging, captured)
        slot = f"replication slot {captured.slot}"
        text = f"created {slot}" if is_new else f"{slot} exists"
        session.out.result({"slot": captured.slot, "created": is_new}, text)
        return
    target = event_target(session, messaging, settings.to)
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
