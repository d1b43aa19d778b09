"""A model of redrive jobs: whatever happens, each message they select is changed once, and none besides."""

from collections import Counter
from collections.abc import Sequence, Set
from typing import Any

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.ports.event_log import EventLogReader
from postroom.application.reports import RedriveReport
from postroom.domain.message import (
    REPLACED,
    MessageAcked,
    MessageDeadLettered,
    MessageExpired,
    MessageReceived,
    MessageRedriven,
    MessageRescheduled,
    MessageSent,
)
from postroom.domain.names import message_stream
from postroom.domain.redrive.spec import RedriveSpec
from tests.support.redrives import NAME, add_dead_letters, dead_ids, ended, log_of, owned, send
from tests.support.waiting import until_answer

KINDS = {
    "redrive": RedriveSpec(topics=("orders",)),
    "copies": RedriveSpec(topics=("orders",), destination="fixed"),
    "edits": RedriveSpec(topics=("orders",), set_headers={"x": "1"}, merge_patch='{"a": 1}'),
    "archive": RedriveSpec(topics=("orders",), action="archive"),
    "purge": RedriveSpec(topics=("orders",), action="purge"),
}
"""A job of each kind, on the dead letters of one topic."""
STEPS = ("work", "fail", "receive", "pause", "resume", "restart", "redrive", "fail again", "settle")
"""What may happen to a job: it works, messages fail and are received, and others change what it selected."""

WAITING = {
    "cancel": RedriveSpec(topics=("ord*",), action="cancel", note="over"),
    "reschedule": RedriveSpec(topics=("ord*",), action="reschedule", delay_ms=3_600_000),
}
"""A job of each kind, on the messages of one topic that wait."""
WAITING_STEPS = (
    "work",
    "send",
    "deliver",
    "ack",
    "reject",
    "release",
    "redrive",
    "pause",
    "resume",
    "restart",
)
"""What may happen to such a job: messages are sent, delivered, settled, released or redriven, too."""


def changes(log: MemoryEventLog, kind: str) -> Counter[bytes]:
    """Count how often jobs of a kind, or calls that do the same, changed each message."""
    copied: Counter[bytes] = Counter()
    changed: Counter[bytes] = Counter()
    for _, event in log.replay():
        match event:
            case MessageRedriven() if kind == "redrive":
                changed[event.stream] += 1
            case MessageExpired(reason="archived" | "purged") if kind in ("archive", "purge"):
                changed[event.stream] += 1
            case MessageDeadLettered() if event.reason == REPLACED:
                changed[event.stream] += 1
            case MessageSent() if not event.headers.message_id:
                copied[message_stream(NAME, (event.headers.custom_headers or {})["id"])] += 1
    if kind in ("copies", "edits"):
        assert copied == changed, (
            "The copies that were sent are not those of the messages that were replaced."
        )
    return changed


