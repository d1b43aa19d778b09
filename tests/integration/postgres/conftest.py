"""Logs in a store of PostgreSQL, opened by tests."""

from collections.abc import Iterator
from contextlib import ExitStack, closing

import psycopg
import pytest

from postroom.adapters.postgres.database import Connection
from postroom.adapters.postgres.event_log import PostgresEventLog
from tests.conformance.log_store import ONE
from tests.integration.postgres.event_logs import Open


@pytest.fixture
def url(postgres_store: str) -> str:
    return postgres_store


@pytest.fixture
def open_log(url: str) -> Iterator[Open]:
    """Open logs; all are closed when the test is over."""
    with ExitStack() as opened:
        yield lambda mailbox=ONE, url=url, **options: opened.enter_context(
            closing(PostgresEventLog(url, mailbox, **options))
        )


@pytest.fixture
def database(url: str) -> Iterator[Connection]:
    """Somebody else's connection."""
    with closing(psycopg.connect(url, autocommit=True)) as connection:
        yield connection
