import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings

from postroom.domain.errors import Unavailable
from tests.support.fork_server import SHARED_IMPORTS
from tests.support.servers.process import memory_folder
from tests.support.servers.spark import archive_options

# The fixtures of servers import what they need themselves: unit tests run without the servers' packages.
if TYPE_CHECKING:
    import sqlalchemy
    from pyspark.sql import SparkSession

    from tests.support.certificates import Certificates
    from tests.support.fixtures import CreateDatabase, OpenReadModels
    from tests.support.servers.postgres import PostgresServer
    from tests.support.servers.rabbitmq import RabbitmqServer

# Tests start many hundred processes: without cached bytecode each of them would compile what it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Folders of tests are in memory where there is room: stores sync each of thousands of commits, and most tests
# would wait for a disk longer than for all else. None needs a disk: those of syncing watch the calls.
if folder := memory_folder():
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(folder))

# What would end this process and so all tests that are left, such as a timer of a command, fails a test.
_exit, _tests = os._exit, os.getpid()


def _exit_child(status: int) -> NoReturn:
    assert os.getpid() != _tests, "Code that a test called tried to end the process of the tests."
    _exit(status)


os._exit = _exit_child

# gRPC's fork handlers may start threads in a child that is about to run another program, and end it.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"

# For every JVM that `spark-submit` starts, also in commands that tests run.
os.environ.setdefault("SPARK_SUBMIT_OPTS", archive_options())

# Servers that tests start reload at SIGHUP, also where `nohup` runs the tests.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Commands, servers and workers are forks of a process that imported what most of them need.
SHARED_IMPORTS.append("tests.support.script_imports")

