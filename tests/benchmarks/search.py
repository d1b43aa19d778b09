"""Latency of searches in a long history: by header, by custom header and by word."""

import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from statistics import quantiles

import psycopg
from msgspec.structs import replace

from postroom.adapters.compose.projections import rebuild_projections
from postroom.adapters.compose.queries import read_projections
from postroom.domain.search import EventFilter
from tests.benchmarks.figures import Figures, Stopwatch
from tests.benchmarks.options import ORIGINALS, PRINCIPALS, TOPICS, Database, Options
from tests.benchmarks.pipeline.script import script

SEARCHES = 1_000
SIZE_GOAL = 2
"""How many times the bytes of the log the search model may take where payloads and headers differ."""
GOAL = 10
"""How many times as long as a bare page, both in their 99th percentiles, a search by headers may take."""
BARE_PAGE = "SELECT * FROM {} ORDER BY timestamp DESC, id DESC LIMIT 101"
WITHOUT_ENVELOPES = {"envelopes": False} if "envelopes" in EventFilter.__struct_fields__ else {}
"""As the HTTP service searches; older code has no such choice."""
Filters = tuple[Callable[[], EventFilter], ...]


@contextmanager
def bare_pages(database: Database, store: str) -> Iterator[Callable[[], object]]:
    """Yield a function that reads the newest page by the database's driver: a slow day slows both."""
    if database == "postgres":
        with closing(psycopg.connect(store, autocommit=True)) as connection:
            row = connection.execute(script("version_postgres.sql").encode()).fetchone()
            assert row is not None
            statement = BARE_PAGE.format(f"postroom.mailbox_v{row[0]}").encode()
            yield lambda: connection.execute(statement).fetchall()
    else:
        with closing(sqlite3.connect(f"{store}-views")) as views:
            (version,) = views.execute(script("version_sqlite.sql")).fetchone()
            page = BARE_PAGE.format(f"mailbox_v{version}")
            yield lambda: views.execute(page).fetchall()


def measure_search(
    figures: Figures, database: Database, store: str, requests: int, name: str = "search"
) -> None:
    """Search a store with messages of `PRINCIPALS`, `TOPICS` and seven regions, one filter after the other.

    Arguments:
        requests: how many correlation ids there are.
        name: of the figures.
    """
    chance = Random(7)

    def user() -> str:
        return f"user-{chance.randrange(PRINCIPALS)}"

    headers: Filters = (
        lambda: EventFilter(principals=(user(),)),
        lambda: EventFilter(correlation_id=f"request-{chance.randrange(requests)}"),
        lambda: EventFilter(topics=(f"bench.t{chance.randrange(TOPICS)}",)),
        lambda: EventFilter(topics=("bench.t1*",), principals=(user(),)),
        lambda: EventFilter(limit=100),
    )
    words: Filters = (
        lambda: EventFilter(match=user()),
        lambda: EventFilter(match=f"{user()} r{chance.randrange(7)}"),
        lambda: EventFilter(match=f"bench.t{chance.randrange(TOPICS)}"),
        lambda: EventFilter(match=f"{chance.randrange(10, 100)}*"),
        lambda: EventFilter(match=f"r{chance.randrange(7)}", topics=(f"bench.t{chance.randrange(TOPICS)}",)),
        lambda: EventFilter(match="region nowhere"),
    )
    custom: Filters = (
        lambda: EventFilter(headers={"region": f"r{chance.randrange(7)}"}),
        lambda: EventFilter(headers={"region": f"r{chance.randrange(7)}"}, principals=(user(),)),
        lambda: EventFilter(headers={"region": "nowhere"}),
    )
    with read_projections(store) as projections, bare_pages(database, store) as read_bare_page:
        for kind, filters in (("", headers), (".custom", custom), (".words", words)):
            seconds, bare = [], []
            for n in range(SEARCHES):
                filter_ = filters[n % len(filters)]()
                with Stopwatch() as searching:
                    projections.search_messages(replace(filter_, **WITHOUT_ENVELOPES))
                seconds.append(searching.seconds)
                with Stopwatch() as reading:
                    read_bare_page()
                bare.append(reading.seconds)
            cuts, bare_cuts = quantiles(seconds, n=100), quantiles(bare, n=100)
            figures.add(f"{database}.{name}{kind}.p50", cuts[49] * 1_000, "ms")
            figures.add(f"{database}.{name}{kind}.p99", cuts[98] * 1_000, "ms")
            goal = GOAL if filters is headers else None
            figures.add(f"{database}.{name}{kind}.p99.of_bare_page", cuts[98] / bare_cuts[98], "x", goal)


def measure_sizes(figures: Figures, database: Database, store: str) -> None:
    """Add the megabytes of each table and index of the search model, and their sum by that of the log."""
    if database == "postgres":
        with closing(psycopg.connect(store)) as connection:
            sizes = dict(connection.execute(script("sizes_postgres.sql").encode()).fetchall())
    else:
        with closing(sqlite3.connect(f"{store}-views")) as views:
            sizes = dict(views.execute(script("sizes_sqlite.sql")).fetchall())
        sizes["log"] = Path(store).stat().st_size
    models = {name: size for name, size in sizes.items() if re.search(r"_v\d+", name)}
    log = sum(size for name, size in sizes.items() if name.startswith("log"))
    for name, size in models.items():
        if size > sum(models.values()) / 1_000:
            figures.add(f"{database}.sizes.{name}", size / 1e6, "MB")
    figures.add(f"{database}.sizes.log", log / 1e6, "MB")
    figures.add(f"{database}.sizes.models_of_log", sum(models.values()) / log, "x", SIZE_GOAL)


def measurements(options: Options) -> dict[str, Callable[[Figures, Path, int], None]]:
    """Return the measurement of search in PostgreSQL; SQLite's is made where its long history is."""

    def measure(figures: Figures, folder: Path, messages: int) -> None:
        # Imported late: it writes logs in the format of this code; older code is measured, too.
        from tests.benchmarks.spark import open_store

        with open_store("postgres", messages, options, figures, folder) as (store, log):
            rebuild_projections(store, lambda _: None, only=("search",))
            measure_search(figures, "postgres", store, min(log.messages, ORIGINALS) // 2)

    return {"postgres.search": measure}
