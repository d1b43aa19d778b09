"""TLS and authentication of sources and targets: Kafka, RabbitMQ and Redis; for NATS see `test_nats_access`.

RabbitMQ and Redis are real servers with TLS and users of their own. The Kafka broker at hand has neither; a
gateway in front of it ends TLS and demands SASL/PLAIN. No broker at hand has SCRAM.
"""

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import aio_pika
import msgspec
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # not in its stubs
from redis.asyncio import Redis

from postroom.adapters.compose.ingest import open_dead_letters, open_namespace
from postroom.adapters.kafka.settings import KafkaSettings
from postroom.application.ingest.namespace import (
    IngestCounts,
    KafkaSource,
    MessageSource,
    RabbitmqSource,
    RedisSource,
)
from postroom.application.ports.source import SourceMessage
from postroom.domain.errors import InvalidRequest, PostroomError, Unavailable
from tests.integration.ingest_world import DURABLE, ingest, namespace
from tests.support.certificates import PASSWORD, Certificates
from tests.support.logs import capture_logs
from tests.support.servers.kafka import KafkaServer
from tests.support.servers.kafka_gateway import KafkaGateway
from tests.support.servers.process import LOOPBACK, free_port
from tests.support.servers.rabbitmq import RabbitmqServer
from tests.support.servers.redis import RedisServer
from tests.support.stores import envelope

# A connection whose TLS handshake or login is refused is sometimes closed by the garbage collector only.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

USER, NAME, DEAD = "relay", "orders", "dead"
LOGIN = (USER, PASSWORD)
MESSAGES = (envelope("1"), b"junk")
DELIVERY = SourceMessage(NAME, b"junk", {}, 1, "1", None)


class Broker(Protocol):
    """A broker that demands TLS and a user, and has a queue, stream or topic with `MESSAGES`."""

    def source(self, **access: object) -> MessageSource:
        """Return the source with the right access, apart from `access`."""

    async def publish(self) -> None:
        """Create what is ingested, and publish `MESSAGES`."""


class KafkaBroker:
    def __init__(self, certificates: Certificates, port: int) -> None:
        self._certificates = certificates
        self._port = port

    def source(self, **access: object) -> KafkaSource:
        values: dict[str, Any] = {"sasl_mechanism": "PLAIN", "dead_letter_topic": DEAD} | right(
            self._certificates
        )
        url = f"kafka+ssl://{LOOPBACK}:{self._port}"
        return KafkaSource(url=url, topic=NAME, consumer_group=DURABLE, **(values | access))

    async def publish(self) -> None:
        settings = KafkaSettings(
            url=self.source().url,
            ca=self._certificates.ca,
            user=USER,
            password_file=self._certificates.password,
            sasl_mechanism="PLAIN",
        ).client_settings()
        admin = AdminClient(settings)
        answers = admin.create_topics([NewTopic(NAME, 1, 1), NewTopic(DEAD, 1, 1)])
        for each in answers.values():
            await asyncio.to_thread(each.result, 60)
        producer = Producer(settings)
        for message in MESSAGES:
            producer.produce(NAME, message)
        assert await asyncio.to_thread(producer.flush, 60) == 0


class RabbitmqBroker:
    def __init__(self, certificates: Certificates, server: RabbitmqServer) -> None:
        self._certificates = certificates
        self._server = server
        own = uuid4().hex
        self._queue, self._dead = f"{NAME}-{own}", f"{DEAD}-{own}"

    def source(self, **access: object) -> RabbitmqSource:
        values: dict[str, Any] = {"url": self._server.tls_url} | right(self._certificates) | access
        return RabbitmqSource(
            queue=self._queue, consumer_group=DURABLE, dead_letter_routing_key=self._dead, **values
        )

    async def publish(self) -> None:
        async with await aio_pika.connect(self._server.url) as connection:
            channel = await connection.channel()
            for name in (self._queue, self._dead):
                await channel.declare_queue(name, durable=True)
            for message in MESSAGES:
                await channel.default_exchange.publish(aio_pika.Message(message), self._queue)


