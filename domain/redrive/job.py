"""State of redrive jobs, and its evolution by their events."""

from enum import StrEnum

import msgspec

from postroom.domain.redrive.events import (
    RedriveAdvanced,
    RedriveCancelled,
    RedriveCompleted,
    RedriveEvent,
    RedrivePaused,
    RedriveResumed,
    RedriveSkipped,
    RedriveStarted,
    RedriveUndoAdvanced,
    RedriveUndone,
    RedriveUndoStarted,
)
from postroom.domain.redrive.spec import RedriveSpec

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
        cursor: position up to which dead-letterings are done with.
        moved, skipped, restored, retained: sums of those of its events.
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
