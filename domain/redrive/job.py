"""Redrive jobs: their commands and events, and their state."""

from enum import StrEnum

import msgspec

from postroom.domain.message import DeadReason, Headers
from postroom.domain.record import Event
from postroom.domain.redrive.spec import JobAction, RedriveSpec, SkipReason


class RedriveStarted(Event, frozen=True, gc=False):
    """An operator started a redrive job.

    Arguments:
        cutoff: position of the log up to which messages must have been dead-lettered to be selected;
            messages that wait must have been sent by then.
        matched: number of the messages that matched.
        principal: who started it; None for a caller without a capability.
    """

    spec: RedriveSpec
    cutoff: int
    matched: int
    principal: str | None


class RedriveAdvanced(Event, frozen=True, gc=False):
    """The job changed messages, by the events before this one in its commit.

    Arguments:
        cursor: dead-letterings, or sends of waiting messages, up to this position are done with.
        moved: number of messages that were changed; as many events precede this one. If the job sends copies,
            these events are the originals' dead-letterings, and as many events before them send the copies.
        skipped: number of messages that it left alone, as they no longer match the selection.
    """

    cursor: int
    moved: int
    skipped: int


class RedriveSkipped(Event, frozen=True, gc=False):
    """The job left a message as it is; the event of its progress in the same commit counts it.

    Arguments:
        message: its stream.
    """

    message: bytes
    reason: SkipReason


class RedrivePaused(Event, frozen=True, gc=False):
    """An operator paused the job."""

    principal: str | None


class RedriveResumed(Event, frozen=True, gc=False):
    """An operator resumed the job."""

    principal: str | None


class RedriveCancelled(Event, frozen=True, gc=False):
    """An operator cancelled the job; its effects stay."""

    principal: str | None


class RedriveCompleted(Event, frozen=True, gc=False):
    """The job is done with all that it selected."""


class RedriveUndoStarted(Event, frozen=True, gc=False):
    """An operator had the job undone, as far as nobody received its messages."""

    principal: str | None


class RedriveUndoAdvanced(Event, frozen=True, gc=False):
    """Messages of the job are dead letters again, by the events before this one in its commit.

    Arguments:
        cursor: the job's events up to this version are undone.
        restored: number of messages that are dead letters again; as many events precede this one. If the job
            sent copies, as many events before these remove the copies.
        retained: number of messages that stay as they are, because they were received or removed since.
    """

    cursor: int
    restored: int
    retained: int


class RedriveUndone(Event, frozen=True, gc=False):
    """All messages of the job that nobody received are dead letters again."""


RedriveEvent = (
    RedriveStarted
    | RedriveAdvanced
    | RedriveSkipped
    | RedrivePaused
    | RedriveResumed
    | RedriveCancelled
    | RedriveCompleted
    | RedriveUndoStarted
    | RedriveUndoAdvanced
    | RedriveUndone
)


MAX_ENDED_JOBS = 100
"""Jobs that have ended and are still listed; older ones are only in the log."""


class JobStatus(StrEnum):
    """Status of a job."""

    RUNNING = "running"
    PAUSED = "paused"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    UNDOING = "undoing"
    UNDONE = "undone"


ACTIVE = frozenset({JobStatus.RUNNING, JobStatus.UNDOING})
ENDED = frozenset({JobStatus.COMPLETED, JobStatus.CANCELLED, JobStatus.UNDONE})


class RedriveJob(msgspec.Struct, frozen=True):
    """State of a job.

    Arguments:
        job: its id, 16 bytes.
        cursor: as of `RedriveAdvanced`.
        moved, skipped, restored, retained: sums of its events' counts.
        undo_cursor: version of the last of its events that is undone.
        started_at, changed_at: log time, µs.
    """

    job: bytes
    version: int
    status: JobStatus
    spec: RedriveSpec
    cutoff: int
    matched: int
    principal: str | None
    started_at: int
    changed_at: int
    cursor: int = 0
    moved: int = 0
    skipped: int = 0
    undo_cursor: int = 0
    restored: int = 0
    retained: int = 0

    @property
    def remaining(self) -> int | None:
        """Return how many messages it may still change or skip; None for no limit."""
        return None if self.spec.limit is None else max(0, self.spec.limit - self.moved - self.skipped)

    @property
    def left(self) -> int:
        """Return how many of the messages that it selected have no outcome yet."""
        return max(0, self.matched - self.moved - self.skipped)


