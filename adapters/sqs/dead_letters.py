"""Dead-letter queues: they deliver the dead letters of their source queues, and move tasks redrive these."""

import asyncio
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

import msgspec

from postroom.adapters.sqs.attributes import ARN, OWN, Queue, list_queues, name_of
from postroom.adapters.sqs.call import Action, Call, check_range
from postroom.adapters.sqs.errors import SqsError, invalid_value, missing
from postroom.adapters.sqs.message import SOURCE
from postroom.adapters.sqs.requests import (
    CancelledTask,
    CancelMessageMoveTask,
    ListMessageMoveTasks,
    MoveTask,
    MoveTasks,
    StartMessageMoveTask,
    TaskHandle,
)
from postroom.application.messages import NewMessage
from postroom.application.operations.mailbox import Mailbox
from postroom.application.received_messages import ReceivedMessage
from postroom.application.reports import RedriveReport
from postroom.domain.capability.rights import Right
from postroom.domain.errors import InvalidRequest, NotFound, Rejected
from postroom.domain.message import DeadReason, Receipt
from postroom.domain.redrive.spec import RedriveSpec

REASONS: Final[tuple[DeadReason, ...]] = ("max_attempts", "rejected")
"""Reasons of the dead letters that a dead-letter queue delivers; dead letters with other reasons expired."""
JOB_SECONDS: Final = 5.0
"""How long a call waits for its job, which goes on afterwards."""
MAX_COUNTED_PAGES: Final = 10
MAX_RECEIVED_BYTES: Final = 16 << 20
MOVE_BATCH: Final = 100
MOVE_VISIBILITY_MS: Final = 300_000
"""How long messages stay hidden in a queue from which others are moved, if the server is killed meanwhile."""
MAX_TASKS: Final = 10
_PAGE: Final = 1_000
_STATUSES = {"running": "RUNNING", "paused": "RUNNING", "completed": "COMPLETED"}


async def sources_of(call: Call, target: Queue) -> tuple[str, ...]:
    """Return the names of the queues whose dead-letter queue this one is."""
    queues = list_queues(await call.service.mailbox.get_settings())
    return tuple(each.name for each in queues if each.dead_letter_queue == target.name)


async def count_dead(call: Call, sources: Collection[str]) -> int:
    """Return the number of dead letters that a dead-letter queue has yet to deliver, up to a limit."""
    mailbox, count = call.service.mailbox, 0
    for source in sources:
        for reason in REASONS:
            cursor = None
            for _ in range(MAX_COUNTED_PAGES):
                page = await mailbox.list_dead_letters(source, reason=reason, limit=_PAGE, cursor=cursor)
                count += len(page.items)
                cursor = page.next_cursor
                if cursor is None:
                    break
    return count


async def fetch(call: Call, target: str, sources: Collection[str], most: int | None = None) -> int:
    """Send copies of dead letters to their dead-letter queue, in place of the dead letters.

    Arguments:
        most: maximum number from each source, up to 1,000; None for all.

    Returns: how many there were.
    """
    mailbox, count = call.service.mailbox, 0
    for source in sources:
        for reason in REASONS:
            page = await mailbox.list_dead_letters(source, reason=reason, limit=most or 1)
            if not page.items:
                continue
            count += len(page.items)
            job = await mailbox.start_redrive(
                RedriveSpec(
                    topics=(source,),
                    reasons=(reason,),
                    message_ids=tuple(each.message_id for each in page.items) if most else (),
                    destination=target,
                    set_headers={SOURCE: ARN + source},
                )
            )
            await finish(mailbox, job)
    return count


async def finish(mailbox: Mailbox, job: RedriveReport) -> None:
    """Wait for the end of a job, for a limited time."""
    until = asyncio.get_running_loop().time() + JOB_SECONDS
    while job.is_active and asyncio.get_running_loop().time() < until:
        await asyncio.sleep(0.01)
        job = await mailbox.get_redrive(job.job_id)


async def start_message_move_task(call: Call, request: StartMessageMoveTask) -> TaskHandle:
    """Move messages of a dead-letter queue to their source queues, or to another one."""
    target, sources = await _find(call, request.source_arn)
    check_range("MaxNumberOfMessagesPerSecond", request.max_number_of_messages_per_second, 1, 500)
    await call.grant.check(Right.REDRIVE)  # before messages are moved
    if not all(map(call.grant.covers, sources)):
        raise SqsError("AccessDeniedException", "The access key is not for all sources of the queue.", 403)
    destination = None
    if request.destination_arn is not None:
        destination = (await _existing(call, name_of(request.destination_arn, "DestinationArn"))).name
    if any(job.is_active for job in await _jobs(call, sources)):
        raise invalid_value(
            "SourceArn", request.source_arn, "There is a task running; only one of a queue is allowed."
        )
    await _return_received(call, target, sources, destination)
    job = await call.mailbox.start_redrive(
        RedriveSpec(
            topics=sources,
            reasons=REASONS,
            rate=request.max_number_of_messages_per_second,
            destination=destination,
        )
    )
    return TaskHandle(task_handle=_handle(job))


