"""Connections to NATS."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
from nats.aio.client import Client
from nats.errors import Error

from postroom.application.telemetry import logger
from postroom.domain.errors import Unavailable

CONNECT_TIMEOUT_SECONDS = 3.0


class NatsSettings(msgspec.Struct, frozen=True):
    """Say where NATS is.

    Arguments:
        url: one or more, with commas between them.
        credentials: path of a credentials file; None connects without.
    """

    url: str = "nats://127.0.0.1:4222"
    credentials: str | None = None


@asynccontextmanager
async def connect(settings: NatsSettings, name: str) -> AsyncIterator[Client]:
    """Be connected to NATS while the context lasts; a lost connection is made again for as long as it takes.

    Arguments:
        name: what the server shows as the client's name.

    Raises: Unavailable when nobody answers.
    """
    client = Client()
    refused: Exception | None = None
    connected = False

    async def note(error: Exception) -> None:
        nonlocal refused
        refused = error
        if connected:
            logger().warning("nats.error", client=name, error=repr(error))

    async def note_disconnect() -> None:
        if not client.is_closed:
            logger().warning("nats.disconnected", client=name, url=settings.url)

    async def note_reconnect() -> None:
        logger().info("nats.reconnected", client=name, url=settings.url)

    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):  # the client itself would try for ever
            await client.connect(
                settings.url.split(","),
                name=name,
                user_credentials=settings.credentials,
                allow_reconnect=True,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.2,  # type: ignore[arg-type]  # it takes fractions too
                error_cb=note,
                disconnected_cb=note_disconnect,
                reconnected_cb=note_reconnect,
            )
    except (Error, OSError, TimeoutError) as error:
        await client.close()
        why = refused or error
        raise Unavailable(
            f"NATS at {settings.url} can't be reached: {str(why) or type(why).__name__}. "
            "Check [nats] url and that the server runs."
        ) from error
    connected = True
    try:
        yield client
    finally:
        with suppress(Error, OSError, TimeoutError):
            await client.close()
