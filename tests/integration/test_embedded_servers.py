"""The servers that tests and demos run on keep what they stored when they are killed."""

from pathlib import Path

import nats
import psycopg
import pytest
from redis import Redis

from postroom.adapters.embedded.nats import NatsServer
from postroom.adapters.embedded.postgres import PostgresServer
from postroom.adapters.embedded.redis import RedisServer
from postroom.domain.errors import Unavailable


def test_postgres_comes_back_at_the_same_address_with_what_was_committed(tmp_path: Path) -> None:
    with PostgresServer(tmp_path) as server:
        url = server.create_database()
        with psycopg.connect(url) as connection:
            connection.execute("CREATE TABLE kept (id INT)")
        server.kill()
        server.start()
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT count(*) FROM kept").fetchone() == (0,)


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
