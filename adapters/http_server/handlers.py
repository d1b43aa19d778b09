"""Handlers of sends, receives, streams and settlements, which translate between HTTP and the mailbox."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from time import time_ns
from typing import Any
from uuid import UUID

import msgspec

from postroom.adapters.http_server.problems import DuplicateMessage
from postroom.adapters.http_server.routes import Call, Reply, json_reply
from postroom.adapters.http_server.settings import HttpSettings
from postroom.application.caller import call_as
from postroom.application.mailbox.settle import (
    DeliveryWindow,
    NackOptions,
    extended_receipts,
    finished_receipts,
)
from postroom.application.messages import NewMessage, Sent, read_receipt, rfc3339
from postroom.application.operations import contract
from postroom.application.operations.mailbox import Mailbox
from postroom.application.received_messages import ReceivedMessage
from postroom.application.remote_errors import ProblemBrief
from postroom.application.service import Service
from postroom.application.threads import cancel_and_wait
from postroom.domain.errors import InvalidRequest, NotFound, PostroomError, Rejected, Saturated, Unavailable
from postroom.domain.message import Receipt
from postroom.domain.names import may_have_id, message_stream

_ENCODER = msgspec.json.Encoder()

TOKEN_CHECK_SECONDS = 2.0
"""How often the token of a stream is checked; below the shortest `cap_cache_ttl`."""
SETTLED_CHECK_SECONDS = 0.1
"""How often a stream whose `wait_ms` is over looks whether its deliveries are settled."""


async def receive_or_stop(
    service: Service,
    mailbox: Mailbox,
    request: contract.Recv,
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
    # Messages received at the moment the wait ends reappear after their visibility timeout.
    return await (service.unless_ended(closed, call) if wait_ms else call) or []


class HttpMessageStream:
    """Stream of deliveries to one client.

    At most `max_messages` deliveries are unsettled at a time: the stream continues when some are acked,
    nacked, or have timed out. When the client disconnects, unsettled deliveries are nacked without a delay,
    so that other consumers get them at once. When the service stops, they stay with the client.

    A stream ends with an error when its token expires or is revoked.
    """

    def __init__(self, service: Service, call: Call, heartbeat_ms: int) -> None:
        self._service = service
        self._open_session = call.open_session
        self._request: contract.Recv = call.body
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

    async def _lines(self, window: DeliveryWindow) -> AsyncIterator[contract.StreamLine]:
        request, loop = self._request, asyncio.get_running_loop()
        heartbeat = self._heartbeat_ms / 1_000
        heartbeat_at = loop.time() + heartbeat
        idle_until = None if request.wait_ms is None else loop.time() + request.wait_ms / 1_000
        while not self._closed.is_set():
            if self._service.stopping.is_set():
                yield contract.StreamError(
                    ProblemBrief.of(Unavailable("The service is stopping; connect again."))
                )
                return
            try:
                messages = await self._next(window, _seconds_to_wait(heartbeat_at, idle_until))
            except Saturated as error:
                yield _heartbeat()
                await self._pause(window, min(error.retry_after_ms, self._heartbeat_ms) / 1_000)
                continue
            except PostroomError as error:
                yield contract.StreamError(ProblemBrief.of(error))
                return
            for message in messages:
                yield to_envelope(message, with_envelope=request.with_envelope)
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
        """Return the next messages; an empty list after some seconds.

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
        """Wait until a delivery is settled, the client disconnects, the service stops, or time is over."""
        events = (window.settled, self._closed, self._service.stopping)
        tasks = [asyncio.create_task(event.wait()) for event in events]
        try:
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait(*tasks)

    async def _return_messages(self, unsettled: list[Receipt]) -> None:
        if self._closed.is_set() and unsettled:
            with suppress(PostroomError):  # otherwise their visibility timeout returns them
                await self._service.mailbox.nack_messages(unsettled, reason="client disconnected", delay_ms=0)


def _seconds_to_wait(heartbeat_at: float, idle_until: float | None) -> float:
    """Return how long to wait for messages before the next line, or the end, may be due."""
    now = asyncio.get_running_loop().time()
    until = heartbeat_at
    if idle_until is not None:
        # Once it is idle, a stream ends as soon as its deliveries are settled.
        until = min(until, idle_until if idle_until > now else now + SETTLED_CHECK_SECONDS)
    return max(until - now, 0)


