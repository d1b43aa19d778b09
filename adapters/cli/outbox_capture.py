"""`postroom outbox capture`: publish the rows of a table of any service."""

from typing import TYPE_CHECKING, Annotated

from typer import Option

from postroom.adapters.cli.messaging import Database
from postroom.adapters.cli.monitoring import MetricsPort, monitoring
from postroom.adapters.cli.outbox import Context
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
from postroom.adapters.cli.running import opened, running
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import WrongUsage
from postroom.application.extras import explain_missing_extra

if TYPE_CHECKING:
    from postroom.adapters.compose.capture import CaptureSettings

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
        from postroom.adapters.compose.capture import MessagingSettings, create_slot, open_monitored_capture

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
    from postroom.adapters.compose.capture import CaptureSettings

    if table is None and "table" not in session.settings.sections.get("capture", {}):
        raise WrongUsage("No table is configured; pass --table, or set table under [capture].")
    return session.settings.section("capture", CaptureSettings, {"table": table})
