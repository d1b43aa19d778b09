"""Results of the calls for redrive jobs."""

from typing import Literal

import msgspec

from postroom.application.messages import rfc3339
from postroom.application.query_results import DeadLetter
from postroom.domain.arguments import MAX_PAGE, check_choice, check_int, check_optional_text
from postroom.domain.names import message_id
from postroom.domain.redrive.job import RedriveJob
from postroom.domain.redrive.spec import RedriveSpec


class RedriveGroup(msgspec.Struct, frozen=True):
    """Dead letters of a topic with the same fingerprint, and the last error of one of them."""

    topic: str
    reason: str
    fingerprint: str
    count: int
    last_error: str | None


class RedrivePreview(msgspec.Struct, frozen=True):
    """The dead letters that a redrive job would select now.

    Arguments:
        cutoff: end of the log at the time of the preview.
        matched: number of dead letters.
        groups: the largest groups, up to 100.
        samples: the first dead letters, up to 10.
    """

    mailbox: str
    cutoff: int
    matched: int
    groups: list[RedriveGroup]
    samples: list[DeadLetter]


Outcome = Literal["redriven", "archived", "purged", "skipped", "undone"]
OUTCOMES: tuple[Outcome, ...] = ("redriven", "archived", "purged", "skipped", "undone")


class RedriveMessage(msgspec.Struct, frozen=True):
    """The outcome of a message that a redrive job selected.

    Arguments:
        topic: None if retention removed the message from the log.
        outcome: `undone` if the job was undone and the message is a dead letter again.
        reason: why it was skipped; see `SkipReason`.
        copy_id: id of the copy that was sent in its place, if the job sends copies.
        at: log time.
    """

    message_id: str
    topic: str | None
    outcome: Outcome
    reason: str | None
    copy_id: str | None
    at: str


class RedriveMessages(msgspec.Struct, frozen=True):
    """Page of the messages of a redrive job, in its order; `next_cursor` is None on the last page."""

    messages: list[RedriveMessage]
    next_cursor: str | None = None


class RedriveReport(msgspec.Struct, frozen=True):
    """A redrive job with its progress.

    Arguments:
        status: running, paused, completed, cancelled, undoing or undone.
        cutoff: position of the log up to which messages must have been dead-lettered to be selected.
        matched: number of dead letters that matched when it was started.
        moved: number of messages that it redrove, archived or purged.
        skipped: number of messages that matched, but had changed when the job reached them.
        restored: number of messages that are dead letters again after undo.
        retained: number of messages that undo left alone, as they had been received or removed.
        principal: who started the job; None for a caller without a capability.
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
        """Return whether the job is running or being undone."""
        return self.status in ("running", "undoing")


def report_of(mailbox: str, job: RedriveJob) -> RedriveReport:
    """Return the report of a job."""
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


def check_page(outcome: object, cursor: object, limit: object) -> None:
    """Raise InvalidRequest unless these are arguments of `list_redrive_messages`."""
    if outcome is not None:
        check_choice("The outcome", outcome, OUTCOMES)
    check_optional_text("cursor", cursor)
    check_int("limit", limit, 1, MAX_PAGE)
