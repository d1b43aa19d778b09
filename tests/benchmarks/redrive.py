"""Redrive jobs: is a rate held, is a job cancelled at once, and does kill -9 change no message twice?

`python -m tests.benchmarks redrive.sqlite redrive.postgres`.
"""

import asyncio
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import cycle, islice
from pathlib import Path

import msgspec

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.compose.maintenance import migrate_store
from postroom.adapters.compose.store import open_store
from postroom.application.messages import NewMessage
from postroom.application.reports import RedriveReport
from postroom.application.threads import background_task
from postroom.domain.message import (
    REPLACED,
    MessageDeadLettered,
    MessageExpired,
    MessageRedriven,
    MessageRescheduled,
    MessageSent,
)
from postroom.domain.names import message_stream
from postroom.domain.policy import MailboxLimits, TopicPolicy
from postroom.domain.record import Event
from postroom.domain.redrive.job import RedriveAdvanced, RedriveCancelled, RedriveUndoStarted
from postroom.domain.redrive.spec import RedriveSpec, is_dead
from tests.benchmarks.figures import Figures, Stopwatch
from tests.benchmarks.options import Database
from tests.benchmarks.servers import postgres_server

MAILBOX, KILLED = "main@local", "killed@local"
TOPIC, COPIES = "bench.orders", "bench.repair"
DEAD = 100_000
RATES = {5_000: DEAD, 500: 5_000}
"""Messages a second, and the number of messages that each is measured with."""
RATE_GOAL_PERCENT = 5.0
CANCEL_GOAL_MS = 1_000.0
CANCELLATIONS = 5
WINDOW_SECONDS = 5
MICROSECONDS = 1_000_000
BATCH = 1_000
POLICY = TopicPolicy(max_attempts=1, shard_capacity=2_000_000, dead_capacity=2_000_000)
LIMITS = MailboxLimits(in_flight_ceiling=10_000_000, max_messages=BATCH)

DEAD_BY_KIND = 4_000
KILLED_RATE = 1_000
KILLS, KILLS_OF_UNDO = 8, 4
KINDS = {
    "redrive": RedriveSpec(),
    "copies": RedriveSpec(destination=COPIES),
    "edits": RedriveSpec(set_headers={"edit": "1"}, merge_patch='{"edit": 1}'),
    "archive": RedriveSpec(action="archive"),
    "purge": RedriveSpec(action="purge"),
    "cancel": RedriveSpec(action="cancel"),
    "reschedule": RedriveSpec(action="reschedule", delay_ms=3_600_000),
}
"""Jobs whose process is killed, each with a topic of its own."""
LATE = "late"
"""Error of the messages that fail while the jobs are at work."""


def _measure_on(database: Database) -> Callable[[Figures, Path, int], None]:
    def measure(figures: Figures, folder: Path, _: int) -> None:
        home = folder / f"redrive-{database}"
        home.mkdir()
        with postgres_server(home) if database == "postgres" else nullcontext() as server:
            store = str(home / "store.db") if server is None else server.url()
            if server is not None:
                migrate_store(store)
            name = f"redrive.{database}"
            if figures.wants(f"{name}.jobs"):
                asyncio.run(_measure_jobs(figures, f"{name}.jobs", store))
            if figures.wants(f"{name}.kills"):
                _measure_kills(figures, f"{name}.kills", store)
        shutil.rmtree(home)

    return measure


MEASUREMENTS = {"redrive.sqlite": _measure_on("sqlite"), "redrive.postgres": _measure_on("postgres")}


async def _send(mailbox: OwnedMailbox, topic: str, number: int, first: int = 0) -> None:
    payload = b'{"order": "' + b"x" * 200 + b'"}'
    ids = (f"{topic}-{each}" for each in range(first, first + number))
    while new := [
        NewMessage(topic=topic, payload=payload, message_id=each, attrs={"id": each})
        for each in islice(ids, BATCH)
    ]:
        await mailbox.send_batch(new)


async def _add_dead_letters(mailbox: OwnedMailbox, topic: str, number: int) -> None:
    for first in range(0, number, BATCH):
        await _send(mailbox, topic, min(BATCH, number - first), first)
        while received := await mailbox.receive_messages(topic, max_messages=BATCH, max_bytes=1 << 30):
            await mailbox.nack_messages([each.receipt for each in received], reason="code 500")


async def _wait(mailbox: OwnedMailbox, job: RedriveReport, moved: int | None = None) -> RedriveReport:
    """Return a job when it is not at work any more, or has changed some messages."""
    while job.is_active and (moved is None or job.moved < moved):
        await asyncio.sleep(0.005)
        job = await mailbox.get_redrive(job.job_id)
    return job


async def _undo(mailbox: OwnedMailbox, job: RedriveReport) -> float:
    """Undo a job, and return the messages that it undid a second."""
    with Stopwatch() as undoing:
        job = await _wait(mailbox, await mailbox.change_redrive(job.job_id, "undo"))
    assert job.restored == job.moved, job
    return job.restored / undoing.seconds


