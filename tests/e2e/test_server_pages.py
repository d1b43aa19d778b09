"""Pages whose commands use servers do what they show, on real ones."""

import asyncio
import re
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import nats
import psycopg
import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pgmq.install import get_embedded_install_sql
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.orm import Session as OrmSession

from postroom import NewMessage, connect
from tests.e2e.conftest import ROOT, Postroom
from tests.support.captures import LOGICAL
from tests.support.servers.clickhouse import clickhouse_server
from tests.support.servers.postgres import PostgresServer, postgres_folder
from tests.support.servers.process import free_port
from tests.support.waiting import wait_until

BOTH = ("console", "sh")
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
QUERY = """
import sqlite3, sys

with sqlite3.connect(sys.argv[1]) as database:
    for row in database.execute(open(sys.argv[2]).read()):
        print(*row)
"""


def read(name: str) -> str:
    return (ROOT / "docs" / name).read_text("utf-8")


def replace(page: str, *pairs: tuple[str, str]) -> str:
    """Return a page with other texts; each that is replaced is there."""
    for shown, real in pairs:
        assert shown in page, shown
        page = page.replace(shown, real)
    return page


def with_ports(page: str, *ports: int) -> str:
    """Return a page with free ports."""
    for port in ports:
        assert re.search(rf"\b{port}\b", page), port
        page = re.sub(rf"\b{port}\b", str(free_port()), page)
    return page


