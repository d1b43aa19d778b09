"""Settings of RabbitMQ, connections to it, translation of its errors, and the publisher port."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import aio_pika
from aio_pika import DeliveryMode, Message
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractExchange
from aio_pika.exceptions import (
    CONNECTION_EXCEPTIONS,
    AuthenticationError,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    DeliveryError,
    MethodNotImplemented,
    ProbableAuthenticationError,
    PublishError,
)

from postroom.adapters.rabbitmq.settings import RabbitmqSettings
from postroom.application.ingest.broker_access import tls_advice
from postroom.application.ports.outbox import NotStored, PublishAck
from postroom.domain.errors import InvalidRequest, NotFound, PostroomError, Unavailable

# The client logs a traceback for each lost connection, besides raising an error.
for _logger in ("aio_pika", "aiormq"):
    logging.getLogger(_logger).setLevel(logging.CRITICAL)

T = TypeVar("T")

TIMEOUT_SECONDS = 5.0
"""Time for a server to answer."""
HEARTBEAT_SECONDS = 10


async def connect(settings: RabbitmqSettings, name: str) -> AbstractConnection:
    """Connect; the caller reconnects after the connection is lost.

    Arguments:
        name: name in the server's list of connections.
    """
    return await aio_pika.connect(
        settings.login_url(),
        ssl_context=settings.tls_context(),
        timeout=TIMEOUT_SECONDS,
        heartbeat=HEARTBEAT_SECONDS,
        client_properties={"connection_name": name},
    )


async def at_most(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, or raise `TimeoutError` without waiting for `work` to end.

    The client may ignore a cancellation while a paused server does not answer.
    """
    task = asyncio.create_task(work)
    task.add_done_callback(_ignore_error)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        task.cancel()
    if not task.done():
        raise TimeoutError(f"no answer within {seconds:g} s")
    return task.result()


async def disconnect(connection: AbstractConnection) -> None:
    """Close a connection, even if the server does not answer."""
    with suppress(*CONNECTION_EXCEPTIONS, TimeoutError):
        await at_most(TIMEOUT_SECONDS, _close(connection))


async def _close(connection: AbstractConnection) -> None:
    await connection.close()


def _ignore_error(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # silences asyncio's 'exception was never retrieved'


@asynccontextmanager
async def translate_errors(label: str, participle: str) -> AsyncIterator[None]:
    """Translate errors of the client to Postroom's.

    Arguments:
        label: name of the queue or exchange, and its server.
        participle: the operation, for the message, such as `read`.

    Raises: NotFound, InvalidRequest, Unavailable.
    """
    try:
        yield
    except ChannelNotFoundEntity as error:
        raise NotFound(
            f"{label} can't be {participle}: {_reason(error)}; create it, or name another."
        ) from error
    except (AuthenticationError, ProbableAuthenticationError) as error:
        raise InvalidRequest(
            f"{label} can't be {participle}: {_reason(error)}; check user, password and virtual host."
        ) from error
    except (ChannelPreconditionFailed, MethodNotImplemented) as error:
        raise InvalidRequest(
            f"{label} can't be {participle}: {_reason(error)}; use the setting queue for a queue, and "
            "stream for a stream."
        ) from error
    except (*CONNECTION_EXCEPTIONS, TimeoutError) as error:
        advice = tls_advice(error) or "It is retried when RabbitMQ is available."
        raise Unavailable(f"{label} can't be {participle}: {_reason(error)}. {advice}") from error


def _reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__).rstrip(".")


class StreamOffset:
    """The next offset that a group reads from a stream.

    Arguments:
        channel: a channel with publisher confirms.
    """

    def __init__(self, channel: AbstractChannel, stream: str, group: str) -> None:
        self._channel = channel
        self._name = f"postroom.offset.{stream}.{group}"

    async def load(self) -> int | None:
        """Return the offset, or None for a new group; create the queue if it is missing."""
        queue = await self._channel.declare_queue(
            self._name, durable=True, arguments={"x-max-length": 1, "x-overflow": "drop-head"}
        )
        message = await queue.get(no_ack=False, fail=False, timeout=TIMEOUT_SECONDS)
        if message is None:
            return None
        offset = int(message.body)
        await self.store(offset)  # before the ack, so that a crash can't lose the offset
        await message.ack()
        return offset

    async def store(self, offset: int) -> None:
        """Store the offset, and return once the server has confirmed it."""
        message = Message(b"%d" % offset, delivery_mode=DeliveryMode.PERSISTENT)
        await self._channel.default_exchange.publish(message, routing_key=self._name, timeout=TIMEOUT_SECONDS)


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