async def _measure_jobs(figures: Figures, name: str, store: str) -> None:
    async with open_mailbox(store, MAILBOX, default_policy=POLICY, limits=LIMITS) as mailbox:
        await _add_dead_letters(mailbox, TOPIC, DEAD)
        figures.progress(f"{name}: {DEAD:,} dead letters")
        for rate, number in RATES.items():
            await _measure_rate(figures, f"{name}.rate.{rate}", mailbox, rate, number)
        for kind, spec in (("redrive", RedriveSpec(topics=(TOPIC,))), ("copies", _copies())):
            await _measure_cancel(figures, f"{name}.{kind}", mailbox, spec)
            with Stopwatch() as working:
                job = await _wait(mailbox, await mailbox.start_redrive(spec))
            assert job.moved == DEAD, job
            figures.add(f"{name}.{kind}.full_speed", DEAD / working.seconds, "messages/s")
            figures.add(f"{name}.{kind}.undo", await _undo(mailbox, job), "messages/s")


def _copies(rate: int | None = None) -> RedriveSpec:
    return RedriveSpec(topics=(TOPIC,), destination=COPIES, set_headers={"edit": "1"}, rate=rate)


async def _measure_rate(figures: Figures, name: str, mailbox: OwnedMailbox, rate: int, number: int) -> None:
    """Redrive messages at a rate, and tell by how much the rate of their events differs from it."""
    limit = None if number == DEAD else number
    before = mailbox.engine.mailbox.position
    with Stopwatch() as starting:
        job = await mailbox.start_redrive(RedriveSpec(topics=(TOPIC,), rate=rate, limit=limit))
    if limit is None:
        figures.add(f"{name}.start", starting.seconds * 1_000, "ms")
    job = await _wait(mailbox, job)
    assert job.moved == number, job
    steps = [
        (event.at, event.moved)
        for _, event in mailbox.engine.log.replay(before)
        if isinstance(event, RedriveAdvanced) and event.moved
    ]
    seconds = (steps[-1][0] - steps[0][0]) / MICROSECONDS
    # The messages of the first step were due before it.
    actual = (number - steps[0][1]) / seconds
    figures.add(f"{name}.actual", actual, "messages/s")
    figures.add(f"{name}.deviation", abs(actual / rate - 1) * 100, "%", RATE_GOAL_PERCENT)
    worst = max(abs(each / rate - 1) for each in _rates_of_windows(steps)) * 100
    figures.add(f"{name}.deviation.worst_{WINDOW_SECONDS}s", worst, "%")
    await _undo(mailbox, job)


def _rates_of_windows(steps: list[tuple[int, int]]) -> Iterator[float]:
    """Yield the rates of one window of time after the other."""
    start, messages = steps[0][0], 0
    for at, moved in steps[1:]:
        messages += moved
        if at - start >= WINDOW_SECONDS * MICROSECONDS:
            yield messages * MICROSECONDS / (at - start)
            start, messages = at, 0


async def _measure_cancel(figures: Figures, name: str, mailbox: OwnedMailbox, spec: RedriveSpec) -> None:
    """Cancel jobs at work: how long does it take, and what is changed after it?"""
    late, seconds = 0, []
    for number in range(CANCELLATIONS):
        rate = 5_000 if number == 0 else None
        job = await mailbox.start_redrive(msgspec.structs.replace(spec, rate=rate))
        job = await _wait(mailbox, job, 5_000 * (number + 1))
        assert job.is_active, job
        with Stopwatch() as cancelling:
            job = await mailbox.change_redrive(job.job_id, "cancel")
        seconds.append(cancelling.seconds)
        assert job.status == "cancelled", job
        await asyncio.sleep(0.2)
        late += (await mailbox.get_redrive(job.job_id)).moved - job.moved
        await _undo(mailbox, job)
    is_cancelled = False
    for _, event in mailbox.engine.log.replay():
        if isinstance(event, RedriveCancelled | RedriveUndoStarted):
            is_cancelled = isinstance(event, RedriveCancelled)
        late += is_cancelled and isinstance(event, MessageRedriven | MessageSent)
    figures.add(f"{name}.cancel.rate", seconds[0] * 1_000, "ms", CANCEL_GOAL_MS)
    figures.add(f"{name}.cancel.full_speed", max(seconds[1:]) * 1_000, "ms", CANCEL_GOAL_MS)
    figures.add(f"{name}.cancel.late", late, "messages", 0)


