"""What tokens cost mixed calls over HTTP: the rate with one in each call, beside that without."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

from postroom.adapters.compose.access import open_capabilities, open_key_ring
from tests.benchmarks.figures import RUNS, Figures
from tests.benchmarks.load.callers import open_http
from tests.benchmarks.load.loops import Work, closed_loop
from tests.benchmarks.load.owners import Owner, served

CALLERS, IN_FLIGHT = 32, 64
SECONDS = 3.0
GOAL = 10
"""How much lower the rate with tokens may be, in %."""


async def _measure(figures: Figures, folder: Path) -> None:
    """Measure both servers in turns, as the load of the machine changes."""
    async with AsyncExitStack() as opened:
        places: dict[str, tuple[Owner, Work]] = {}
        for name in ("without", "with"):
            path = folder / f"tokens-{name}"
            path.mkdir()
            store, token = str(path / "store.db"), None
            if name == "with":
                with open_capabilities(store, open_key_ring(store)) as capabilities:
                    capabilities.rotate()
                    token = capabilities.issue("bench")
            owner = opened.enter_context(served(store, path, "http", dev=token is None))
            caller = await opened.enter_async_context(open_http(owner.address, "bench.mixed", token))
            places[name] = owner, Work(caller)
            await places[name][1].prepare(IN_FLIGHT)
        rates: dict[str, list[float]] = {name: [] for name in places}
        cpu_us: dict[str, list[float]] = {name: [] for name in places}
        for _ in range(RUNS):
            for name, (owner, work) in places.items():
                before = owner.cpu_seconds()
                run = await closed_loop(work.mix, CALLERS, SECONDS)
                if run.refused or run.failures:
                    raise RuntimeError(f"Calls failed: {dict(run.details)}.")
                rates[name].append(run.rate)
                cpu_us[name].append(1e6 * (owner.cpu_seconds() - before) / run.calls)
    for name in places:
        figures.add(f"tokens.http.{name}", median(rates[name]), "calls/s")
        figures.add(f"tokens.http.{name}.cpu", median(cpu_us[name]), "us")
    cost = 100 - 100 * median(rates["with"]) / median(rates["without"])
    figures.add("tokens.http.cost", cost, "%", GOAL)


def _run(figures: Figures, folder: Path, _messages: int) -> None:
    asyncio.run(_measure(figures, folder))


MEASUREMENTS: dict[str, Callable[[Figures, Path, int], None]] = {"tokens.http.": _run}
