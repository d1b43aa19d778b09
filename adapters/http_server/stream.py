"""Streams of deliveries as lines of JSON (NDJSON), with flow control."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import suppress
from time import time_ns

import msgspec

from postroom.adapters.http_server import schemas
from postroom.adapters.http_server.call import Call
from postroom.adapters.http_server.problems import brief
from postroom.application.delivery_window import DeliveryWindow
from postroom.application.messages import ReceivedMessage, rfc3339
from postroom.application.operations.mailbox import Mailbox
from postroom.application.service import Service
from postroom.application.threads import cancel_and_wait
from postroom.domain.errors import PostroomError, Saturated, Unavailable
from postroom.domain.message import Receipt

_ENCODER = msgspec.json.Encoder()

TOKEN_CHECK_SECONDS = 2.0
"""How often the token of a stream is checked; below the shortest `cap_cache_ttl`."""
SETTLED_CHECK_SECONDS = 0.1
"""How often a stream whose `wait_ms` is over looks whether its deliveries are settled."""


async def receive_or_stop(
    service: Service,
    mailbox: Mailbox,
    request: schemas.Recv,
    max_messages: int,
    wait_ms: int,
    closed: asyncio.Event,
) -> list[ReceivedMessage]:
    """Receive messages; a wait ends early, without messages, when the client goes or the service stops."""
    call = mailbox.receive_messages(
        request.topic,
        max_messages=max_messages,
        max_bytes=request.max_bytes,
        visibility_ms=request.visibility_ms,
        consumer=request.consumer,
        wait_ms=0 if service.stopping.is_set() else wait_ms,
    )
    if not wait_ms:
        return await call
    receiving = asyncio.ensure_future(call)
    ends = [asyncio.create_task(event.wait()) for event in (closed, service.stopping)]
    try:
        await asyncio.wait([receiving, *ends], return_when=asyncio.FIRST_COMPLETED)
        if not receiving.done():
            receiving.cancel()  # what is received in this moment reappears by its visibility timeout
            await asyncio.wait([receiving])
        return [] if receiving.cancelled() else receiving.result()
    finally:
        await cancel_and_wait(*ends)
        if not receiving.done():
            await cancel_and_wait(receiving)


class MessageStream:
    """Stream of deliveries to one client.

    At most `max_messages` deliveries are unsettled at a time: the stream continues when some are acked,
    nacked, or have timed out. When the client disconnects, unsettled deliveries are nacked without a delay,
    so that other consumers get them at once. When the service stops, they stay with the client.

    A stream ends with an error when its token expires or is revoked.
    """

    def __init__(self, service: Service, call: Call, heartbeat_ms: int) -> None:
        self._service = service
        self._open_session = call.open_session
        self._request: schemas.Recv = call.body
        self._closed = call.closed
        self._heartbeat_ms = heartbeat_ms

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield envelopes and heartbeats, and an error at the end unless the client ended the stream."""
        with self._service.streams.open(self._request.max_messages) as window:
            try:
                async for line in self._lines(window):
                    yield _ENCODER.encode(line) + b"\n"
            finally:
                await self._return_messages(window.unsettled)

    async def _lines(self, window: DeliveryWindow) -> AsyncIterator[schemas.StreamLine]:
        request, loop = self._request, asyncio.get_running_loop()
        heartbeat = self._heartbeat_ms / 1_000
        heartbeat_at = loop.time() + heartbeat
        idle_until = None if request.wait_ms is None else loop.time() + request.wait_ms / 1_000
        while not self._closed.is_set():
            if self._service.stopping.is_set():
                yield schemas.StreamError(brief(Unavailable("The service is stopping; connect again.")))
                return
            try:
                messages = await self._next(window, _seconds_to_wait(heartbeat_at, idle_until))
            except Saturated as error:
                yield _heartbeat()
                await self._pause(window, min(error.retry_after_ms, self._heartbeat_ms) / 1_000)
                continue
            except PostroomError as error:
                yield schemas.StreamError(brief(error))
                return
            for message in messages:
                yield schemas.to_envelope(message, with_envelope=request.with_envelope)
            now = loop.time()
            if messages:
                heartbeat_at = now + heartbeat
                idle_until = None if request.wait_ms is None else now + request.wait_ms / 1_000
            elif idle_until is not None and now >= idle_until and not window.unsettled:
                return
            elif now >= heartbeat_at and not self._closed.is_set():
                yield _heartbeat()
                heartbeat_at = now + heartbeat

    async def _next(self, window: DeliveryWindow, seconds: float) -> list[ReceivedMessage]:
        """Return the next messages; none after some seconds.

        Raises: Unauthenticated, or whatever the caller's session refuses a receive with.
        """
        seconds = min(seconds, TOKEN_CHECK_SECONDS)
        session = await self._open_session()
        if window.room <= 0:
            window.settled.clear()
            await self._pause(window, window.seconds_until_room(seconds))
        room = window.room
        if room <= 0:
            return []
        wait_ms = math.ceil(seconds * 1_000)
        messages = await receive_or_stop(
            self._service, session.mailbox, self._request, room, wait_ms, self._closed
        )
        window.add(messages)
        return messages

    async def _pause(self, window: DeliveryWindow, seconds: float) -> None:
        """Wait until something is settled, the client goes, the service stops, or the time is over."""
        events = (window.settled, self._closed, self._service.stopping)
        tasks = [asyncio.create_task(event.wait()) for event in events]
        try:
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait(*tasks)

    async def _return_messages(self, unsettled: list[Receipt]) -> None:
        if self._closed.is_set() and unsettled:
            with suppress(PostroomError):  # their visibility timeout does it otherwise
                await self._service.mailbox.nack_messages(unsettled, reason="client disconnected", delay_ms=0)


def _seconds_to_wait(heartbeat_at: float, idle_until: float | None) -> float:
    """Return how long to wait for messages before the next line, or the end, may be due."""
    now = asyncio.get_running_loop().time()
    until = heartbeat_at
    if idle_until is not None:
        # Once it is idle, a stream ends as soon as its deliveries are settled.
        until = min(until, idle_until if idle_until > now else now + SETTLED_CHECK_SECONDS)
    return max(until - now, 0)


def _heartbeat() -> schemas.Heartbeat:
    return schemas.Heartbeat(rfc3339(time_ns() // 1_000) or "")