def _measure_kills(figures: Figures, name: str, store: str) -> None:
    """Kill the owner of jobs of each kind, and count the messages that were not changed exactly once."""
    position, selection = asyncio.run(_start_jobs(store))
    chance = random.Random(1)
    _kill(store, [chance.uniform(0, 1.0) for _ in range(KILLS)])
    events = [event for _, event in open_store(store).event_log(KILLED).replay(position)]
    for kind, selected in selection.items():
        changes = Counter(stream for event in events if (stream := _stream_changed(kind, event)))
        wrong = sum(changes[each] != 1 for each in selected) + len(changes.keys() - selected)
        figures.add(f"{name}.{kind}.wrong", wrong, "messages", 0)
    late = sum(isinstance(event, MessageDeadLettered) and event.last_error == LATE for event in events)
    figures.add(f"{name}.failed_meanwhile", late, "messages")
    asyncio.run(_undo_jobs(store))
    _kill(store, [chance.uniform(0, 0.1) for _ in range(KILLS_OF_UNDO)])
    figures.add(f"{name}.undo.wrong", asyncio.run(_count_not_undone(store, selection)), "messages", 0)


def _stream_changed(kind: str, event: Event) -> bytes | None:
    """Return the message that a job changed by an event: for copies, the original."""
    reasons = {"archive": "archived", "purge": "purged", "cancel": "cancelled"}
    match event:
        case MessageRedriven() if kind == "redrive":
            return event.stream
        case MessageRescheduled() if kind == "reschedule":
            return event.stream
        case MessageExpired() if event.reason == reasons.get(kind):
            return event.stream
        case MessageSent() if event.topic == {"copies": COPIES, "edits": _topic("edits")}.get(kind):
            return message_stream(KILLED, (event.headers.custom_headers or {})["id"])
    return None


def _topic(kind: str) -> str:
    return f"killed.{kind}"


async def _start_jobs(store: str) -> tuple[int, dict[str, frozenset[bytes]]]:
    """Start a job of each kind; return the end of the log before them, and what they select."""
    selection = {}
    async with open_mailbox(store, KILLED, default_policy=POLICY, limits=LIMITS) as mailbox:
        for kind in KINDS:
            topic = _topic(kind)
            if KINDS[kind].selects_waiting:
                await _send(mailbox, topic, DEAD_BY_KIND)
            else:
                await _add_dead_letters(mailbox, topic, DEAD_BY_KIND)
            messages = mailbox.engine.mailbox.messages.values()
            selection[kind] = frozenset(each.stream for each in messages if each.topic == topic)
        position = mailbox.engine.mailbox.position
        for kind, spec in KINDS.items():
            own = msgspec.structs.replace(spec, topics=(_topic(kind),), rate=KILLED_RATE)
            await mailbox.start_redrive(own)
    return position, selection


async def _undo_jobs(store: str) -> None:
    async with open_mailbox(store, KILLED, default_policy=POLICY, limits=LIMITS) as mailbox:
        for job in await mailbox.list_redrives():
            if job.spec.action == "redrive":
                await mailbox.change_redrive(job.job_id, "undo")


async def _count_not_undone(store: str, selection: dict[str, frozenset[bytes]]) -> int:
    """Return the number of messages of undone jobs that are not dead letters again, and of copies left."""
    async with open_mailbox(store, KILLED, default_policy=POLICY, limits=LIMITS) as mailbox:
        messages = mailbox.engine.mailbox.messages
        wrong = 0
        for kind in ("redrive", "copies", "edits"):
            for stream in selection[kind]:
                message = messages.get(stream)
                wrong += message is None or not is_dead(message) or message.reason == REPLACED
        left = (each for each in messages.values() if each.topic in (COPIES, _topic("edits")))
        return wrong + sum(each.stream not in selection["edits"] for each in left)


def _kill(store: str, delays: list[float]) -> None:
    """Own the mailbox in processes that are killed some seconds after they opened it; the last is not."""
    command = [sys.executable, "-m", "tests.benchmarks.redrive", store]
    for delay in [*delays, None]:
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"open\n"
            if delay is not None:
                time.sleep(delay)
                process.kill()
            code = process.wait()
        assert code == (0 if delay is None else -signal.SIGKILL), code


async def _own(store: str) -> None:
    """Own the mailbox until all jobs have ended, while messages go on to fail."""
    async with open_mailbox(store, KILLED, default_policy=POLICY, limits=LIMITS, wait_ms=60_000) as mailbox:
        print("open", flush=True)
        async with background_task(_fail(mailbox)):
            for job in await mailbox.list_redrives():
                await _wait(mailbox, job)


async def _fail(mailbox: OwnedMailbox) -> None:
    """Send messages that become dead letters, until cancelled, to topics in which no others are ready.

    To the topics of which jobs select what waits, send messages that come too late for them.
    """
    for kind in cycle(kind for kind in KINDS if kind not in ("redrive", "edits")):
        if KINDS[kind].selects_waiting:
            await mailbox.send_message(NewMessage(topic=_topic(kind), payload=b"{}"))
            continue
        await mailbox.send_message(NewMessage(topic=_topic(kind), payload=b"{}"))
        for received in await mailbox.receive_messages(_topic(kind), max_messages=1):
            await received.nack(reason=LATE)
        await asyncio.sleep(0.01)


if __name__ == "__main__":
    asyncio.run(_own(sys.argv[1]))
