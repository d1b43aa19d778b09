"""`postroom project follow`: the read models are kept up to date."""

import asyncio
import signal
from contextlib import AsyncExitStack
from typing import Annotated

from typer import Option

from postroom.adapters.cli.contexts import refreshed_contexts
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import WrongUsage

ENGINES = ("local", "spark")


async def follow(
    session: Session,
    engine: Annotated[
        str, Option(metavar="local|spark", help="Without a JVM, or as a structured stream of Spark.")
    ] = "local",
    once: Annotated[bool, Option("--once", help="Catch up with what is there, then end.")] = False,
    batch: Annotated[int, Option(metavar="N", min=1, help="Log records applied at once, at most.")] = 50_000,
    checkpoint: Annotated[
        str | None, Option(metavar="FOLDER", help="Where Spark keeps its notes; losing it loses nothing.")
    ] = None,
    metrics_port: Annotated[
        int | None,
        Option(metavar="PORT", min=0, max=65_535, help="Serve OpenMetrics at 127.0.0.1:PORT/metrics."),
    ] = None,
) -> None:
    """Keep the read models up to date behind the logs, until interrupted.

    One process at a time follows a store; others stand by and take over. A rebuild may run beside it.
    """
    if engine not in ENGINES:
        raise WrongUsage(f"--engine {engine!r} must be one of {', '.join(ENGINES)}.")
    store = session.existing_store()
    from postroom.adapters.compose.follow import open_follower

    with (
        open_follower(
            store, "spark" if engine == "spark" else "local", checkpoint=checkpoint, most_events=batch
        ) as running,
        refreshed_contexts(session, store),
    ):
        async with AsyncExitStack() as opened:
            if metrics_port is not None:
                url = await opened.enter_async_context(running.serve_metrics(metrics_port))
                session.out.note(f"Metrics at {url}.")
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, running.stop)
            if not once:
                session.out.note(f"Following {session.shown_store}.")
            await asyncio.to_thread(lambda: running.run(once=once))
    counts = running.counts
    if session.out.as_json:
        session.out.json(counts)
    else:
        session.out.line(
            f"Version {counts.version}: {counts.events:,} events in {counts.batches:,} batches "
            f"({counts.seconds:.1f} s), {counts.parked:,} parked"
        )
