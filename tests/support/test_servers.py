"""The servers that tests and demos run on keep what they stored when they are killed."""

import subprocess
import sys
from pathlib import Path

import nats
import psycopg
import pytest
from redis import Redis

from postroom.domain.errors import Unavailable
from tests.support.servers.nats import NatsServer
from tests.support.servers.postgres import PostgresServer, created_databases
from tests.support.servers.redis import RedisServer


def test_postgres_comes_back_at_the_same_address_with_what_was_committed(
    postgres_server: PostgresServer,
) -> None:
    url = postgres_server.create_database()
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE kept (id INT)")
    postgres_server.kill()
    postgres_server.start()
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT count(*) FROM kept").fetchone() == (0,)


def test_postgres_comes_back_though_another_run_of_pytest_began(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    postgres_server.kill()
    another = tmp_path / "test_another.py"
    another.write_text("def test_that_has_a_folder(tmp_path): pass")
    subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", another], check=True)
    postgres_server.start()


async def test_nats_comes_back_at_the_same_address_with_what_it_acknowledged(tmp_path: Path) -> None:
    with NatsServer(tmp_path, sync_always=True) as server:
        client = await nats.connect(server.url)
        stream = client.jetstream()
        await stream.add_stream(name="KEPT", subjects=["kept"])
        await stream.publish("kept", b"1")
        await client.close()
        server.kill()
        server.start()
        client = await nats.connect(server.url)
        assert (await client.jetstream().stream_info("KEPT")).state.messages == 1
        await client.close()


def test_redis_comes_back_at_the_same_address_with_what_it_answered(tmp_path: Path) -> None:
    try:
        server = RedisServer(tmp_path, sync_always=True)
    except Unavailable as error:
        pytest.skip(str(error))
    with server, Redis.from_url(server.url) as client:
        client.xadd("kept", {"data": b"1"})
        server.kill()
        server.start()
        assert client.xlen("kept") == 1


def test_databases_of_tests_are_their_own(empty_database: str) -> None:
    with psycopg.connect(empty_database) as connection:
        assert connection.execute(
            "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'"
        ).fetchone() == (0,)


def test_databases_of_a_test_are_dropped_after_it(postgres_admin_url: str, empty_database: str) -> None:
    with created_databases(postgres_admin_url) as create:
        copy = create(empty_database)
        psycopg.connect(copy).close()
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(copy)
