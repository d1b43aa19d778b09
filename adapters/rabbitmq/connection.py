"""Connections to RabbitMQ, and the translation of their errors."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import aio_pika
from aio_pika.abc import AbstractConnection
from aio_pika.exceptions import (
    CONNECTION_EXCEPTIONS,
    AuthenticationError,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    MethodNotImplemented,
    ProbableAuthenticationError,
)

from postroom.adapters.rabbitmq.settings import RabbitmqSettings
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable

# The client logs lost connections with their tracebacks; they arrive as errors, too.
for _logger in ("aio_pika", "aiormq"):
    logging.getLogger(_logger).setLevel(logging.CRITICAL)

T = TypeVar("T")

TIMEOUT_SECONDS = 5.0
"""Time within which a server answers."""
HEARTBEAT_SECONDS = 10


async def connect(settings: RabbitmqSettings, name: str) -> AbstractConnection:
    """Connect once; the caller connects again when the connection is lost.

    Arguments:
        name: shown in the server's list of connections.
    """
    return await aio_pika.connect(
        settings.url_with_user(),
        ssl_context=settings.tls_context(),
        timeout=TIMEOUT_SECONDS,
        heartbeat=HEARTBEAT_SECONDS,
        client_properties={"connection_name": name},
    )


async def at_most(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, or raise `TimeoutError` without waiting for it to end.

    The client may ignore a cancellation while a server that is paused does not answer.
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
    """Close a connection, also to a server that does not answer."""
    with suppress(*CONNECTION_EXCEPTIONS, TimeoutError):
        await at_most(TIMEOUT_SECONDS, _close(connection))


async def _close(connection: AbstractConnection) -> None:
    await connection.close()


def _ignore_error(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # silences asyncio's 'exception was never retrieved'


@asynccontextmanager
async def translate_errors(label: str, what: str) -> AsyncIterator[None]:
    """Replace errors of the client.

    Arguments:
        label: the queue and its server.
        what: what could not be done, such as `read`.

    Raises: NotFound, InvalidRequest, Unavailable.
    """
    try:
        yield
    except ChannelNotFoundEntity as error:
        raise NotFound(f"{label} can't be {what}: {_reason(error)}; create it, or name another.") from error
    except (AuthenticationError, ProbableAuthenticationError) as error:
        raise InvalidRequest(
            f"{label} can't be {what}: {_reason(error)}; check user, password and virtual host."
        ) from error
    except (ChannelPreconditionFailed, MethodNotImplemented) as error:
        raise InvalidRequest(
            f"{label} can't be {what}: {_reason(error)}; name a queue by queue, and a stream by stream."
        ) from error
    except (*CONNECTION_EXCEPTIONS, TimeoutError) as error:
        raise Unavailable(
            f"{label} can't be {what}: {_reason(error)}. It is retried when RabbitMQ is available."
        ) from error


def _reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__).rstrip(".")
