"""`postroom project follow`: keep the read models up to date."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated

from typer import Option

from postroom.adapters.cli.contexts import refresh_contexts
from postroom.adapters.cli.monitoring import MetricsPort, monitoring
from postroom.adapters.cli.running import opened, running
from postroom.adapters.cli.session import Session
from postroom.application.pluralize import pluralize
from postroom.domain.errors import NotFound, Unavailable

if TYPE_CHECKING:
    from postroom.adapters.compose.follow import RunningFollower


async def follow(
    session: Session,
    once: Annotated[bool, Option("--once", help="Catch up with the log, then exit.")] = False,
    batch: Annotated[
        int, Option(metavar="N", min=1, help="Maximum number of log records in a batch.")
    ] = 300_000,
    into: Annotated[
        str | None,
        Option(metavar="TARGET", help="Update read models in clickhouse: or chdb: instead of the store's."),
    ] = None,
    metrics_port: MetricsPort = None,
) -> None:
    """Apply new log records to the read models continuously, until interrupted.

    One process at a time follows a store into one place; others stand by to take over. A rebuild may run
    at the same time.
    """
    async with opened(lambda: _open(session, batch, into), is_patient=not once) as follower:
        with monitoring(session, metrics_port, follower.monitor):
            if not once:
                session.out.note(f"Following {session.shown_store}.")
            async with running(session, follower.stop):
                await asyncio.to_thread(lambda: follower.run(once=once))
    counts = follower.counts
    session.out.result(
        counts,
        f"Version {counts.version}: {pluralize(counts.events, 'log record')} "
        f"in {pluralize(counts.batches, 'batch', 'batches')} "
        f"({counts.seconds:.1f} s), {counts.parked:,} parked",
    )


@asynccontextmanager
async def _open(session: Session, batch: int, into: str | None) -> "AsyncIterator[RunningFollower]":
    """Open the follower; raise Unavailable while the store, whose folder exists, is not created yet."""
    try:
        store = session.existing_store()
    except NotFound as error:
        session.writable_store()
        raise Unavailable(f"There is no store at {session.store} yet; `follow` waits for it.") from error
    from postroom.adapters.compose.follow import open_follower

    with (
        open_follower(store, max_events=batch, into=into) as follower,
        refresh_contexts(session, store),
    ):
        yield follower
