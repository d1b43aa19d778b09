"""Mailboxes with dead letters, and redrive jobs on them, over a log in memory."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.adapters.system.clock import SystemClock
from postroom.application.mailbox.codec import to_records
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.messages import NewMessage
from postroom.application.redrive.jobs import RedriveWorker
from postroom.application.reports import RedriveReport
from postroom.application.threads import background_task
from postroom.domain.commit import Commit, IndexEntry
from postroom.domain.mailbox.commands import Sweep
from postroom.domain.policy import TopicPolicy
from postroom.domain.redrive.spec import RedriveSpec
from postroom.domain.settings import SettingsChanges
from tests.support.waiting import until_answer

NAME = "main@local"
POLICY = TopicPolicy(max_attempts=1)
FULL = TopicPolicy(max_attempts=1, shards=1, shard_capacity=10)
"""Policy of a topic in which a job waits while nine messages are ready."""
EVERY_FIELD = RedriveSpec(
    text="smith",
    match="word pre*",
    topics=("orders.*", "mail"),
    reasons=("max_attempts",),
    fingerprints=("0123456789abcdef",),
    message_ids=("m1",),
    dead_since=1_000,
    dead_until=2_000,
    start_time=3_000,
    end_time=4_000,
    principals=("ann",),
    correlation_id="c1",
    trace_id="0123456789abcdef0123456789abcdef",
    namespace="acme",
    headers={"region": "eu"},
    rate=5,
    delay_ms=1_000,
    limit=6,
    destination="repair",
    set_headers={"by": "ops"},
    remove_headers=("old",),
    merge_patch='{"a": 1}',
    keys=("ann",),
)
"""A selection and copies with a value in each field but the action and what the next two have."""
CANCEL = RedriveSpec(
    action="cancel", topics=("orders",), keys=("ann",), note="ordered twice", statuses=("ready", "in_flight")
)
RESCHEDULE = RedriveSpec(action="reschedule", message_ids=("m1",), at=5_000, limit=2)


@asynccontextmanager
async def owned(
    log: MemoryEventLog, *, batch: int = 3, policy: TopicPolicy = POLICY, is_running: bool = True
) -> AsyncIterator[OwnedMailbox]:
    """Own a mailbox, whose jobs change `batch` messages at a time; a crash leaves nothing but its log."""
    engine = MailboxEngine(log, SystemClock())
    await engine.open("test", settings=SettingsChanges.of(None, policy))
    postroom = OwnedMailbox(engine, SystemClock())
    postroom.redrives.worker = RedriveWorker(engine, batch=batch)
    async with background_task(postroom.redrives.worker.run() if is_running else _nothing()):
        yield postroom
    await engine.close()


async def _nothing() -> None:
    return


def log_of(commits: Sequence[Commit]) -> MemoryEventLog:
    """Return a log that ends with these commits: what a crash leaves."""
    log = MemoryEventLog(NAME)
    for commit in commits:
        records = to_records(commit)
        entries = [
            IndexEntry(each.stream, each.version, each.position) for each in records if not each.distance
        ]
        log.append([commit._replace(entries=entries)])
    return log


async def add_dead_letters(
    mailbox: OwnedMailbox,
    ids: Sequence[str],
    *,
    topic: str = "orders",
    error: str = "boom",
    payload: bytes | None = None,
) -> None:
    """Send messages that fail at once; the id is the header `id`, too, and the payload if there is none."""
    for id_ in ids:
        await mailbox.send_message(
            NewMessage(topic=topic, payload=payload or id_.encode(), message_id=id_, attrs={"id": id_})
        )
    while received := await mailbox.receive_messages(topic, max_messages=256):
        await mailbox.nack_messages([each.receipt for each in received], reason=error)


async def send(mailbox: OwnedMailbox, ids: Sequence[str], *, topic: str = "orders") -> None:
    """Send messages; the id is the header `id` and the payload, too."""
    new = [NewMessage(topic, each.encode(), message_id=each, attrs={"id": each}) for each in ids]
    await mailbox.send_batch(new)


async def ended(mailbox: OwnedMailbox, job: RedriveReport) -> RedriveReport:
    """Return a job when it is not at work any more."""

    async def is_idle() -> bool:
        return not (await mailbox.get_redrive(job.job_id)).is_active

    await until_answer(is_idle)
    await mailbox.engine.submit([Sweep()])  # is answered when what was decided before is durable
    return await mailbox.get_redrive(job.job_id)


async def dead_ids(mailbox: OwnedMailbox) -> list[str]:
    """Return the ids of the dead letters, sorted."""
    return sorted(each.message_id for each in (await mailbox.list_dead_letters(limit=1_000)).items)


async def ready_ids(mailbox: OwnedMailbox, topic: str = "orders") -> list[str]:
    """Return the ids of the ready messages of a topic, sorted."""
    return sorted(each.message_id for each in await mailbox.peek_messages(topic, limit=1_000))