async def check_job(kind: str, steps: Sequence[str], count: int, batch: int, receives: int = 0) -> None:
    """Run a job to its end, with a crash after each step, and undo it; check what it changed.

    Arguments:
        steps: what happens meanwhile, see `STEPS`.
        count: number of the messages that the job selects.
        batch: number of messages that it changes at a time.
        receives: number of messages that are received before it is undone.
    """
    ids = [f"m{number}" for number in range(count)]
    log = MemoryEventLog(NAME)
    async with owned(log, is_running=False) as mailbox:
        await add_dead_letters(mailbox, ["mail"], topic="mail", payload=b"{}")
        await add_dead_letters(mailbox, ids, payload=b"{}")
        job = (await mailbox.start_redrive(KINDS[kind])).job_id
    by_others: Counter[bytes] = Counter()
    taken: set[bytes] = set()
    for index, step in enumerate(steps):
        async with owned(log, batch=batch, is_running=step in ("work", "fail", "receive")) as mailbox:
            match step:
                case "work":
                    await _until_progress(mailbox, job)
                case "fail":
                    await add_dead_letters(mailbox, [f"new{index}"], payload=b"{}")
                case "receive":
                    await mailbox.receive_messages(["orders", "fixed"], max_messages=1)
                case "pause" | "resume" if (await mailbox.get_redrive(job)).status in ("running", "paused"):
                    await mailbox.change_redrive(job, step)
                case "redrive" | "fail again" | "settle":
                    stream = message_stream(NAME, ids[-1])
                    is_first = changes(log, kind)[stream] == by_others[stream]
                    if await mailbox.redrive_dead_letters("orders", message_ids=[ids[-1]]):
                        by_others[stream] += kind == "redrive"
                        if is_first:
                            taken.add(stream)
                        await _receive(mailbox, ids[-1], step)
        if step != "restart":  # with the snapshot that it saves at its end
            log = log_of(list(log.commits()))
    async with owned(log, batch=batch) as mailbox:
        report = await _finish(mailbox, job)
        assert "mail" in await dead_ids(mailbox)
    expected = Counter({stream: 1 for each in ids if (stream := message_stream(NAME, each)) not in taken})
    assert changes(log, kind) - by_others == expected
    assert (report.status, report.moved) == ("completed", expected.total())
    await _check_outcomes(log, job, batch, count)
    if KINDS[kind].action == "redrive":
        async with owned(log_of(list(log.commits())), batch=batch) as mailbox:
            if receives:
                await mailbox.receive_messages(["orders", "fixed"], max_messages=receives)
            await _check_undo(mailbox, job, expected.keys() - by_others.keys())


async def _finish(mailbox: OwnedMailbox, job: str) -> RedriveReport:
    """Return the report of a job at its end; resume it before if it is paused."""
    report = await mailbox.get_redrive(job)
    if report.status == "paused":
        await mailbox.change_redrive(job, "resume")
    return await ended(mailbox, report)


async def check_waiting_job(kind: str, steps: Sequence[str], count: int, batch: int) -> None:
    """Run a job on what waits to its end, with a crash after each step; check what it changed.

    Before it are a dead letter, which it never changes, and a message in flight, which is only cancelled.

    Arguments:
        steps: what happens meanwhile, see `WAITING_STEPS`.
        count: number of the messages that are ready when it starts.
        batch: number of messages that it changes at a time.
    """
    ids = [f"m{number}" for number in range(count)]
    log = MemoryEventLog(NAME)
    async with owned(log, is_running=False) as mailbox:
        await add_dead_letters(mailbox, ["dead"])
        await send(mailbox, ["flying"])
        await mailbox.receive_messages("orders", visibility_ms=3_600_000)
        await send(mailbox, ids)
        await send(mailbox, ["mail"], topic="mail")
        selected = [*(["flying"] if kind == "cancel" else []), *ids]
        job = (await mailbox.start_redrive(WAITING[kind], principal="ops")).job_id
    for index, step in enumerate(steps):
        async with owned(log, batch=batch, is_running=step in ("work", "send")) as mailbox:
            match step:
                case "work":
                    await _until_progress(mailbox, job)
                case "send":
                    await send(mailbox, [f"new{index}"])
                case "deliver":
                    await mailbox.receive_messages("orders", visibility_ms=3_600_000)
                case "ack" | "reject" | "release":
                    for each in await mailbox.receive_messages("orders"):
                        await getattr(each, step)()
                case "redrive":
                    await mailbox.redrive_dead_letters("orders")
                case "pause" | "resume" if (await mailbox.get_redrive(job)).status in ("running", "paused"):
                    await mailbox.change_redrive(job, step)
        if step != "restart":  # with the snapshot that it saves at its end
            log = log_of(list(log.commits()))
    async with owned(log, batch=batch) as mailbox:
        report = await _finish(mailbox, job)
        messages = (await mailbox.list_redrive_messages(job, limit=1_000)).items
    changed: dict[str, int] = {}
    for events in _events(log).values():
        id_ = events[0].headers.custom_headers["id"]
        own = [each for each in events if _is_of_job(each)]
        changed |= {id_: len(own)} if own else {}
        is_in_flight = kind == "reschedule" and isinstance(events[-1], MessageReceived)
        is_over = any(isinstance(each, MessageAcked | MessageDeadLettered) for each in events)
        assert own or is_in_flight or is_over or id_ not in selected, f"The job left {id_} out."
    assert changed.keys() <= {*selected}, "The job changed a message that it did not select."
    assert {*changed.values()} <= {1}, "The job changed a message twice."
    assert sorted(each.message_id for each in messages) == sorted(selected)
    assert sum(each.outcome != "skipped" for each in messages) == report.moved == len(changed)
    assert (report.status, report.matched) == ("completed", len(selected))
    assert report.moved + report.skipped == report.matched