async def _return_received(
    call: Call, target: Queue, sources: Collection[str], destination: str | None
) -> None:
    """Move the messages that were received from a dead-letter queue before, and are visible again."""
    mailbox, arns = call.mailbox, {ARN + each for each in sources}
    topics = await call.service.mailbox.list_topics()
    left = sum(each.ready for each in topics if each.topic == target.name)  # later messages stay
    others: list[Receipt] = []
    try:
        while left > 0:
            received = await mailbox.receive_messages(
                target.name,
                max_messages=MOVE_BATCH,
                max_bytes=MAX_RECEIVED_BYTES,
                visibility_ms=MOVE_VISIBILITY_MS,
            )
            if not received:
                break
            left -= len(received)
            moved = [each for each in received if destination or each.attrs.get(SOURCE) in arns]
            if target.is_fifo:
                moved = _in_order(received, moved)
            answers = await mailbox.send_batch([_returned(each, destination) for each in moved])
            sent = [
                each.receipt
                for each, answer in zip(moved, answers, strict=True)
                if not isinstance(answer, Rejected)
            ]
            await mailbox.ack_messages(sent)
            others += [each.receipt for each in received if each.receipt not in sent]
            for answer in answers:
                if isinstance(answer, Rejected):
                    raise answer
    finally:
        for start in range(0, len(others), MOVE_BATCH):
            await mailbox.nack_messages(others[start : start + MOVE_BATCH], delay_ms=0, action="release")


def _in_order(received: Sequence[ReceivedMessage], moved: Sequence[ReceivedMessage]) -> list[ReceivedMessage]:
    """Return the messages to move, except those that follow a message of their group that stays."""
    stays = {each.ordered_key: each.delivery.position for each in reversed(received) if each not in moved}
    return [
        each
        for each in moved
        if each.ordered_key not in stays or each.delivery.position < stays[each.ordered_key]
    ]


def _returned(message: ReceivedMessage, destination: str | None) -> NewMessage:
    return NewMessage(
        topic=destination or name_of(message.attrs[SOURCE], "SourceArn"),
        payload=message.payload,
        attrs={name: value for name, value in message.binary_attrs.items() if name != SOURCE},
        idem_key=f"move {message.message_id}",
        sticky_key=message.attrs.get(OWN + "MessageGroupId"),
        causality_parent=message.message_id,
    )


async def list_message_move_tasks(call: Call, request: ListMessageMoveTasks) -> MoveTasks:
    """Return the latest move tasks of a dead-letter queue, newest first."""
    check_range("MaxResults", request.max_results, 1, MAX_TASKS)
    target, sources = await _find(call, request.source_arn)
    jobs = await _jobs(call, sources)
    return MoveTasks(results=[_describe(target, each) for each in jobs[: request.max_results or 1]])


async def cancel_message_move_task(call: Call, request: CancelMessageMoveTask) -> CancelledTask:
    """Cancel a move task; what it moved stays moved."""
    if not request.task_handle:
        raise missing("TaskHandle")
    id_ = _job_id(request.task_handle)
    try:
        if not (await call.mailbox.get_redrive(id_)).is_active:
            raise InvalidRequest("The job has ended.")
        job = await call.mailbox.change_redrive(id_, "cancel")
    except NotFound:
        raise SqsError("ResourceNotFoundException", "The task does not exist.", 404) from None
    except InvalidRequest:
        raise SqsError("UnsupportedOperation", "Only active tasks can be cancelled.") from None
    return CancelledTask(approximate_number_of_messages_moved=job.moved)


async def _find(call: Call, arn: str) -> tuple[Queue, tuple[str, ...]]:
    """Return a dead-letter queue and its sources."""
    if not arn:
        raise missing("SourceArn")
    target = await _existing(call, name_of(arn, "SourceArn"))
    sources = await sources_of(call, target)
    if not sources:
        raise invalid_value("SourceArn", arn, "Source queue must be configured as a Dead Letter Queue.")
    return target, sources


async def _existing(call: Call, name: str) -> Queue:
    call.check_covered(name)
    try:
        return await call.find(name)
    except SqsError:
        raise SqsError(
            "ResourceNotFoundException", "The resource that you specified does not exist.", 404
        ) from None


async def _jobs(call: Call, sources: Collection[str]) -> list[RedriveReport]:
    """Return the jobs of move tasks from a dead-letter queue, newest first."""
    jobs = await call.mailbox.list_redrives()
    moves = [each for each in jobs if (each.spec.action, each.spec.reasons) == ("redrive", REASONS)]
    return [each for each in moves if not set(each.spec.topics).isdisjoint(sources)]


def _describe(target: Queue, job: RedriveReport) -> MoveTask:
    is_active, destination = job.status in ("running", "paused"), job.spec.destination
    return MoveTask(
        task_handle=_handle(job) if is_active else None,
        status=_STATUSES.get(job.status, "CANCELLED"),
        source_arn=ARN + target.name,
        destination_arn=None if destination is None else ARN + destination,
        max_number_of_messages_per_second=job.spec.rate,
        approximate_number_of_messages_moved=job.moved,
        approximate_number_of_messages_to_move=job.matched,
        started_timestamp=int(datetime.fromisoformat(job.started_at).timestamp() * 1_000),
    )


def _handle(job: RedriveReport) -> str:
    return urlsafe_b64encode(msgspec.json.encode({"taskId": job.job_id})).decode()


def _job_id(handle: str) -> str:
    try:
        task = msgspec.json.decode(urlsafe_b64decode(handle), type=dict[str, UUID])
        return str(task["taskId"])
    except (ValueError, KeyError, msgspec.DecodeError):
        raise invalid_value("TaskHandle", handle, "It is not the handle of a task.") from None


ACTIONS = {
    "StartMessageMoveTask": Action(StartMessageMoveTask, start_message_move_task),
    "ListMessageMoveTasks": Action(ListMessageMoveTasks, list_message_move_tasks),
    "CancelMessageMoveTask": Action(CancelMessageMoveTask, cancel_message_move_task),
}
