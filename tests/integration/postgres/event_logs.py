"""Commits and partitions of logs in PostgreSQL."""

from collections.abc import Callable
from typing import Any

from postroom.adapters.postgres.database import Connection
from postroom.adapters.postgres.event_log import PostgresEventLog
from tests.conformance.records import sent

Open = Callable[..., PostgresEventLog]
PARTITIONS = "SELECT relid::text FROM pg_partition_tree(%s) WHERE isleaf AND level = 1 ORDER BY 1"


def sents(count: int, start: int = 0) -> list[Any]:
    return [sent(number) for number in range(start, start + count)]


def partitions(database: Connection) -> list[str]:
    """Return the names of the log's partitions, after checking that the index has the same."""
    found = [
        [name for (name,) in database.execute(PARTITIONS, (table,))]
        for table in ("postroom.log", "postroom.log_index")
    ]
    assert found[1] == [name.replace("log_", "log_index_") for name in found[0]]
    return [name.removeprefix("postroom.") for name in found[0]]
