"""Redrive jobs as their callers see them."""

import msgspec

from postroom.application.messages import rfc3339
from postroom.application.query_results import DeadLetter
from postroom.domain.names import message_id
from postroom.domain.redrive.job import RedriveJob
from postroom.domain.redrive.spec import RedriveSpec


class RedriveGroup(msgspec.Struct, frozen=True):
    """Dead letters of a topic with the same fingerprint; `last_error` is that of one of them."""

    topic: str
    reason: str
    fingerprint: str
    count: int
    last_error: str | None


class RedrivePreview(msgspec.Struct, frozen=True):
    """What a redrive job would select now.

    Arguments:
        cutoff: end of the log when this was found out.
        matched: number of dead letters.
        groups: the largest groups of them, up to 100.
        samples: the first of them, up to 10.
    """

    mailbox: str
    cutoff: int
    matched: int
    groups: list[RedriveGroup]
    samples: list[DeadLetter]


class RedriveReport(msgspec.Struct, frozen=True):
    """A redrive job with its progress.

    Arguments:
        status: running, paused, completed, cancelled, undoing or undone.
        cutoff: position of the log up to which messages must have been dead-lettered to be selected.
        matched: number of dead letters that matched when it was started.
        moved: number of messages that it redrove, archived or purged.
        skipped: number of messages that matched, but were no longer dead letters when it was their turn.
        restored: number of messages that are dead letters again, as the job was undone.
        retained: number of messages that were received, or removed, before the job was undone.
        principal: who started it; None for a caller without a capability.
        started_at, changed_at: log time.
    """

    mailbox: str
    job_id: str
    status: str
    spec: RedriveSpec
    cutoff: int
    matched: int
    moved: int
    skipped: int
    restored: int
    retained: int
    principal: str | None
    started_at: str
    changed_at: str

    @property
    def is_active(self) -> bool:
        """Return whether the job is at work."""
        return self.status in ("running", "undoing")


def report_of(mailbox: str, job: RedriveJob) -> RedriveReport:
    """Return a job of a mailbox as callers see it."""
    return RedriveReport(
        mailbox,
        message_id(job.job),
        str(job.status),
        job.spec,
        job.cutoff,
        job.matched,
        job.moved,
        job.skipped,
        job.restored,
        job.retained,
        job.principal,
        rfc3339(job.started_at) or "",
        rfc3339(job.changed_at) or "",
    )