def with_programs(page: str, folder: Path, **commands: str) -> str:
    """Return a page whose programs without names are commands that run them.

    Arguments:
        commands: command of a language, with `{}` for its file.
    """
    numbers = count(1)

    def write(block: re.Match[str]) -> str:
        indent, language, code = block.groups()
        if language not in commands or re.match(r"# \S+\n", code):
            return block[0]
        file = f"block-{next(numbers)}.{language}"
        (folder / file).write_text(re.sub(f"^{indent}", "", code, flags=re.MULTILINE))
        return f"```sh\n{commands[language].format(file)}\n```"

    return re.sub(r"^( *)```(\w+)\n(.*?)^ *```$", write, page, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def logical_server() -> Iterator[PostgresServer]:
    """A PostgreSQL server with logical decoding."""
    with postgres_folder() as folder, PostgresServer(folder, LOGICAL) as server:
        yield server


def send(store: Path, *messages: NewMessage) -> None:
    with connect(str(store)) as mailbox:
        mailbox.send_batch(messages)


def add_streams(url: str, **subjects: str) -> None:
    async def add() -> None:
        client = await nats.connect(url)
        for name, subject in subjects.items():
            await client.jetstream().add_stream(name=name, subjects=[subject])
        await client.close()

    asyncio.run(add())


def test_sqs(postroom: Postroom) -> None:
    page = with_ports(read("sqs.md"), 8080, 9324, 8081, 9325)
    (port,) = re.findall(r"at http://127\.0\.0\.1:(\d+), http", page)
    postroom.environment["POSTROOM_SERVE__HTTP"] = f"127.0.0.1:{port}"
    assert len(postroom.run_page(page, BOTH)) == 8


@needs_curl
def test_cloudevents(postroom: Postroom) -> None:
    page = with_ports(read("cloudevents.md"), 8080)
    (address,) = re.findall(r"127\.0\.0\.1:\d+", page)
    postroom.run_on(f"postroom serve --dev --http {address}", lambda printed: True)
    assert len(postroom.run_page(page)) == 1


def test_owners_and_a_cluster_on_one_machine(postroom: Postroom) -> None:
    (postroom.folder / "query.py").write_text(QUERY)
    page = with_ports(read("cluster.md"), 8981, 7400, 8983, 8984)
    page = with_programs(page, postroom.folder, python="python {}", sql="python query.py admin.db {}")
    page = replace(
        page, ("```sh\npostroom own", "```sh\nenv postroom own")
    )  # it starts itself, so it is no fork
    assert len(postroom.run_page(page, BOTH)) == 8


@needs_curl
def test_service(postroom: Postroom) -> None:
    postroom.environment["POSTROOM_SERVE__HTTP"] = "127.0.0.1:0"
    page = with_ports(read("service.md"), 8080)
    assert len(postroom.run_page(page, BOTH)) == 10


def test_follower_and_export_and_metrics(postroom: Postroom) -> None:
    send(postroom.store, *(NewMessage(f"github.{each}", b"{}") for each in ("push", "fork", "star")))
    assert len(postroom.run_page(read("following.md"), BOTH)) == 4
    assert len(postroom.run_page(read("export.md"))) == 1
    postroom.close()
    folder = f"{postroom.folder}/"
    page = with_ports(replace(read("observability.md"), ("/etc/prometheus/", folder)), 9101)
    postroom.ok("token", "rotate")
    assert len(postroom.run_page(page, BOTH)) == 2


def test_an_added_projection_and_sql(postroom: Postroom) -> None:
    send(postroom.store, NewMessage("orders", b"1", correlation_id="trace-abc123"))
    postroom.ok("views", "rebuild")
    (postroom.folder / "query.py").write_text(QUERY)
    page = with_programs(read("projections.md"), postroom.folder, sql="python query.py postroom.db-views {}")
    page = replace(page, ("/srv/projections", str(postroom.folder)))
    assert len(postroom.run_page(page, BOTH)) == 4


def test_the_console_and_all_that_shows_it(postroom: Postroom) -> None:
    postroom.ok("token", "rotate")
    postroom.environment["POSTROOM_SERVE__HTTP"] = "127.0.0.1:0"
    send(postroom.store, NewMessage("orders", b"1"))
    postroom.folder.joinpath("billing.toml").write_text('store = "billing.db"\n')
    page = replace(read("console.md"), ("postroom up  ", "postroom up --http 127.0.0.1:0  "))
    assert len(postroom.run_page(page, BOTH)) == 5


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
def test_command_line(postroom: Postroom) -> None:
    """But for the admin in JetStream: tests/integration/test_lease_store.py has three servers for it."""
    lines = re.findall(
        r"^(?:postroom recv.*jq.*|POSTROOM_STORE=.*|postroom admin --standalone.*)$",
        read("command-line.md"),
        re.MULTILINE,
    )
    assert len(lines) == 3
    postroom.ok("token", "rotate")
    postroom.ok("token", "mint", "till", "--operation", "send", "--out", "till.token")
    postroom.ok("send", "orders", "1")
    page = "\n".join(["```sh", *lines, "```"]).replace("/var/lib/postroom/", f"{postroom.folder}/")
    page = with_ports(page.replace("admin.db", "admin.db --listen 127.0.0.1:8981"), 8080, 8981)
    (address,) = re.findall(r"http://(127\.0\.0\.1:\d+)", page)
    postroom.run_on(f"postroom serve --http {address}", lambda printed: True)
    assert len(postroom.run_page(page, ("sh",))) == 3


def test_operations(postroom: Postroom, logical_server: PostgresServer) -> None:
    """Segments, and the end of a store in a schema."""
    store = logical_server.create_database()
    postroom.environment["PATH"] = f"{logical_server.programs}:{postroom.environment['PATH']}"
    for schema in ("postroom", "billing"):
        postroom.ok("migrate", "--store", f"{store}?schema={schema}")
    page = with_programs(
        read("operations.md"), postroom.folder, sql=f"psql -q -v ON_ERROR_STOP=1 {store} -f {{}}"
    )
    page = "\n".join(
        re.findall(r"^```sh\n(?:psql|postroom segments).*?^```$", page, re.MULTILINE | re.DOTALL)
    )
    with psycopg.connect(store) as connection:
        query = "SELECT FROM pg_available_extensions WHERE name = 'pg_trgm'"
        if not connection.execute(query).fetchall():
            (file,) = postroom.folder.glob("block-*.sql")
            file.write_text(re.sub("ALTER EXTENSION.*\n", "", file.read_text()))
    (postroom.folder / "postroom.toml").write_text('[archive]\nfolder = "archive"\n')
    send(postroom.store, *[NewMessage("orders", b"x")] * 10)
    postroom.ok("segments", "build", "--all")
    assert len(postroom.run_page(page, ("sh",))) == 5


def test_clickhouse(postroom: Postroom, tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("chdb")
    send(postroom.store, NewMessage("orders", b"1", attrs={"note": "refund"}))
    with clickhouse_server(tmp_path_factory.mktemp("clickhouse")) as server:
        page = replace(read("clickhouse.md"), ("clickhouse://user:password@host:8123/postroom", server.url))
        assert len(postroom.run_page(page, BOTH)) == 3
        postroom.close()


def test_capture(postroom: Postroom, logical_server: PostgresServer, kafka_servers: str) -> None:
    database = logical_server.create_database()
    with psycopg.connect(database) as connection:
        connection.execute("CREATE SCHEMA shop")
        connection.execute(
            "CREATE TABLE shop.events (id uuid PRIMARY KEY, order_id text, type text, body jsonb)"
        )
    page = replace(
        read("capture.md"), ("postgresql://shop@db/shop", database), ("kafka1:9092", kafka_servers)
    )
    assert len(postroom.run_page(page, BOTH)) == 4
    postroom.close()
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("SELECT pg_drop_replication_slot('postroom_outbox')")


def test_outbox(postroom: Postroom, empty_database: str, nats_url: str, kafka_servers: str) -> None:
    """But for RabbitMQ, which takes long to start: test_outbox_targets.py relays to it."""
    add_streams(nats_url, SEA="sea.event.>")
    page = replace(
        read("outbox.md"),
        ("postgresql://shop@db/shop", empty_database),
        ("nats://nats:4222", nats_url),
        ("kafka1:9092,kafka2:9092", kafka_servers),
        ("/var/lib/postroom/", f"{postroom.folder}/"),
        ("postroom outbox relay --to amqp://rabbit/shop --exchange sea.events\n", ""),
    )
    set_up, targets, failures = re.split("(?=## Targets)|(?=## When an event)", page)
    commands = postroom.run_page(set_up, BOTH)
    (program,) = re.findall(r"^```python\n(.*?)^```", set_up, re.MULTILINE | re.DOTALL)
    id_ = record(empty_database, program)
    commands += postroom.run_page(targets, BOTH)
    postroom.environment["ID"] = id_
    wait_until(lambda: bool(postroom.ok("outbox", "list", "--parked", "--json").lines))
    commands += postroom.run_page(failures, BOTH)
    assert len(commands) == 10


def record(database: str, program: str) -> str:
    """Run the program of the page, which records an event; return the id of one that can't be read."""

    class Base(DeclarativeBase):
        pass

    class Order(Base):
        __tablename__ = "orders"
        id: Mapped[str] = mapped_column(primary_key=True)

    engine = create_engine(database.replace("postgresql:", "postgresql+psycopg:"))
    Base.metadata.create_all(engine)
    request = SimpleNamespace(correlation_id="request 7")
    for each in ("o-1", "o-2"):
        exec(program, {"Session": OrmSession, "engine": engine, "order": Order(id=each), "request": request})
    engine.dispose()
    with psycopg.connect(database) as connection:
        changed = connection.execute(
            "UPDATE outbox_events SET occurred_at = '-infinity' WHERE aggregate_id = 'o-2' RETURNING id"
        ).fetchone()
    assert changed is not None
    return str(changed[0])


def test_sources(postroom: Postroom, nats_url: str, kafka_servers: str, redis_url: str) -> None:
    """But for RabbitMQ, which takes long to start: test_rabbitmq_source.py has its source."""
    add_streams(nats_url, ORDERS="orders.>", DEAD="dead.orders")
    admin = AdminClient({"bootstrap.servers": kafka_servers})
    for each in admin.create_topics(
        [NewTopic(name, 1, 1) for name in ("orders", "orders-dead", "clicks")]
    ).values():
        each.exception()  # another test may have created it
    page = replace(
        read("sources.md"),
        ("nats://localhost:4222", nats_url),
        ("kafka://localhost:9092", f"kafka://{kafka_servers}"),
        ("redis://localhost/0", redis_url),
    )
    page = re.sub("postroom ingest --url amqp://.*\n", "", page)
    assert len(postroom.run_page(page, BOTH)) == 4


def test_namespaces(postroom: Postroom, nats_url: str) -> None:
    add_streams(nats_url, ADMIN="admin.events.>")
    page = replace(read("namespaces.md"), ("nats://localhost:4222", nats_url))
    (file,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (postroom.folder / "namespaces.yaml").write_text(file)
    (postroom.folder / "admin.proto").write_text(
        'syntax = "proto3"; package admin; message UserCreatedEvent {}'
    )
    (postroom.folder / "audit.schema.json").write_text('{"type": "object"}')
    (protoc,) = re.findall(r"# protoc (.*)", file)
    postroom.run_on(f"python -m grpc_tools.protoc -I. {protoc}", lambda printed: True)
    assert len(postroom.run_page(page, BOTH)) == 2


def test_inbox(postroom: Postroom, empty_database: str, nats_url: str, service: str) -> None:
    """The worker, its handler, and dead letters."""
    with psycopg.connect(empty_database) as connection:
        connection.execute("CREATE TABLE orders (id text PRIMARY KEY, total numeric)")
    (postroom.folder / "key").write_text("0123456789abcdef0123456789abcdef")
    add_streams(nats_url, VIBESPRO_EVENTS="vibespro.event.>", SEA_DLQ="sea.dlq.>")
    page = replace(
        read("inbox.md"),
        ("postgresql://owner@db/sea", empty_database),
        ("postgresql://sea@db/sea", empty_database),
        ("postgresql+psycopg://sea@db/sea", empty_database.replace("postgresql:", "postgresql+psycopg:")),
        ("nats://nats:4222", nats_url),
        ("http://sea-handlers:8000", service),
        ("10.0.0.0/8", "127.0.0.0/8"),
        ("/run/secrets/postroom-signing-key", f"{postroom.folder}/key"),
    )
    page = with_programs(page, postroom.folder, sql=f"psql -q -v ON_ERROR_STOP=1 {empty_database} -f {{}}")
    start, handlers, dead_letters = re.split("(?=### Handlers by event type)|(?=## Dead letters)", page)
    programs = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (postroom.folder / "shop").mkdir()
    (postroom.folder / "shop" / "inbox.py").write_text("\n".join([programs[0], programs[-1]]))
    commands = postroom.run_page(start, BOTH)
    (id_,) = set(re.findall(r"discard (\S+)", dead_letters))
    commands += postroom.run_page(handlers, BOTH)
    other = "550e8400-e29b-41d4-a716-446655440001"
    publish_poison(nats_url, id_, other)

    def are_dead() -> bool:
        letters = postroom("inbox", "dlq", "list", "--json").out
        return id_ in letters and other in letters

    wait_until(are_dead)
    Refusal.status = 200
    commands += postroom.run_page(dead_letters, BOTH)
    assert len(commands) == 9


def publish_poison(url: str, *ids: str) -> None:
    async def publish() -> None:
        client = await nats.connect(url)
        for each in ids:
            headers = {"Nats-Msg-Id": each}
            await client.jetstream().publish("vibespro.event.vibe_created.v1", b"{}", headers=headers)
        await client.close()

    asyncio.run(publish())


class Refusal(BaseHTTPRequestHandler):
    """A handler of the inbox that can process nothing, at first."""

    status = 422

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[str]:
    Refusal.status = 422
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusal) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_other_systems(postroom: Postroom, kafka_servers: str, logical_server: PostgresServer) -> None:
    """Programs for SQS and Kafka, and SQL for pgmq, of docs/coming-from.md."""
    page = read("coming-from.md")
    programs = re.findall(r"^```(?:python|sql)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (sqs,) = (each for each in programs if "import boto3" in each)
    port = free_port()
    postroom.run_on(f"postroom serve --dev --http '' --sqs 127.0.0.1:{port}", lambda printed: True)
    postroom.environment |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
    }
    create = 'import boto3; boto3.client("sqs").create_queue(QueueName="mails")'
    assert postroom.shell(f"python -c '{create}'") == ""
    (postroom.folder / "sqs.py").write_text(sqs)
    assert postroom.shell("python sqs.py") == "hello\n"

    (kafka,) = (each for each in programs if "confluent_kafka" in each)
    admin = AdminClient({"bootstrap.servers": kafka_servers})  # kept: without it, no future ends
    admin.create_topics([NewTopic("clicks", 1, 1)])["clicks"].exception()  # another test may have created it
    (postroom.folder / "kafka.py").write_text(kafka.replace('"localhost"', f'"{kafka_servers}"'))
    assert postroom.shell("python kafka.py") == "clicks page 1\n"

    (pgmq,) = (each for each in programs if "pgmq" in each)
    with psycopg.connect(logical_server.create_database()) as connection:
        connection.execute(get_embedded_install_sql().encode())
        results = connection.execute(pgmq.encode())
        rows = [results.fetchall()]
        while results.nextset():
            rows.append(results.fetchall())
    assert rows[2] == [(1, 1, {"n": 1})]
    assert rows[3] == [(True,)]
