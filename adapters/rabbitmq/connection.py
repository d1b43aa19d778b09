"""Connections to RabbitMQ, and translation of the client's errors."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import aio_pika
from aio_pika import DeliveryMode, Message
from aio_pika.abc import AbstractChannel, AbstractConnection
from aio_pika.exceptions import (
    CONNECTION_EXCEPTIONS,
    AuthenticationError,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    MethodNotImplemented,
    ProbableAuthenticationError,
)

from postroom.adapters.rabbitmq.settings import RabbitmqSettings
from postroom.application.ingest.broker_access import tls_advice
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable

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
    """Translate errors of the client to those of Postroom.

    Arguments:
        label: the queue or exchange, and its server.
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
