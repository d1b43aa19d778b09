"""The publisher port over an exchange of RabbitMQ."""

import asyncio
from collections.abc import Mapping

from aio_pika import DeliveryMode, Message
from aio_pika.abc import AbstractConnection, AbstractExchange
from aio_pika.exceptions import DeliveryError, PublishError

from postroom.adapters.rabbitmq.connection import (
    TIMEOUT_SECONDS,
    at_most,
    connect,
    disconnect,
    translate_errors,
)
from postroom.adapters.rabbitmq.settings import RabbitmqSettings
from postroom.application.ports.outbox import NotStored, PublishAck
from postroom.domain.errors import InvalidRequest, NotFound, PostroomError, Unavailable

MAX_KEY_BYTES = 255
"""Maximum size of a routing key in AMQP."""


class RabbitmqPublisher:
    """A publisher to an exchange, whose messages are persistent, mandatory and confirmed.

    Arguments:
        exchange: name of the exchange; empty for the default exchange, whose routing keys are queue names.
        id_header: header whose value becomes the message id.
        timeout_seconds: time within which the server must confirm a message.
    """

    def __init__(
        self,
        settings: RabbitmqSettings,
        exchange: str,
        id_header: str,
        *,
        timeout_seconds: float = 2 * TIMEOUT_SECONDS,
    ) -> None:
        self._settings = settings
        self._exchange_name = exchange
        self._id_header = id_header
        self._timeout_seconds = timeout_seconds
        self._label = f"RabbitMQ exchange {exchange or '(default)'} of {settings.shown_address}"
        self._connection: AbstractConnection | None = None
        self._exchange: AbstractExchange | None = None
        self._lock = asyncio.Lock()
        self._disconnecting: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._count = 0

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> PublishAck:
        """Publish one message with the routing key `subject`; see `Publisher.publish`."""
        if self._is_closed:
            raise Unavailable(f"{self._label} can't be written: the publisher was closed.")
        if len(subject.encode()) > MAX_KEY_BYTES:
            raise InvalidRequest(
                f"{self._label} refuses a message: its routing key {subject[:80]!r} has more than "
                f"{MAX_KEY_BYTES} bytes; shorten it."
            )
        message = Message(
            payload,
            headers=dict(headers),
            message_id=headers.get(self._id_header),
            content_type=headers.get("Content-Type"),
            delivery_mode=DeliveryMode.PERSISTENT,
        )
        used: list[AbstractConnection] = []
        try:
            async with translate_errors(self._label, "written"):
                await at_most(self._timeout_seconds, self._publish(message, subject, used))
        except NotFound as error:
            self._disconnect(used)
            raise InvalidRequest(str(error)) from error
        except Unavailable as error:
            if isinstance(error.__cause__, PublishError):
                raise InvalidRequest(
                    f"{self._label} returned a message: no queue is bound with the routing key {subject}; "
                    "bind one."
                ) from error
            if isinstance(error.__cause__, DeliveryError):
                raise NotStored(
                    f"{self._label} could not store a message at {subject}: a queue refuses it, as it is "
                    "full; it is retried."
                ) from error
            self._disconnect(used)
            raise
        except PostroomError:
            self._disconnect(used)
            raise
        self._count += 1
        return PublishAck(self._exchange_name, self._count, False)

    async def close(self) -> None:
        """Disconnect; further calls have no effect."""
        self._is_closed = True
        if self._connection is not None:
            self._disconnect([self._connection])
        await asyncio.gather(*self._disconnecting)

    async def _publish(self, message: Message, routing_key: str, used: list[AbstractConnection]) -> None:
        """Publish one message; the connection is added to `used`."""
        async with self._lock:
            if self._exchange is None or self._connection is None or self._connection.is_closed:
                self._exchange = None
                self._connection = await connect(self._settings, "postroom publisher")
            used.append(self._connection)
            if self._exchange is None:
                self._exchange = await self._open(self._connection)
            exchange = self._exchange
        await exchange.publish(message, routing_key, mandatory=True, timeout=self._timeout_seconds)

    async def _open(self, connection: AbstractConnection) -> AbstractExchange:
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        if self._exchange_name:
            return await channel.get_exchange(self._exchange_name, ensure=True)
        return channel.default_exchange

    def _disconnect(self, used: list[AbstractConnection]) -> None:
        """Close the connection in the background, as the server may be paused, unless it was closed."""
        for connection in used:
            if connection is self._connection:
                self._connection = self._exchange = None
                task = asyncio.create_task(disconnect(connection))
                self._disconnecting.add(task)
                task.add_done_callback(self._disconnecting.discard)
