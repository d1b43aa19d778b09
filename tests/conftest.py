import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import nats
import psycopg
import pytest
import sqlalchemy
from hypothesis import HealthCheck, settings
from psycopg import sql

from postroom.adapters.embedded.nats import NatsServer
from postroom.adapters.embedded.postgres import PostgresServer
from postroom.adapters.embedded.redis import RedisServer
from postroom.adapters.postgres.migrate import migrate
from postroom.domain.errors import Unavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.fixtures import OpenReadModels

# The machine's speed says nothing about the code: no example is failed for being slow.
settings.register_profile(
    "default",
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
# The gate tries the same examples every time: what it says of a change is about that change.
settings.register_profile("gate", parent=settings.get_profile("default"), derandomize=True, database=None)
# HYPOTHESIS_PROFILE=thorough looks much longer, for a night or before a release.
settings.register_profile(
    "thorough",
    parent=settings.get_profile("default"),
    max_examples=5_000,
    stateful_step_count=100,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture
def read_models() -> "Iterator[OpenReadModels]":
    """Open read models of stores; all are closed when the test is over."""
    from postroom.adapters.compose import open_read_models

    with ExitStack() as opened:
        yield lambda store: opened.enter_context(closing(open_read_models(str(store))))


@pytest.fixture(scope="session")
def spark() -> "Iterator[SparkSession]":
    """One small Spark session for the whole run; its start costs more than all its tests."""
    from postroom.projections.session import QUIET, start_session

    session = start_session(
        {
            "spark.master": "local[2]",
            "spark.sql.shuffle.partitions": "1",
            "spark.sql.adaptive.enabled": "false",
            "spark.driver.memory": "1g",
            "spark.driver.extraJavaOptions": f"-XX:TieredStopAtLevel=1 {QUIET}",
        }
    )
    yield session
    session.stop()


@pytest.fixture
def nats_url(tmp_path: Path) -> Iterator[str]:
    """The address of a NATS server with JetStream on which there are no streams yet."""
    given = os.environ.get("POSTROOM_TEST_NATS_URL")
    if given:
        asyncio.run(_delete_streams(given))
        yield given
    else:
        with NatsServer(tmp_path / "nats") as server:
            yield server.url


async def _delete_streams(url: str) -> None:
    client = await nats.connect(url)
    for stream in await client.jetstream().streams_info():
        await client.jetstream().delete_stream(stream.config.name or "")
    await client.close()


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Redis server; what a test keeps there has a name of its own."""
    given = os.environ.get("POSTROOM_TEST_REDIS_URL")
    if given:
        yield given
        return
    try:
        server = RedisServer(tmp_path_factory.mktemp("redis"))
    except Unavailable as error:
        pytest.skip(str(error))
    with server:
        yield server.url


@pytest.fixture(scope="session")
def postgres_admin_url() -> Iterator[str]:
    """The address of a PostgreSQL server, as somebody who may create databases."""
    given = os.environ.get("POSTROOM_TEST_POSTGRES_URL")
    if given:
        yield given
    else:
        # Not among pytest's own folders: the next run to start closes those to the server's user.
        with TemporaryDirectory(prefix="postroom-tests-") as folder, PostgresServer(Path(folder)) as server:
            yield server.url()
            server.kill()  # writing to disk what goes at once takes long


@pytest.fixture(scope="session")
def create_database(postgres_admin_url: str) -> Iterator[Callable[[str | None], str]]:
    """Create databases, each a copy of the one at the given URL or empty; none is there in the end."""
    names = (f"postroom_test_{os.getpid()}_{n}" for n in count(1))
    created: list[str] = []

    def create(template_url: str | None) -> str:
        template = urlsplit(template_url).path[1:] if template_url else "template1"
        name = next(names)
        with psycopg.connect(postgres_admin_url, autocommit=True) as connection:
            connection.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
                    sql.Identifier(name), sql.Identifier(template)
                )
            )
        created.append(name)
        return urlsplit(postgres_admin_url)._replace(path=f"/{name}").geturl()

    yield create
    if "POSTROOM_TEST_POSTGRES_URL" not in os.environ:
        return  # they go with their server, without a checkpoint for each
    with psycopg.connect(postgres_admin_url, autocommit=True) as connection:
        for name in created:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def empty_database(create_database: Callable[[str | None], str]) -> str:
    """The address of an empty PostgreSQL database."""
    return create_database(None)


@pytest.fixture(scope="session")
def messaging_template(create_database: Callable[[str | None], str]) -> str:
    """The address of a database with the tables of outbox and inbox, to be copied and never written to."""
    url = create_database(None)
    migrate(url, "messaging")
    return url


@pytest.fixture
def messaging_database(create_database: Callable[[str | None], str], messaging_template: str) -> str:
    """The address of a service's own database with empty outbox and inbox."""
    return create_database(messaging_template)


@pytest.fixture
def engine(messaging_database: str) -> Iterator[sqlalchemy.Engine]:
    """SQLAlchemy's way into `messaging_database`."""
    made = sqlalchemy.create_engine(messaging_database.replace("postgresql://", "postgresql+psycopg://"))
    yield made
    made.dispose()


@pytest.fixture(scope="session")
def postgres_store_template(create_database: Callable[[str | None], str]) -> str:
    """The address of an empty PostgreSQL store, to be copied and left alone."""
    from postroom.adapters.postgres.migrate import migrate

    url = create_database(None)
    migrate(url, "store")
    return url


@pytest.fixture
def postgres_store(create_database: Callable[[str | None], str], postgres_store_template: str) -> str:
    """The address of an empty PostgreSQL store."""
    return create_database(postgres_store_template)
