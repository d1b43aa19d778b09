"""Brokers: their settings, targets of events at them, and streams of JetStream."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from postroom.adapters.compose import shown_store
from postroom.adapters.compose.connect import ClientTls
from postroom.adapters.compose.connect import connect as connect_mailbox
from postroom.adapters.compose.store import is_remote
from postroom.adapters.kafka.settings import KafkaSettings
from postroom.adapters.nats.definitions import (
    ConsumerDefinition,
    Definition,
    Difference,
    StreamDefinition,
    StreamStatus,
    Value,
)
from postroom.adapters.nats.plan import Plan, apply_plan, make_plan
from postroom.adapters.nats.settings import NatsSettings
from postroom.adapters.postgres.messaging.settings import MessagingSettings
from postroom.adapters.rabbitmq.settings import RabbitmqSettings
from postroom.application.cloudevents import AMQP, KAFKA, MAILBOX, NATS
from postroom.application.extras import explain_missing_extra
from postroom.application.metrics import Metric
from postroom.application.outbox.events import AGGREGATE_ID
from postroom.application.outbox.formats import (
    EVENT_ID,
    SUBJECT,
    TOPIC,
    EventRoute,
    MessageFormat,
    new_format,
)
from postroom.application.outbox.message_relay import MailboxPublisher
from postroom.application.outbox.relay import OutboxSettings
from postroom.application.ports.outbox import Publisher
from postroom.domain.names import DEFAULT_MAILBOX

if TYPE_CHECKING:
    from postroom.adapters.nats.streams import JetStreamStreams

__all__ = [
    "ConsumerDefinition",
    "Definition",
    "Difference",
    "EventTarget",
    "KafkaSettings",
    "MailboxTarget",
    "MessagingSettings",
    "NatsSettings",
    "Plan",
    "RabbitmqSettings",
    "StreamDefinition",
    "StreamStatus",
    "Value",
    "apply_plan",
    "make_plan",
    "open_streams",
    "open_target",
]


TIMEOUT_MS = 5_000
"""Time within which a target confirms an event: less than a third of the shortest claim."""


class MailboxTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A mailbox to which an outbox publishes; the arguments are the same as for `connect`.

    Arguments:
        address: of the store or server, as for `connect`.
        mailbox: name of the mailbox.
        token: sent to a server with each call.
        tls: certificates with which to connect to a server.
    """

    address: str
    mailbox: str = DEFAULT_MAILBOX
    token: str | None = None
    tls: ClientTls | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shown_url!r})"

    @property
    def shown_url(self) -> str:
        """Return the address without passwords, for messages and logs."""
        shown = self.address if is_remote(self.address) else shown_store(self.address)
        return f"mailbox:{shown}#{self.mailbox}"


EventTarget = NatsSettings | KafkaSettings | RabbitmqSettings | MailboxTarget


class OpenTarget(NamedTuple):
    """A target in use.

    Arguments:
        route, format: where events are published, and in which form.
        metrics: of the connection.
        is_connected: returns whether the target can be reached, as far as the client knows.
    """

    publisher: Publisher
    route: EventRoute
    format: MessageFormat
    metrics: Callable[[], Sequence[Metric]]
    is_connected: Callable[[], bool]


async def open_target(
    target: EventTarget, context: str, settings: OutboxSettings, stack: AsyncExitStack
) -> OpenTarget:
    """Connect to the target of an outbox.

    Arguments:
        context: the bounded context whose events are published.
        stack: closes the connection.

    Raises: MissingExtra, InvalidRequest for invalid settings, Unavailable when NATS or the store of a mailbox
        can't be used.
    """
    if isinstance(target, NatsSettings):
        return await _open_jetstream(target, context, settings, stack)
    publisher: Publisher
    template, binding = TOPIC, KAFKA
    if isinstance(target, MailboxTarget):
        binding = MAILBOX
        mailbox = await stack.enter_async_context(
            connect_mailbox(
                target.address, target.mailbox, timeout_ms=TIMEOUT_MS, token=target.token, tls=target.tls
            )
        )
        publisher = MailboxPublisher(mailbox)
    elif isinstance(target, KafkaSettings):
        with explain_missing_extra("kafka,postgres"):
            from postroom.adapters.kafka.publisher import KafkaPublisher

        publisher = KafkaPublisher(target, TIMEOUT_MS, key_header=AGGREGATE_ID)
    else:
        template, binding = SUBJECT, AMQP
        with explain_missing_extra("postgres,rabbitmq"):
            from postroom.adapters.rabbitmq.connection import RabbitmqPublisher

        publisher = RabbitmqPublisher(target, settings.exchange, EVENT_ID, timeout_seconds=TIMEOUT_MS / 1_000)
    stack.push_async_callback(publisher.close)
    return OpenTarget(
        publisher,
        EventRoute(context, settings.topic or template),
        new_format(settings.format, context, binding, id_header=EVENT_ID, source=settings.source),
        list,
        lambda: True,
    )


async def _open_jetstream(
    nats: NatsSettings, context: str, settings: OutboxSettings, stack: AsyncExitStack
) -> OpenTarget:
    with explain_missing_extra("nats,postgres"):
        from postroom.adapters.nats.connection import connect, nats_metrics
        from postroom.adapters.nats.publisher import JetStreamPublisher

    client = await stack.enter_async_context(connect(nats, "postroom outbox relay"))
    return OpenTarget(
        JetStreamPublisher(client),
        EventRoute(context, settings.topic or SUBJECT),
        new_format(settings.format, context, NATS, source=settings.source),
        lambda: nats_metrics({"publisher": client}),
        lambda: client.is_connected,
    )


@asynccontextmanager
async def open_streams(nats: NatsSettings) -> AsyncIterator["JetStreamStreams"]:
    """Manage the streams of a NATS server for the length of the context.

    Arguments:
        nats: address of NATS, and access to it.

    Raises: Unavailable when it can't be reached.
    """
    with explain_missing_extra():
        from postroom.adapters.nats.connection import connect
        from postroom.adapters.nats.streams import JetStreamStreams

    async with connect(nats, "postroom streams") as client:
        yield JetStreamStreams(client)
