"""Connections to RabbitMQ, and translation of the client's errors."""

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
