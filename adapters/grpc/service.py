"""The calls of `postroom.v1`, translated into operations of a mailbox."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, cast

import grpc
import msgspec

from postroom.adapters.grpc import messages
from postroom.adapters.grpc.calls import MEMBERS_KEY, read_number, write_error
from postroom.adapters.grpc.operations import BY_METHOD, read_arguments, write_answer
from postroom.adapters.grpc.v1 import mailbox_pb2 as pb
from postroom.application.cluster.members_history import MembersFence
from postroom.application.mailbox.settle import (
    DeliveryWindow,
    extended_receipts,
    finished_receipts,
    submit_valid,
    with_results,
)
from postroom.application.messages import MessageResult, NewMessage, read_receipt
from postroom.application.operations.mailbox import OPERATIONS, Mailbox
from postroom.application.received_messages import ReceivedMessage
from postroom.application.service import Service, Session
from postroom.application.threads import wait_at_most
from postroom.domain.arguments import check_int
from postroom.domain.errors import (
    Forbidden,
    InvalidRequest,
    PostroomError,
    Rejected,
    Saturated,
    Unauthenticated,
    Unavailable,
)
from postroom.domain.message import Receipt
from postroom.domain.namespace import RESERVED_TOPIC
from postroom.domain.policy import DEFAULT_MAX_MESSAGES

Context = grpc.aio.ServicerContext[Any, Any]
Settle = Callable[[list[Receipt]], Awaitable[list[Rejected | None]]]


class Call(NamedTuple):
    """A call that was accepted.

    Arguments:
        metadata: textual metadata of the caller.
        open_session: opens the session again, which fails once the token has expired or is revoked.
    """

    context: Context
    metadata: Mapping[str, str]
    session: Session
    open_session: Callable[[], Awaitable[Session]]

    @property
    def mailbox(self) -> Mailbox:
        """Return the mailbox as the caller may use it."""
        return self.session.mailbox


CHUNK_BYTES = 64 << 10
"""Default size of an item of a stream (svc-mailbox I-6)."""
HEARTBEAT_MS = 5_000
MIN_HEARTBEAT_MS = 250
MAX_HEARTBEAT_MS = 60_000
MAX_STREAM_MESSAGES = 8_192
MAX_ITEMS = 1_000
"""Maximum number of messages or receipts in a request; an empty one has 2 bytes there, and 2 KB here."""
TOKEN_CHECK_SECONDS = 2.0
"""How often the token of a stream is checked; below the shortest `cap_cache_ttl`."""
FENCED = (
    "pause_topic",
    "resume_topic",
    "set_topic_policy",
    "set_settings",
    "set_subscription",
    "rewind_subscription",
    "delete_subscription",
    "set_schedule",
    "save_search",
)
"""Methods that are refused to a caller who does not know all members of the namespace."""
ANSWER_MS = 100
"""Time that a receive with a deadline leaves for its answer."""


class MailboxService:
    """The methods of both services, named as in `METHODS`; each raises a PostroomError when it is refused.

    The other calls are derived from the table of operations; see `answer`.
    """

    def __init__(self, service: Service) -> None:
        self._mailbox = service.mailbox
        self._streams = service.streams
        self._writes = service.writes
        self._fence = MembersFence(service.mailbox)
        self._returns: set[asyncio.Task[Any]] = set()
        self.is_stopping = False

    async def send(self, request: pb.SendRequest, call: Call) -> pb.SendResponse:
        """Send one message."""
        message = messages.read_new_message(request.message)
        async with self._fence.admit(_generation(call), message.topic):
            sent = await self._writes.watch(call.mailbox.send_message(message))
        return pb.SendResponse(message_id=sent.message_id, duplicate=sent.duplicate)

    async def send_batch(self, request: pb.SendBatchRequest, call: Call) -> pb.SendBatchResponse:
        """Send many messages."""
        _check_count("messages", len(request.messages))
        response = pb.SendBatchResponse()
        batch = [messages.read_new_message(each) for each in request.messages]
        async with self._fence.admit(_generation(call), _reserved_topic(batch)):
            answers = await self._writes.watch(call.mailbox.send_batch(batch))
        for answer in answers:
            result = response.results.add()
            if isinstance(answer, Rejected):
                write_error(answer, result.error)
            else:
                result.sent.message_id = answer.message_id
                result.sent.duplicate = answer.duplicate
        return response

    async def recv(self, request: pb.RecvRequest, call: Call) -> pb.RecvResponse:
        """Receive messages; wait no longer than the caller does."""
        await self._fence.check(_generation(call))
        options = messages.set_fields(request)
        topics = list(options.pop("topics", ()))
        if "wait_ms" in options:
            options["wait_ms"] = _within_deadline(options["wait_ms"], call)
        return _delivery(await call.mailbox.receive_messages(topics, **options))

    async def recv_stream(self, request: pb.RecvStreamRequest, call: Call) -> None:
        """Receive messages until the caller ends the call; then make its unsettled messages ready."""
        options = messages.set_fields(request)
        topics = list(options.pop("topics", ()))
        heartbeat_ms = check_int(
            "heartbeat_ms", options.pop("heartbeat_ms", HEARTBEAT_MS), MIN_HEARTBEAT_MS, MAX_HEARTBEAT_MS
        )
        capacity = check_int(
            "max_messages", options.pop("max_messages", DEFAULT_MAX_MESSAGES), 1, MAX_STREAM_MESSAGES
        )
        options.setdefault("max_bytes", CHUNK_BYTES)

        async def receive(room: int, seconds: float) -> list[ReceivedMessage]:
            mailbox = (await call.open_session()).mailbox
            if not room:
                return []
            count, wait_ms = min(room, DEFAULT_MAX_MESSAGES), math.ceil(seconds * 1_000)
            return await mailbox.receive_messages(topics, max_messages=count, wait_ms=wait_ms, **options)

        with self._streams.open(capacity) as window:
            is_returned = True
            try:
                while True:
                    item, pause = await _next_item(window, receive, heartbeat_ms / 1_000)
                    await call.context.write(item)
                    await asyncio.sleep(pause)
            except (Unauthenticated, Forbidden):
                is_returned = False  # the caller may still settle them (svc-mailbox I-15)
                raise
            finally:
                if is_returned and not self.is_stopping:
                    self._return(window.unsettled)

    async def ack(self, request: pb.AckRequest, call: Call) -> pb.AckResponse:
        """Settle deliveries."""
        response = pb.AckResponse()
        ack: Settle = call.mailbox.ack_messages
        if request.results:
            if max(request.results) >= len(request.receipts):
                raise InvalidRequest(
                    f"A result has the index {max(request.results)}, and the request has "
                    f"{len(request.receipts)} receipts; results are by the index of their receipt, from 0."
                )
            ack = with_results(ack, _read_results(request))
        settled = await _settle(request.receipts, ack, response.results, finished_receipts)
        self._streams.settle(settled)
        return response

    async def nack(self, request: pb.NackRequest, call: Call) -> pb.NackResponse:
        """Fail deliveries."""
        options = messages.set_fields(request)
        options.pop("receipts", None)
        response = pb.NackResponse()
        settled = await _settle(
            request.receipts,
            lambda receipts: call.mailbox.nack_messages(receipts, **options),
            response.results,
            finished_receipts,
        )
        self._streams.settle(settled)
        return response

    async def extend(self, request: pb.ExtendRequest, call: Call) -> pb.ExtendResponse:
        """Extend deliveries."""
        response = pb.ExtendResponse()
        receipts = await _settle(
            request.receipts,
            lambda receipts: call.mailbox.extend_visibility(receipts, request.visibility_ms),
            response.results,
            extended_receipts,
        )
        self._streams.extend(receipts, request.visibility_ms)
        return response

    async def query(self, request: pb.QueryRequest, call: Call) -> pb.QueryResponse:
        """Search the read models."""
        filter_ = messages.read_filter(request, call.mailbox.name)
        page = await call.session.search(filter_)
        response: pb.QueryResponse = write_answer(OPERATIONS["search_messages"], page)
        return response

    async def get(self, request: pb.GetRequest, call: Call) -> pb.GetResponse:
        """Return one message with its history."""
        detail = await call.mailbox.get_message(request.message_id)
        item = msgspec.structs.replace(
            detail.item, envelope_blob=messages.public_envelope(detail.item.envelope_blob)
        )
        return messages.write_result(msgspec.structs.replace(detail, item=item), pb.GetResponse())

    async def wait_for_result(self, request: pb.WaitForResultRequest, call: Call) -> pb.WaitForResultResponse:
        """Wait for the result of a message, no longer than the caller does."""
        wait_ms = _within_deadline(request.wait_ms, call)
        outcome = await call.mailbox.wait_for_result(request.message_id, wait_ms=wait_ms)
        return messages.write_result(outcome, pb.WaitForResultResponse())

    async def info(self, request: pb.InfoRequest, call: Call) -> pb.InfoResponse:
        """Return the name of the mailbox."""
        return pb.InfoResponse(mailbox=call.mailbox.name)

    async def answer(self, name: str, request: Any, call: Call) -> Any:
        """Return the response of a method, either a method of this class or the operation with its name."""
        own = getattr(self, name, None)
        if own is not None:
            return await own(request, call)
        operation = BY_METHOD[name]
        ask = partial(operation.ask, call.mailbox, read_arguments(operation, request))
        if name not in FENCED:
            return write_answer(operation, await ask())
        async with self._fence.admit(_generation(call)):
            return write_answer(operation, await ask())

    async def drain(self) -> None:
        """Wait until the unsettled messages of ended streams are ready again."""
        while self._returns:
            await asyncio.wait(self._returns)

    def _return(self, receipts: list[Receipt]) -> None:
        """Make messages ready again at once, in a task, as the stream's own may be cancelled."""
        if receipts:
            task = asyncio.create_task(self._nack(receipts))
            self._returns.add(task)
            task.add_done_callback(self._returns.discard)

    async def _nack(self, receipts: list[Receipt]) -> None:
        try:
            await self._mailbox.nack_messages(receipts, reason="the consumer's stream ended", delay_ms=0)
        except PostroomError:
            return  # the visibility timeout returns them