_STATUS_AFTER: dict[type, JobStatus] = {
    RedrivePaused: JobStatus.PAUSED,
    RedriveResumed: JobStatus.RUNNING,
    RedriveCancelled: JobStatus.CANCELLED,
    RedriveCompleted: JobStatus.COMPLETED,
    RedriveUndoStarted: JobStatus.UNDOING,
    RedriveUndone: JobStatus.UNDONE,
}


def evolve(jobs: dict[bytes, RedriveJob], event: RedriveEvent) -> None:
    """Apply an event to the jobs of a mailbox, in place."""
    if isinstance(event, RedriveStarted):
        _drop_oldest(jobs)
        jobs[event.stream] = RedriveJob(
            event.stream,
            event.version,
            JobStatus.RUNNING,
            event.spec,
            event.cutoff,
            event.matched,
            event.principal,
            event.at,
            event.at,
        )
        return
    job = jobs[event.stream]
    changes: dict[str, object] = {"version": event.version, "changed_at": event.at}
    if isinstance(event, RedriveAdvanced):
        changes |= {
            "cursor": event.cursor,
            "moved": job.moved + event.moved,
            "skipped": job.skipped + event.skipped,
        }
    elif isinstance(event, RedriveUndoAdvanced):
        changes |= {
            "undo_cursor": event.cursor,
            "restored": job.restored + event.restored,
            "retained": job.retained + event.retained,
        }
    elif not isinstance(event, RedriveSkipped):
        changes["status"] = _STATUS_AFTER[type(event)]
    jobs[event.stream] = msgspec.structs.replace(job, **changes)


def _drop_oldest(jobs: dict[bytes, RedriveJob]) -> None:
    """Drop the jobs that ended longest ago, so that there is room for one more."""
    ended = sorted((job.changed_at, id_) for id_, job in jobs.items() if job.status in ENDED)
    for _, id_ in ended[: max(0, len(ended) + 1 - MAX_ENDED_JOBS)]:
        del jobs[id_]


class StartRedrive(msgspec.Struct, frozen=True, gc=False):
    """Command to start a job; one that exists with the same specification is left as it is.

    Arguments:
        job: its id, 16 bytes.
        cutoff, matched, principal: as of `RedriveStarted`.
    """

    job: bytes
    spec: RedriveSpec
    cutoff: int
    matched: int
    principal: str | None = None


class AdvanceRedrive(msgspec.Struct, frozen=True, gc=False):
    """Command to change the next messages of a job; those that are no longer selected are skipped.

    Arguments:
        messages: streams of messages that match, in the order of their places; see `RedriveSpec.place_of`.
        copies: for a job that sends copies, the copy of each message; or the reason why it is skipped.
        cursor: as of `RedriveAdvanced`, if all of them can be changed.
        is_last: whether none is left after them.
    """

    job: bytes
    messages: tuple[bytes, ...]
    cursor: int
    is_last: bool
    copies: tuple["Copy | SkipReason", ...] = ()


class Copy(msgspec.Struct, frozen=True, gc=False):
    """A message to be sent in the place of a dead letter; the fields of `MessageSent`.

    Arguments:
        message: its stream id, 16 bytes.
        ttl_ms: age at which it is dead-lettered if undelivered; None uses the topic's retention.
    """

    message: bytes
    topic: str
    size: int
    payload_hash: bytes
    hash_chain: bytes
    headers: Headers
    envelope: bytes
    priority: int
    ttl_ms: int | None


class ChangeRedrive(msgspec.Struct, frozen=True, gc=False):
    """Command to pause, resume, cancel or undo a job."""

    job: bytes
    action: JobAction
    principal: str | None = None


class UndoRedrive(msgspec.Struct, frozen=True, gc=False):
    """Command to make messages of a job dead letters again, if nothing happened to them since.

    Arguments:
        messages: streams of the messages that the job redrove, or of the copies that it sent, each with the
            position of its event.
        originals: the original of each copy; empty if the job sent no copies.
        cursor: version of the job's event in whose commit they were redriven or sent.
        is_last: whether none is left after them.
    """

    job: bytes
    messages: tuple[tuple[bytes, int], ...]
    cursor: int
    is_last: bool
    originals: tuple["Original", ...] = ()


class Original(msgspec.Struct, frozen=True, gc=False):
    """A dead letter whose copy a job sent.

    Arguments:
        stream: its id, 16 bytes.
        position: of its event in the commit that sent the copy.
        reason: why it was dead-lettered before.
    """

    stream: bytes
    position: int
    reason: DeadReason


RedriveCommand = StartRedrive | AdvanceRedrive | ChangeRedrive | UndoRedrive