def _is_of_job(event: object) -> bool:
    """Return whether a job on what waits caused an event, which tells who started it, and why."""
    match event:
        case MessageExpired(reason="cancelled", note="over", principal="ops"):
            return True
        case MessageRescheduled(principal="ops"):
            return True
    return False


async def _check_outcomes(log: MemoryEventLog, job: str, batch: int, count: int) -> None:
    """Check that each message that a job selected has exactly one outcome, and that the counts say so."""
    async with owned(log_of(list(log.commits())), batch=batch) as mailbox:
        report = await mailbox.get_redrive(job)
        messages = (await mailbox.list_redrive_messages(job, limit=1_000)).items
    assert report.matched == count == report.moved + report.skipped
    assert sorted(each.message_id for each in messages) == sorted(f"m{number}" for number in range(count))
    assert sum(each.outcome == "skipped" for each in messages) == report.skipped


async def _check_undo(mailbox: OwnedMailbox, job: str, changed: Set[bytes]) -> None:
    """Undo a job; what it changed and nobody received is a dead letter again, and nothing else changes.

    Arguments:
        changed: what the job was the last to redrive.
    """
    log, before = mailbox.engine.log, _events(mailbox.engine.log)
    origins = _origins(log)
    free = {each for each, events in before.items() if type(events[-1]) in (MessageRedriven, MessageSent)}
    if origins:  # the job sent copies
        free = {each for each in free & origins.keys() if _is_replaced(before[origins[each]][-1])}
        expected = dict.fromkeys(free, "undone") | {origins[each]: "max_attempts" for each in free}
    else:
        expected = dict.fromkeys(free & changed, "max_attempts")
    await mailbox.change_redrive(job, "undo")
    report = await ended(mailbox, await mailbox.get_redrive(job))
    after = _events(log)
    undone = {stream: events[len(before[stream]) :] for stream, events in after.items()}
    assert {stream: [each.reason for each in events] for stream, events in undone.items() if events} == {
        stream: [reason] for stream, reason in expected.items()
    }
    assert (report.restored, report.retained) == (
        len(free & (origins.keys() or changed)),
        report.moved - report.restored,
    )


def _events(log: EventLogReader) -> dict[bytes, list[Any]]:
    """Return the events of each message."""
    streams: dict[bytes, list[Any]] = {}
    for _, event in log.replay():
        if isinstance(event, MessageSent) or event.stream in streams:
            streams.setdefault(event.stream, []).append(event)
    return streams


def _origins(log: EventLogReader) -> dict[bytes, bytes]:
    """Return the message of which each copy is one."""
    return {
        event.stream: message_stream(NAME, (event.headers.custom_headers or {})["id"])
        for _, event in log.replay()
        if isinstance(event, MessageSent) and not event.headers.message_id
    }


def _is_replaced(event: object) -> bool:
    return isinstance(event, MessageDeadLettered) and event.reason == REPLACED


async def _until_progress(mailbox: OwnedMailbox, job: str) -> None:
    """Return when a job that is at work has done something."""
    before = await mailbox.get_redrive(job)

    async def has_progress() -> bool:
        report = await mailbox.get_redrive(job)
        return report.moved > before.moved or not report.is_active

    await until_answer(has_progress)


async def _receive(mailbox: OwnedMailbox, id_: str, step: str) -> None:
    """Settle a message that was redriven, or have it fail; one that is only redriven stays in its queue."""
    if step == "redrive":
        return
    for each in await mailbox.receive_messages("orders", max_messages=256):
        if each.message_id != id_:
            continue
        if step == "settle":
            await mailbox.ack_messages([each.receipt])
        else:
            await each.nack(reason="again")