# No example fails for being slow: the speed depends on the machine.
settings.register_profile(
    "default",
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
# The gate tries the same examples in every run, so that its result depends on the change alone: a few of
# them, as they find nothing new.
settings.register_profile(
    "gate", parent=settings.get_profile("default"), max_examples=15, derandomize=True, database=None
)
# Suites whose examples take long, as each statement on chdb does.
settings.register_profile("brief", parent=settings.get_profile("gate"), max_examples=3)
# HYPOTHESIS_PROFILE=thorough searches much longer, for a nightly run or before a release.
settings.register_profile(
    "thorough",
    parent=settings.get_profile("default"),
    max_examples=5_000,
    stateful_step_count=100,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


# Files whose tests use the fixture `spark`, in halves that take about as long. The first two start Spark's
# processes of their own as well.
SPARK_FILES = {
    "tests/integration/spark/test_cluster.py": "spark 1",
    "tests/integration/spark/test_rebuild_crashes.py": "spark 1",
    "tests/integration/spark/test_delta.py": "spark 2",
    "tests/integration/spark/test_documentation.py": "spark 2",
    "tests/integration/spark/test_rebuild.py": "spark 2",
    "tests/integration/spark/test_reports.py": "spark 2",
    "tests/integration/spark/test_scan.py": "spark 2",
    "tests/integration/spark/test_source.py": "spark 2",
    "tests/integration/spark/test_source_stream.py": "spark 2",
    "tests/integration/spark/test_verify.py": "spark 2",
    "tests/properties/test_spark_agrees_with_reference.py": "spark 2",
}
GROUPS = SPARK_FILES | {
    "tests/conformance/test_rabbitmq_source.py": "rabbitmq",
    "tests/integration/test_broker_access.py": "rabbitmq",
    "tests/integration/test_outbox_targets.py": "rabbitmq",
}
"""Groups of files whose tests share a server that takes long to start."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run Spark's tests first and simulations next, which are long, and unit tests last, which are short.

    So all workers of `make test` end at the same time.
    """
    items.sort(
        key=lambda item: (
            item.nodeid.startswith("tests/unit/"),
            item.nodeid.partition("::")[0] not in SPARK_FILES,
            not item.nodeid.startswith("tests/simulation/"),
        )
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Have garbage collections pass over tests and modules, which live to the end of the run.

    While they are made, garbage collections would take a fifth of the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Keep the tests of a file on one worker, and those of a group, which start their server once.

    Markers of groups would say the same, but xdist 3.8 does not see them with pytest 9.2.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    scheduler = import_module("xdist.scheduler").LoadFileScheduling(config, log)
    group_of = scheduler._split_scope
    scheduler._split_scope = lambda nodeid: GROUPS.get(group_of(nodeid), group_of(nodeid))
    return scheduler


@pytest.fixture(autouse=True)
def _logging_configuration() -> Iterator[None]:
    """Begin each test without a level of logging; commands set one for their process, also in fixtures."""
    root, own = logging.getLogger(), logging.getLogger("postroom")
    handlers, level = root.handlers[:], root.level
    own.setLevel(logging.NOTSET)
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    own.setLevel(logging.NOTSET)


@pytest.fixture
def read_models() -> "Iterator[OpenReadModels]":
    """Open read models of stores; all are closed when the test is over."""
    from postroom.adapters.compose.queries import open_read_models

    with ExitStack() as opened:
        yield lambda store: opened.enter_context(closing(open_read_models(str(store))))


@pytest.fixture(scope="session")
def spark() -> "Iterator[SparkSession]":
    """One small Spark session for the whole run; its start costs more than all its tests."""
    from postroom.projections.spark.session import QUIET, SCHEDULER_OPTIONS, start_session

    session = start_session(
        {
            "spark.master": "local[2]",
            "spark.sql.shuffle.partitions": "1",
            "spark.sql.adaptive.enabled": "false",
            "spark.driver.memory": "1g",
            "spark.driver.extraJavaOptions": f"{SCHEDULER_OPTIONS} {QUIET}",
        }
    )
    yield session
    session.stop()


@pytest.fixture
def nats_url(tmp_path: Path) -> Iterator[str]:
    """The address of a NATS server with JetStream without streams."""
    from tests.support.servers.nats import NatsServer

    url = os.environ.get("POSTROOM_TEST_NATS_URL")
    if url:
        asyncio.run(_delete_streams(url))
        yield url
    else:
        with NatsServer(tmp_path / "nats") as server:
            yield server.url


async def _delete_streams(url: str) -> None:
    import nats

    client = await nats.connect(url)
    for stream in await client.jetstream().streams_info():
        await client.jetstream().delete_stream(stream.config.name or "")
    await client.close()


@pytest.fixture(scope="session")
def shared_nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a NATS server that syncs every write; every test uses names of its own."""
    from tests.support.servers.nats import NatsServer

    with NatsServer(tmp_path_factory.mktemp("nats"), sync_always=True) as server:
        yield server.url


@pytest.fixture
def jetstream_store(shared_nats_url: str) -> str:
    """The address of a store in JetStream that does not exist yet."""
    return f"{shared_nats_url}/STORE_{uuid4().hex[:12]}?sync=always"


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Redis server; every test uses names of its own."""
    from tests.support.servers.redis import RedisServer

    url = os.environ.get("POSTROOM_TEST_REDIS_URL")
    if url:
        yield url
        return
    try:
        server = RedisServer(tmp_path_factory.mktemp("redis"))
    except Unavailable as error:
        pytest.skip(str(error))
    with server:
        yield server.url


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> "Certificates":
    """Certificates of two authorities, and secrets, as files."""
    from tests.support.certificates import Certificates

    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def rabbitmq_server(
    certificates: "Certificates", tmp_path_factory: pytest.TempPathFactory
) -> "Iterator[RabbitmqServer]":
    """A RabbitMQ server with a user and TLS, which tests may pause; every test uses names of its own."""
    from tests.support.certificates import PASSWORD
    from tests.support.servers.rabbitmq import RabbitmqServer

    try:
        server = RabbitmqServer(
            tmp_path_factory.mktemp("rabbitmq"),
            tls=(*certificates.server, certificates.ca),
            login=("relay", PASSWORD),
        )
    except Unavailable as error:
        pytest.skip(str(error))
    with server:
        yield server


@pytest.fixture(scope="session")
def kafka_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Kafka broker; every test uses names of its own."""
    from tests.support.servers.kafka import KafkaServer

    if servers := os.environ.get("POSTROOM_TEST_KAFKA_SERVERS"):
        yield servers
        return
    try:
        server = KafkaServer(tmp_path_factory.mktemp("kafka"))
    except Unavailable as error:
        pytest.skip(str(error))
    with server:
        yield server.servers


@pytest.fixture(scope="session")
def postgres_admin_url() -> Iterator[str]:
    """The address of a PostgreSQL server, with the right to create databases."""
    from tests.support.servers.postgres import PostgresServer, postgres_folder

    url = os.environ.get("POSTROOM_TEST_POSTGRES_URL")
    if url:
        yield url
    else:
        with postgres_folder() as folder, PostgresServer(folder) as server:
            yield server.url()


@pytest.fixture
def postgres_server() -> "Iterator[PostgresServer]":
    """A PostgreSQL server of the test's own, which it may kill."""
    from tests.support.servers.postgres import PostgresServer, postgres_folder

    with postgres_folder() as folder, PostgresServer(folder) as server:
        yield server


@pytest.fixture(scope="session")
def create_shared_database(postgres_admin_url: str) -> "Iterator[CreateDatabase]":
    """Create databases that live until the end of the run, such as templates."""
    from tests.support.servers.postgres import created_databases

    with created_databases(postgres_admin_url) as create:
        yield create


@pytest.fixture
def create_database(postgres_admin_url: str) -> "Iterator[CreateDatabase]":
    """Create databases, each empty or a copy of the one at a URL; they are dropped after the test."""
    from tests.support.servers.postgres import created_databases

    with created_databases(postgres_admin_url) as create:
        yield create


@pytest.fixture
def empty_database(create_database: "CreateDatabase") -> str:
    """The address of an empty PostgreSQL database."""
    return create_database(None)


def _template(component: str) -> Any:
    """A fixture: the address of a database with the tables of a component, a template never written to."""

    @pytest.fixture(scope="session")
    def template(create_shared_database: "CreateDatabase") -> str:
        from postroom.adapters.postgres.migrate import migrate

        url = create_shared_database(None)
        migrate(url, component)
        return url

    return template


messaging_template = _template("messaging")
lease_template = _template("leases")
keys_template = _template("keys")
postgres_store_template = _template("store")


@pytest.fixture
def messaging_database(create_database: "CreateDatabase", messaging_template: str) -> str:
    """The address of a service's own database with empty outbox and inbox."""
    return create_database(messaging_template)


@pytest.fixture
def engine(messaging_database: str) -> "Iterator[sqlalchemy.Engine]":
    """An SQLAlchemy engine of `messaging_database`."""
    import sqlalchemy

    made = sqlalchemy.create_engine(messaging_database.replace("postgresql://", "postgresql+psycopg://"))
    yield made
    made.dispose()


@pytest.fixture
def lease_database(create_database: "CreateDatabase", lease_template: str) -> str:
    """The address of an empty lease store in PostgreSQL."""
    return create_database(lease_template)


@pytest.fixture
def keys_database(create_database: "CreateDatabase", keys_template: str) -> str:
    """The address of a database for a key store, which is still to be created."""
    return create_database(keys_template)


@pytest.fixture
def postgres_store(create_database: "CreateDatabase", postgres_store_template: str) -> str:
    """The address of an empty PostgreSQL store."""
    return create_database(postgres_store_template)
