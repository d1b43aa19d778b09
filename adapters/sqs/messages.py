"""Actions on messages: send, receive, delete, and change of visibility."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeVar
from uuid import NAMESPACE_URL, uuid5

from postroom.adapters.sqs.attributes import MAX_BYTES, MAX_VISIBILITY_SECONDS, Queue
from postroom.adapters.sqs.call import Action, Call, check_range
from postroom.adapters.sqs.dead_letters import MAX_RECEIVED_BYTES, fetch, sources_of
from postroom.adapters.sqs.errors import SqsError, invalid_value, missing, translate
from postroom.adapters.sqs.message import (
    SYSTEM,
    md5,
    md5_of_attributes,
    sequence_number,
    size_of,
    to_message,
    to_received,
)
from postroom.adapters.sqs.requests import (
    BatchAnswer,
    ChangeMessageVisibility,
    ChangeMessageVisibilityBatch,
    DeleteMessage,
    DeleteMessageBatch,
    Done,
    Empty,
    Failed,
    Messages,
    NewMessage,
    ReceiveMessage,
    SendMessage,
    SendMessageBatch,
    Sent,
)
from postroom.application import messages
from postroom.application.messages import read_receipt
from postroom.application.received_messages import ReceivedMessage
from postroom.domain.errors import (
    IdempotencyConflict,
    InvalidRequest,
    NotFound,
    PostroomError,
    Rejected,
    Saturated,
    StaleReceipt,
)
from postroom.domain.message import Receipt
from postroom.domain.policy import MIN_VISIBILITY_MS, SECOND_MS

T = TypeVar("T")
E = TypeVar("E", bound=Any)
MAX_BATCH: Final = 10
DEAD_LETTER_POLL_MS: Final = 1_000
"""Interval at which a long poll of a dead-letter queue looks for dead letters of its sources."""
_ENTRY_ID = re.compile(r"[A-Za-z0-9_-]{1,80}")
_FIRST_RECEIVED = "ApproximateFirstReceiveTimestamp"


async def send_message(call: Call, request: SendMessage) -> Sent:
    """Send a message."""
    queue = await call.queue(request.queue_url)
    (answer,) = await _send(call, queue, [to_message(queue, request)])
    if isinstance(answer, Rejected):
        raise answer
    return _describe(request, answer)


async def send_message_batch(call: Call, request: SendMessageBatch) -> BatchAnswer:
    """Send up to ten messages."""
    queue = await call.queue(request.queue_url)
    entries = _check_batch(request.entries)
    total = sum(map(size_of, entries))
    if total > MAX_BYTES:
        raise SqsError(
            "BatchRequestTooLong",
            f"Batch requests cannot be longer than {MAX_BYTES} bytes. You have sent {total} bytes.",
        )

    async def send(new: Sequence[messages.NewMessage]) -> Sequence[_Sent | Rejected]:
        return await _send(call, queue, new)

    return await _each(
        entries,
        lambda entry: to_message(queue, entry),
        send,
        lambda entry, answer: _describe(entry, answer, entry.id),
    )


class _Sent(NamedTuple):
    message_id: str
    sequence_number: str | None = None


async def _send(call: Call, queue: Queue, new: Sequence[messages.NewMessage]) -> list[_Sent | Rejected]:
    answers = await call.service.writes.watch(call.mailbox.send_batch(new))
    return await asyncio.gather(*(_outcome(call, queue, *each) for each in zip(new, answers, strict=True)))


async def _outcome(
    call: Call, queue: Queue, new: messages.NewMessage, answer: messages.Sent | Rejected
) -> _Sent | Rejected:
    if isinstance(answer, IdempotencyConflict):
        # SQS accepts another body with a deduplication id, and does not deliver it.
        return _Sent(str(uuid5(NAMESPACE_URL, f"{queue.name} {new.idem_key}")))
    if isinstance(answer, Rejected):
        return answer
    if not queue.is_fifo:
        return _Sent(answer.message_id)
    with suppress(NotFound):  # retention may have removed a duplicate's original
        detail = await call.service.mailbox.get_message(answer.message_id)
        return _Sent(answer.message_id, sequence_number(detail.history[0].position))
    return _Sent(answer.message_id)


def _describe(new: NewMessage, answer: _Sent, id_: str | None = None) -> Sent:
    return Sent(
        id=id_,
        message_id=answer.message_id,
        md5_of_message_body=md5(new.message_body),
        md5_of_message_attributes=md5_of_attributes(new.message_attributes),
        md5_of_message_system_attributes=md5_of_attributes(new.message_system_attributes),
        sequence_number=answer.sequence_number,
    )


async def receive_message(call: Call, request: ReceiveMessage) -> Messages:
    """Receive up to ten messages, and wait up to 20 s for the first one."""
    queue = await call.queue(request.queue_url)
    check_range("MaxNumberOfMessages", request.max_number_of_messages, 1, MAX_BATCH)
    check_range("VisibilityTimeout", request.visibility_timeout, 0, MAX_VISIBILITY_SECONDS)
    check_range("WaitTimeSeconds", request.wait_time_seconds, 0, 20)
    system = {*request.attribute_names, *request.message_system_attribute_names}
    if unknown := system - SYSTEM:
        raise SqsError("InvalidAttributeName", f"Unknown Attribute {min(unknown)}.")
    wait = request.wait_time_seconds
    if wait is None:
        wait = queue.number("ReceiveMessageWaitTimeSeconds")
    visibility_ms = queue.visibility_ms
    if request.visibility_timeout is not None:
        visibility_ms = max(MIN_VISIBILITY_MS, request.visibility_timeout * SECOND_MS)
    most, wait_ms = request.max_number_of_messages, wait * SECOND_MS
    try:
        received = await _receive(call, queue, most, visibility_ms, wait_ms)
    except Saturated as error:
        raise SqsError("OverLimit", str(error), 403) from error
    if call.closed.is_set() and received:
        await call.service.mailbox.nack_messages(
            [each.receipt for each in received], delay_ms=0, action="release", reason="client disconnected"
        )
    first = [await _first_received(call, each, system) for each in received]
    return Messages(
        messages=[
            to_received(queue, message, request.message_attribute_names, system, at)
            for message, at in zip(received, first, strict=True)
        ]
    )


async def _receive(
    call: Call, queue: Queue, most: int, visibility_ms: int, wait_ms: int
) -> list[ReceivedMessage]:
    """Receive messages; a dead-letter queue gets dead letters of its sources while it has no others."""

    async def receive(milliseconds: int) -> list[ReceivedMessage]:
        receiving = call.mailbox.receive_messages(
            queue.name,
            max_messages=most,
            max_bytes=MAX_RECEIVED_BYTES,
            visibility_ms=visibility_ms,
            wait_ms=0 if call.service.stopping.is_set() else milliseconds,
        )
        return await (call.service.unless_ended(call.closed, receiving) if milliseconds else receiving) or []

    sources = await sources_of(call, queue)
    if not sources:
        return await receive(wait_ms)
    until = asyncio.get_running_loop().time() + wait_ms / SECOND_MS
    received = await receive(0)
    while not received:
        left_ms = int((until - asyncio.get_running_loop().time()) * SECOND_MS)
        has_more = await fetch(call, queue.name, sources, most)
        received = await receive(max(0, min(left_ms, DEAD_LETTER_POLL_MS)))
        if (left_ms <= 0 and not has_more) or call.closed.is_set() or call.service.stopping.is_set():
            break
    return received


async def _first_received(call: Call, message: ReceivedMessage, names: set[str]) -> int | None:
    """Return when a message was delivered first (ms), if that is asked for."""
    if names.isdisjoint(("All", _FIRST_RECEIVED)):
        return None
    now = int(time.time() * 1_000)
    if message.attempt == 1:
        return now
    detail = await call.service.mailbox.get_message(message.message_id)
    times = [each.at for each in detail.history if each.event == "MessageReceived"]
    return int(datetime.fromisoformat(times[0]).timestamp() * 1_000) if times else now


async def delete_message(call: Call, request: DeleteMessage) -> Empty:
    """Delete a message that was received."""
    queue = await call.queue(request.queue_url)
    (answer,) = await _delete(call, queue, [_receipt(request.receipt_handle)])
    if isinstance(answer, Rejected):
        raise answer
    return Empty()


async def delete_message_batch(call: Call, request: DeleteMessageBatch) -> BatchAnswer:
    """Delete up to ten messages."""
    queue = await call.queue(request.queue_url)

    async def delete(receipts: Sequence[Receipt]) -> Sequence[Rejected | None]:
        return await _delete(call, queue, receipts)

    entries = _check_batch(request.entries)
    return await _each(entries, lambda entry: _receipt(entry.receipt_handle), delete, _done)


async def _delete(call: Call, queue: Queue, receipts: Sequence[Receipt]) -> list[Rejected | None]:
    answers = await call.mailbox.ack_messages(receipts)
    if queue.is_fifo:
        return answers
    # As in SQS, a message that was deleted before, or delivered again, is no error.
    return [None if isinstance(each, StaleReceipt | NotFound) else each for each in answers]


async def change_message_visibility(call: Call, request: ChangeMessageVisibility) -> Empty:
    """Hide a received message for a time from now on."""
    await call.queue(request.queue_url)
    answer = await _hide(call, *_visibility(request))
    if answer is not None:
        raise answer
    return Empty()


async def change_message_visibility_batch(call: Call, request: ChangeMessageVisibilityBatch) -> BatchAnswer:
    """Hide up to ten received messages, each for a time of its own."""
    await call.queue(request.queue_url)

    async def hide(items: Sequence[tuple[Receipt, int]]) -> Sequence[Rejected | SqsError | None]:
        return await asyncio.gather(*(_hide(call, *each) for each in items))

    return await _each(_check_batch(request.entries), _visibility, hide, _done)


def _visibility(entry: Any) -> tuple[Receipt, int]:
    if entry.visibility_timeout is None:
        raise missing("VisibilityTimeout")
    if not 0 <= entry.visibility_timeout <= MAX_VISIBILITY_SECONDS:
        raise invalid_value(
            "VisibilityTimeout",
            entry.visibility_timeout,
            f"VisibilityTimeout must be an integer between 0 and {MAX_VISIBILITY_SECONDS}.",
        )
    return _receipt(entry.receipt_handle), entry.visibility_timeout


async def _hide(call: Call, receipt: Receipt, seconds: int) -> Rejected | SqsError | None:
    if seconds:
        (answer,) = await call.mailbox.extend_visibility([receipt], seconds * SECOND_MS)
    else:
        (answer,) = await call.mailbox.nack_messages([receipt], delay_ms=0)
    return (
        SqsError("MessageNotInflight", str(answer)) if isinstance(answer, StaleReceipt | NotFound) else answer
    )


def _receipt(handle: str) -> Receipt:
    if not handle:
        raise missing("ReceiptHandle")
    try:
        return read_receipt(handle)
    except InvalidRequest:
        raise SqsError(
            "ReceiptHandleIsInvalid",
            f'The input receipt handle "{handle[:99]}" is not valid.',
        ) from None


def _done(entry: Any, answer: object) -> Done:
    return Done(id=entry.id)


def _check_batch(entries: Sequence[E]) -> Sequence[E]:
    if not entries:
        raise SqsError("EmptyBatchRequest", "There should be at least one entry in the request.")
    if len(entries) > MAX_BATCH:
        raise SqsError(
            "TooManyEntriesInBatchRequest",
            f"Maximum number of entries per request are {MAX_BATCH}. You have sent {len(entries)}.",
        )
    ids = [each.id for each in entries]
    for id_ in ids:
        if not _ENTRY_ID.fullmatch(id_):
            raise SqsError(
                "InvalidBatchEntryId",
                "A batch entry id has 1 to 80 alphanumeric characters, hyphens and underscores.",
            )
        if ids.count(id_) > 1:
            raise SqsError("BatchEntryIdsNotDistinct", f"Id {id_} repeated.")
    return entries


async def _each(
    entries: Sequence[E],
    check: Callable[[E], T],
    submit: Callable[[list[T]], Awaitable[Sequence[Any]]],
    describe: Callable[[E, Any], Sent | Done],
) -> BatchAnswer:
    """Submit the valid entries of a batch together, and return the outcome of each."""
    valid: list[tuple[E, T]] = []
    failed: list[Failed] = []
    for entry in entries:
        try:
            valid.append((entry, check(entry)))
        except SqsError as error:
            failed.append(_failed(entry, error))
    answers = await submit([item for _, item in valid]) if valid else ()
    successful = []
    for (entry, _), answer in zip(valid, answers, strict=True):
        if isinstance(answer, SqsError | PostroomError):
            failed.append(_failed(entry, answer))
        else:
            successful.append(describe(entry, answer))
    return BatchAnswer(successful=successful, failed=failed)


def _failed(entry: Any, error: SqsError | PostroomError) -> Failed:
    error = translate(error) if isinstance(error, PostroomError) else error
    return Failed(id=entry.id, sender_fault=error.fault == "Sender", code=error.code, message=error.message)


ACTIONS = {
    "SendMessage": Action(SendMessage, send_message),
    "SendMessageBatch": Action(SendMessageBatch, send_message_batch),
    "ReceiveMessage": Action(ReceiveMessage, receive_message),
    "DeleteMessage": Action(DeleteMessage, delete_message),
    "DeleteMessageBatch": Action(DeleteMessageBatch, delete_message_batch),
    "ChangeMessageVisibility": Action(ChangeMessageVisibility, change_message_visibility),
    "ChangeMessageVisibilityBatch": Action(ChangeMessageVisibilityBatch, change_message_visibility_batch),
}