def _heartbeat() -> contract.Heartbeat:
    return contract.Heartbeat(rfc3339(time_ns() // 1_000) or "")


class MessageHandlers:
    """Handlers of send, recv, ack, nack and extend."""

    def __init__(self, service: Service, settings: HttpSettings) -> None:
        self._service = service
        self._settings = settings

    async def send(self, call: Call) -> Reply:
        """Send one message, a list, or the message of a CloudEvent."""
        body: contract.Send | list[contract.Send] | NewMessage = call.body
        as_conflict = _as_conflict(call)
        if isinstance(body, list):
            messages = [each.to_message(call.corr_id) for each in body]
            answers = await self._service.writes.watch(call.mailbox.send_batch(messages))
            return json_reply(contract.SendAnswers([_send_result(each, as_conflict) for each in answers]))
        message = body if isinstance(body, NewMessage) else body.to_message(call.corr_id)
        sent = await self._service.writes.watch(call.mailbox.send_message(message))
        if sent.duplicate and as_conflict:
            raise DuplicateMessage(sent.message_id)
        return json_reply(contract.SendAnswer(sent.message_id, sent.duplicate, sent.message_id))

    async def recv(self, call: Call) -> Reply:
        """Receive messages; messages that a departed client can't get are ready again at once."""
        body: contract.Recv = call.body
        messages = await receive_or_stop(
            self._service, call.mailbox, body, body.max_messages, body.wait_ms or 0, call.closed
        )
        if call.closed.is_set():
            await self._return_messages([message.receipt for message in messages])
        envelopes = [to_envelope(each, with_envelope=body.with_envelope) for each in messages]
        return json_reply(contract.Messages(envelopes))

    async def recv_stream(self, call: Call) -> Reply:
        """Receive messages for as long as the client reads."""
        heartbeat_ms = call.body.heartbeat_ms or self._settings.heartbeat_ms
        stream = HttpMessageStream(self._service, call, heartbeat_ms)
        return Reply(stream.lines(), content_type=b"application/x-ndjson")

    async def ack(self, call: Call) -> Reply:
        """Settle a delivery."""
        receipt, result = await self._receipt(call), call.body.result
        options = {} if result is None else {"results": [result.to_result()]}
        _raise_refusal(await call.mailbox.ack_messages([receipt], **options))
        self._note([receipt])
        return json_reply(contract.Ok())

    async def wait_for_result(self, call: Call) -> Reply:
        """Wait until a message is acked, dead-lettered or removed."""
        wait_ms = call.query.wait_ms
        wait = call.mailbox.wait_for_result(call.path["msg_id"], wait_ms=wait_ms)
        outcome = await (self._service.unless_ended(call.closed, wait) if wait_ms else wait)
        if outcome is None:
            raise Unavailable(f"Mailbox {call.mailbox.name} is stopping here; connect again.")
        return json_reply(outcome)

    async def nack(self, call: Call) -> Reply:
        """Fail a delivery."""
        receipt, body = await self._receipt(call), call.body
        answers = await call.mailbox.nack_messages([receipt], **_nack_options(body))
        _raise_refusal(answers)
        self._note([receipt])
        return json_reply(contract.Ok())

    async def extend(self, call: Call) -> Reply:
        """Extend a delivery."""
        receipt = await self._receipt(call)
        _raise_refusal(await call.mailbox.extend_visibility([receipt], call.body.visibility_ms))
        self._note([receipt], call.body.visibility_ms)
        return json_reply(contract.Ok())

    async def ack_many(self, call: Call) -> Reply:
        """Settle deliveries."""
        receipts, results = [read_receipt(each) for each in call.body.receipts], call.body.results
        values = None if results is None else [each and each.to_result() for each in results]
        answers = await call.mailbox.ack_messages(receipts, results=values)
        self._note(finished_receipts(receipts, answers))
        return _settle_results(answers)

    async def nack_many(self, call: Call) -> Reply:
        """Fail deliveries."""
        receipts, body = [read_receipt(each) for each in call.body.receipts], call.body
        answers = await call.mailbox.nack_messages(receipts, **_nack_options(body))
        self._note(finished_receipts(receipts, answers))
        return _settle_results(answers)

    async def extend_many(self, call: Call) -> Reply:
        """Extend deliveries."""
        receipts = [read_receipt(each) for each in call.body.receipts]
        answers = await call.mailbox.extend_visibility(receipts, call.body.visibility_ms)
        self._note(extended_receipts(receipts, answers), call.body.visibility_ms)
        return _settle_results(answers)

    async def _receipt(self, call: Call) -> Receipt:
        """Return the receipt of the body, or the receipt of the message's latest delivery."""
        id_ = call.path["msg_id"]
        if call.body.receipt is None:
            with call_as(call.session.caller):  # the caller means a message of a topic that it may use
                return await self._latest_receipt(id_)
        receipt = read_receipt(call.body.receipt)
        if not may_have_id(receipt.message, self._service.mailbox.name, id_):
            raise InvalidRequest(f"The receipt is of another message than {id_}.")
        return receipt

    async def _latest_receipt(self, id_: str) -> Receipt:
        """Return the receipt of the latest delivery of a message.

        It needs no right: settling checks whether the caller may use the receipt. An unknown message gets a
        receipt, too, which hides from callers without the right whether a message exists.
        """
        mailbox = self._service.mailbox
        try:
            detail = await mailbox.get_message(id_)
        except NotFound:
            return Receipt(message_stream(mailbox.name, id_), 1, 0)
        stream, history = UUID(detail.stream_id).bytes, detail.history
        deliveries = [n for n, each in enumerate(history) if each.event == "MessageReceived"]
        if not deliveries:
            return Receipt(stream, 1, 0)
        latest = deliveries[-1]
        return Receipt(stream, latest + 1, history[latest].epoch)  # a stream's versions count from 1

    def _note(self, receipts: Sequence[Receipt], visibility_ms: int | None = None) -> None:
        if visibility_ms is None:
            self._service.streams.settle(receipts)
        else:
            self._service.streams.extend(receipts, visibility_ms)

    async def _return_messages(self, receipts: list[Receipt]) -> None:
        if receipts:
            with suppress(PostroomError):  # otherwise their visibility timeout returns them
                await self._service.mailbox.nack_messages(receipts, reason="client disconnected", delay_ms=0)


def _nack_options(body: contract.Nack | contract.NackMany) -> dict[str, Any]:
    return {name: getattr(body, name) for name in NackOptions._fields}


def _as_conflict(call: Call) -> bool:
    mode = call.headers.get(b"x-idempotency-mode")
    if mode not in (None, b"409-conflict"):
        raise InvalidRequest("X-Idempotency-Mode must be 409-conflict, or absent.")
    return mode is not None


def _send_result(answer: Sent | Rejected, as_conflict: bool) -> contract.SendResult:
    if isinstance(answer, Sent) and answer.duplicate and as_conflict:
        error = ProblemBrief.of(DuplicateMessage(answer.message_id))
        return contract.SendResult(answer.message_id, None, answer.message_id, error)
    return contract.SendResult.of(answer)


def _settle_results(answers: Sequence[Rejected | None]) -> Reply:
    return json_reply(contract.SettleResults([contract.SettleResult.of(each) for each in answers]))


def _raise_refusal(answers: Sequence[Rejected | None]) -> None:
    (refusal,) = answers
    if refusal is not None:
        raise refusal


def to_envelope(message: ReceivedMessage, *, with_envelope: bool) -> contract.Envelope:
    """Return a delivery as HTTP answers have it.

    Arguments:
        with_envelope: include the envelope instead of the payload.
    """
    facts = message.to_json()
    if with_envelope:
        facts["payload_b64"] = None
    return contract.Envelope(
        **facts,
        msg_id=facts["message_id"],
        ts=rfc3339(message.published_at_us),
        corr_id=facts["correlation_id"],
        visible_at=rfc3339(message.visible_at_us) or "",
        envelope_b64=message.envelope if with_envelope else None,
    )
