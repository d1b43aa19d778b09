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
from postroom.application.ports.publisher import PublishAck
from postroom.domain.errors import InvalidRequest, NotFound, PostroomError, Unavailable


class RabbitmqPublisher:
    """A publisher to an exchange, whose messages are persistent, mandatory and confirmed.

    Arguments:
        exchange: its name; empty for the default exchange, whose routing keys are queues.
        id_header: the header whose value becomes the message id.
    """

    def __init__(self, settings: RabbitmqSettings, exchange: str, id_header: str) -> None:
        self._settings = settings
        self._exchange_name = exchange
        self._id_header = id_header
        self._label = f"RabbitMQ exchange {exchange or '(default)'} of {settings.shown_address}"
        self._connection: AbstractConnection | None = None
        self._exchange: AbstractExchange | None = None
        self._lock = asyncio.Lock()
        self._count = 0

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> PublishAck:
        """Publish one message with the routing key `subject`; see `Publisher.publish`."""
        message = Message(
            payload,
            headers=dict(headers),
            message_id=headers.get(self._id_header),
            delivery_mode=DeliveryMode.PERSISTENT,
        )
        try:
            async with translate_errors(self._label, "written"):
                await at_most(2 * TIMEOUT_SECONDS, self._publish(message, subject))
        except NotFound as error:
            await self.close()
            raise InvalidRequest(str(error)) from error
        except Unavailable as error:
            if isinstance(error.__cause__, PublishError):
                raise InvalidRequest(
                    f"{self._label} returned a message: no queue is bound with the routing key {subject}; "
                    "bind one."
                ) from error
            if not isinstance(error.__cause__, DeliveryError):  # of a full queue, which refuses messages
                await self.close()
            raise
        except PostroomError:
            await self.close()
            raise
        self._count += 1
        return PublishAck(self._exchange_name, self._count, False)

    async def close(self) -> None:
        """Disconnect; closing twice is fine."""
        connection, self._connection, self._exchange = self._connection, None, None
        if connection is not None:
            await disconnect(connection)

    async def _publish(self, message: Message, routing_key: str) -> None:
        exchange = await self._open()
        await exchange.publish(message, routing_key, mandatory=True, timeout=TIMEOUT_SECONDS)

    async def _open(self) -> AbstractExchange:
        async with self._lock:
            if self._exchange is None or self._connection is None or self._connection.is_closed:
                self._connection = await connect(self._settings, "postroom publisher")
                channel = await self._connection.channel(publisher_confirms=True, on_return_raises=True)
                self._exchange = (
                    await channel.get_exchange(self._exchange_name, ensure=True)
                    if self._exchange_name
                    else channel.default_exchange
                )
            return self._exchange
