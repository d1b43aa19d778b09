"""Wiring of ingestion: source, schemas and dead letters of a namespace."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

from postroom.adapters.compose.sources import nats_settings, open_dead_letters, open_source
from postroom.adapters.config.namespaces import find_namespace, load_namespaces
from postroom.adapters.local.mailbox import SharedMailbox
from postroom.adapters.nats.settings import NatsSettings
from postroom.adapters.schemas.validator import SchemaValidator
from postroom.application.extras import explain_missing_extra
from postroom.application.ingest.ingester import Ingester, ingest_monitor
from postroom.application.ingest.namespace import (
    IngestCounts,
    IngestSettings,
    KafkaSource,
    MessageSource,
    Namespace,
    NatsSource,
    RabbitmqSource,
    RedisSource,
)
from postroom.application.ingest.redrive import DeadLetterSubject, IngestDeadLetter, IngestDeadLetterAdmin
from postroom.application.mailbox.administer import CommandHandlers
from postroom.application.metrics import Metric, Monitor, is_answering
from postroom.application.ports.source import CountedSource

__all__ = [
    "RELOADED",
    "IngestCounts",
    "IngestDeadLetter",
    "IngestDeadLetterAdmin",
    "Ingester",
    "KafkaSource",
    "MessageSource",
    "Namespace",
    "NatsSettings",
    "NatsSource",
    "OpenNamespace",
    "RabbitmqSource",
    "RedisSource",
    "find_namespace",
    "load_namespaces",
    "nats_settings",
    "open_ingest_dead_letters",
    "open_ingester",
    "open_namespace",
    "reload_namespace",
]

RELOADED = ("description", "batch_size", "envelope_validation", "max_retries", "payload_schemas")
"""Fields of a namespace that a running ingester takes over."""


class OpenNamespace(NamedTuple):
    """A namespace whose schemas are loaded and whose source is connected."""

    namespace: Namespace
    source: CountedSource
    payloads: SchemaValidator | None
    dead_letters: DeadLetterSubject | None

    def ingester(self, postroom: CommandHandlers) -> Ingester:
        """Return an ingester into a mailbox.

        Arguments:
            postroom: the mailbox that the namespace names, in the mode `archive`.
        """
        return Ingester(
            self.source,
            postroom.send_envelopes,
            _settings(self.namespace),
            payloads=self.payloads,
            dead_letters=self.dead_letters,
        )

    def monitor(self, ingester: Ingester, mailbox: SharedMailbox) -> Monitor:
        """Return the monitor of an ingester into a mailbox."""
        return ingest_monitor(
            ingester,
            self.namespace.name,
            measure_mailbox=mailbox.measure_owned,
            is_mailbox_answering=lambda: is_answering(mailbox),
            count_pending=self.source.count_pending,
            stream_metrics=self._stream_metrics,
        )

    def _stream_metrics(self) -> list[Metric]:
        if not isinstance(self.namespace.source, NatsSource):
            return []
        from postroom.adapters.nats.metrics import nats_metrics
        from postroom.adapters.nats.source import JetStreamSource

        assert isinstance(self.source, JetStreamSource)
        return nats_metrics({"source": self.source.client})


@asynccontextmanager
async def open_namespace(namespace: Namespace) -> AsyncIterator[OpenNamespace]:
    """Load the schemas of a namespace and connect to its source, for the length of the context.

    Raises:
        InvalidRequest: schemas can't be read, or the consumer differs from the namespace.
        NotFound: there is no such stream.
        Unavailable: the source can't be reached.
    """
    async with AsyncExitStack() as stack:
        payloads = _validator(namespace)
        source = await open_source(namespace)
        stack.push_async_callback(source.close)
        dead_letters = await open_dead_letters(namespace.source, stack)
        yield OpenNamespace(namespace, source, payloads, dead_letters)


def reload_namespace(ingester: Ingester, namespace: Namespace) -> None:
    """Apply the fields `RELOADED` of a changed namespace to an ingester.

    Raises: InvalidRequest when a schema can't be read; nothing is changed.
    """
    ingester.reconfigure(_settings(namespace), _validator(namespace))


def _settings(namespace: Namespace) -> IngestSettings:
    return IngestSettings(
        namespace.batch_size,
        namespace.envelope_validation,
        namespace.max_retries,
        isinstance(namespace.source, NatsSource),
        namespace.mapping,
        not isinstance(namespace.source, RabbitmqSource) or namespace.source.stream is not None,
    )


def _validator(namespace: Namespace) -> SchemaValidator | None:
    return SchemaValidator(namespace.payload_schemas) if namespace.payload_schemas else None


@asynccontextmanager
async def open_ingester(namespace: Namespace, postroom: CommandHandlers) -> AsyncIterator[Ingester]:
    """Open a namespace and ingest into a mailbox; see `open_namespace`."""
    async with open_namespace(namespace) as source:
        yield source.ingester(postroom)


@asynccontextmanager
async def open_ingest_dead_letters(nats: NatsSettings, subject: str) -> AsyncIterator[IngestDeadLetterAdmin]:
    """Manage the dead letters at a dead-letter subject for the length of the context.

    Raises: Unavailable when NATS can't be reached.
    """
    with explain_missing_extra():
        from postroom.adapters.nats.connection import connect
        from postroom.adapters.nats.dead_letter_queue import JetStreamDeadLetterQueue
        from postroom.adapters.nats.publisher import JetStreamPublisher

    async with connect(nats, "postroom ingest dlq") as client:
        queue, publisher = JetStreamDeadLetterQueue(client), JetStreamPublisher(client)
        yield IngestDeadLetterAdmin(queue, publisher, subject)
