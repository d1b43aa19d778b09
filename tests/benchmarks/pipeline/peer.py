"""Make the search model of a store by one of the peers, and print what took how long as JSON.

Runs as `python -m tests.benchmarks.pipeline.peer PEER TARGET`, a process for each run, with
the store in `POSTROOM_STORE`, where no process list shows its password.
"""

import os
import sys
from pathlib import Path

import msgspec

from tests.benchmarks.pipeline.clock import Clock
from tests.benchmarks.pipeline.frames import fold_with_duckdb, fold_with_polars

PEERS = ("polars", "duckdb", "floor")
"""What is measured beside the rebuild; `floor` folds nothing: it is what none can be much faster than."""
_FOLDS = {"polars": fold_with_polars, "duckdb": fold_with_duckdb}


def make(peer: str, store: str, target: Path) -> dict[str, float]:
    """Make the search model, and return the seconds of each phase.

    Arguments:
        peer: one of `PEERS`.
        store: path of a SQLite store, or URL of a PostgreSQL one, whose read models were built before.
        target: the file to make; in PostgreSQL it is the schema `bench` instead.
    """
    clock = Clock()
    if store.startswith(("postgresql://", "postgres://")):
        from tests.benchmarks.pipeline import postgres

        match peer:
            case "floor":
                postgres.floor(store, clock)
            case _:
                postgres.by_frames(store, clock, _FOLDS[peer])
    else:
        from tests.benchmarks.pipeline import sqlite

        match peer:
            case "floor":
                sqlite.floor(store, target, clock)
            case _:
                sqlite.by_frames(store, target, clock, _FOLDS[peer])
    return clock.seconds


if __name__ == "__main__":
    seconds = make(sys.argv[1], os.environ["POSTROOM_STORE"], Path(sys.argv[2]))
    sys.stdout.write(msgspec.json.encode(seconds).decode() + "\n")