def _delivery(received: Sequence[ReceivedMessage]) -> pb.RecvResponse:
    response = pb.RecvResponse()
    for each in received:
        messages.write_delivery(each.delivery, response.messages.add())
    return response


async def _next_item(
    window: DeliveryWindow,
    receive: Callable[[int, float], Awaitable[list[ReceivedMessage]]],
    heartbeat: float,
) -> tuple[pb.RecvStreamResponse, float]:
    """Return the next item of a stream, and the pause after it in seconds.

    Arguments:
        receive: receives up to a number of messages within some seconds, after checking the caller's token.
        heartbeat: longest wait for messages, or for room, in seconds.
    """
    item, loop = pb.RecvStreamResponse(), asyncio.get_running_loop()
    received: list[ReceivedMessage] = []
    until = loop.time() + heartbeat
    while not received and (left := until - loop.time()) > 0:
        seconds = min(left, TOKEN_CHECK_SECONDS)
        if window.room <= 0:
            window.settled.clear()
            await wait_at_most(window.seconds_until_room(seconds), window.settled.wait())
        try:
            received = await receive(max(0, window.room), seconds)
        except (Saturated, Unavailable) as error:
            write_error(error, item.error)
            return item, min(error.retry_after_ms / 1_000, heartbeat)
    window.add(received)
    if received:
        item.delivery.CopyFrom(_delivery(received))
    else:
        item.heartbeat.SetInParent()
    return item, 0