class RedisBroker:
    def __init__(self, certificates: Certificates, server: RedisServer) -> None:
        self._certificates = certificates
        self._server = server

    def source(self, **access: object) -> RedisSource:
        certificate, key = self._certificates.client
        values: dict[str, Any] = {"url": self._server.url, "certificate": certificate, "key": key}
        values |= right(self._certificates) | access
        return RedisSource(
            stream=NAME, consumer_group=DURABLE, field="data", dead_letter_stream=DEAD, **values
        )

    async def publish(self) -> None:
        certificate, key = self._certificates.client
        client: Any = Redis.from_url(
            self._server.url,
            username=USER,
            password=PASSWORD,
            ssl_ca_certs=self._certificates.ca,
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
        async with client:
            await client.delete(NAME, DEAD)
            for message in MESSAGES:
                await client.xadd(NAME, {"data": message})


def right(certificates: Certificates) -> dict[str, str]:
    return {"ca": certificates.ca, "user": USER, "password_file": certificates.password}


@contextmanager
def kafka(request: pytest.FixtureRequest, certificates: Certificates) -> Iterator[Broker]:
    folder, port = _folder(request), free_port()
    with KafkaServer(folder, port) as server, KafkaGateway(port, server.port, certificates.server, LOGIN):
        yield KafkaBroker(certificates, port)


@contextmanager
def rabbitmq(request: pytest.FixtureRequest, certificates: Certificates) -> Iterator[Broker]:
    yield RabbitmqBroker(certificates, request.getfixturevalue("rabbitmq_server"))


@contextmanager
def redis(request: pytest.FixtureRequest, certificates: Certificates) -> Iterator[Broker]:
    tls = (*certificates.server, certificates.ca)
    with RedisServer(_folder(request), tls=tls, login=LOGIN) as server:
        yield RedisBroker(certificates, server)


def _folder(request: pytest.FixtureRequest) -> Path:
    factory: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
    return factory.mktemp("broker")


@pytest.fixture(scope="module", params=[kafka, rabbitmq, redis])
def broker(request: pytest.FixtureRequest, certificates: Certificates) -> Iterator[Broker]:
    start: Callable[[pytest.FixtureRequest, Certificates], AbstractContextManager[Broker]] = request.param
    with ExitStack() as stack:
        try:
            broker = stack.enter_context(start(request, certificates))
        except Unavailable as error:
            pytest.skip(str(error))
        yield broker


async def refusal(source: MessageSource, kind: type[PostroomError]) -> str:
    """Return why a source can't be opened; the reason and the log contain no secret."""
    with capture_logs() as logs, pytest.raises(kind) as refused:
        async with open_namespace(msgspec.structs.replace(namespace("", "unused.db"), source=source)):
            pytest.fail("opened")
    text = str(refused.value)
    assert "canary" not in text + str(logs) + repr(source)
    assert NAME in text
    return text


async def test_messages_are_ingested_and_dead_letters_published_by_tls_and_password(
    broker: Broker, tmp_path: Path
) -> None:
    await broker.publish()
    what = msgspec.structs.replace(namespace("", str(tmp_path / "store.db")), source=broker.source())
    assert await ingest(what) == IngestCounts(received=2, stored=1, dead_lettered=1)


async def test_a_wrong_password_is_refused_with_the_settings_to_check(
    broker: Broker, certificates: Certificates
) -> None:
    wrong = certificates.write("wrong", b"canary-wrong")
    text = await refusal(broker.source(password_file=wrong), InvalidRequest)
    assert re.search(r"check user(,|_| and) password", text)


async def test_a_broker_of_another_authority_is_refused(broker: Broker, certificates: Certificates) -> None:
    text = await refusal(broker.source(ca=certificates.other_ca), Unavailable)
    assert "certificate verify failed" in text
    assert text.endswith(". Check ca, and the name and expiry of the server's certificate.")


@pytest.mark.parametrize("pair", ["expired", "other_host"])
async def test_a_broker_with_an_expired_certificate_or_that_of_another_host_is_refused(
    broker: Broker, certificates: Certificates, pair: str
) -> None:
    port = free_port()
    with KafkaGateway(port, broker_port=1, tls=getattr(certificates, pair)):  # whatever is behind it
        url = re.sub(r":\d+$", f":{port}", broker.source().url)
        text = await refusal(msgspec.structs.replace(broker.source(), url=url), Unavailable)
    assert text.endswith(". Check ca, and the name and expiry of the server's certificate.")


async def test_a_target_of_dead_letters_is_refused_for_the_same_reason(
    certificates: Certificates, broker: Broker
) -> None:
    async with AsyncExitStack() as stack:
        target = await open_dead_letters(broker.source(ca=certificates.other_ca), stack)
        assert target is not None
        with pytest.raises(Unavailable, match="certificate verify failed") as refused:
            await target.publish(DELIVERY, "reason")
    assert "Check ca, and the name and expiry of the server's certificate" in str(refused.value)
    assert "canary" not in str(refused.value)


async def test_a_certificate_authenticates_a_user_of_rabbitmq(
    certificates: Certificates, rabbitmq_server: RabbitmqServer, tmp_path: Path
) -> None:
    certificate, key = certificates.user
    broker = RabbitmqBroker(certificates, rabbitmq_server)
    await broker.publish()
    source = broker.source(certificate=certificate, key=key, user=None, password_file=None)
    what = msgspec.structs.replace(namespace("", str(tmp_path / "store.db")), source=source)
    assert await ingest(what) == IngestCounts(received=2, stored=1, dead_lettered=1)