def _within_deadline(wait_ms: int, call: Call) -> int:
    """Return how long a call may wait, so that its answer is in time."""
    remaining = cast("float | None", call.context.time_remaining())  # None without a deadline
    return wait_ms if remaining is None else min(wait_ms, max(0, int(remaining * 1_000) - ANSWER_MS))


def _read_results(request: pb.AckRequest) -> dict[Receipt, MessageResult]:
    """Return the results of an ack by receipt; a receipt that can't be read has none."""
    results: dict[Receipt, MessageResult] = {}
    for index, token in enumerate(request.receipts):
        if index in request.results:
            with suppress(InvalidRequest):  # the error is the answer for this receipt
                result = messages.read_result(request.results[index], MessageResult)
                results.setdefault(read_receipt(token), result)
    return results


def _generation(call: Call) -> int | None:
    """Return how many members of the namespace the caller counts; None if it called the mailbox by name."""
    return read_number(call.metadata, MEMBERS_KEY)


def _reserved_topic(batch: Sequence[NewMessage]) -> str:
    """Return the topic of records of members if one of the messages is such a record."""
    return RESERVED_TOPIC if any(message.topic == RESERVED_TOPIC for message in batch) else ""


def _check_count(name: str, count: int) -> None:
    if count > MAX_ITEMS:
        raise InvalidRequest(
            f"A request has up to {MAX_ITEMS} {name}, and this one has {count}; send them in several."
        )


async def _settle(
    tokens: Sequence[str],
    settle: Settle,
    results: Any,
    select: Callable[[Sequence[Receipt], Sequence[Rejected | None]], list[Receipt]],
) -> list[Receipt]:
    """Settle deliveries by their receipts, write a result for each, and return those selected."""
    _check_count("receipts", len(tokens))
    selected: list[Receipt] = []

    async def submit(receipts: list[Receipt]) -> list[Rejected | None]:
        answers = await settle(receipts)
        selected.extend(select(receipts, answers))
        return answers

    for refusal in await submit_valid(tokens, read_receipt, submit):
        result = results.add()
        if refusal is not None:
            write_error(refusal, result.error)
    return selected
