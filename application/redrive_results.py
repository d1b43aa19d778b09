"""Redrive jobs as their callers see them."""

from typing import Literal

import msgspec

from postroom.application.messages import rfc3339
from postroom.application.query_results import DeadLetter
from postroom.domain.arguments import check_choice, check_int, check_optional_text
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


Outcome = Literal["redriven", "archived", "purged", "skipped", "undone"]
OUTCOMES: tuple[Outcome, ...] = ("redriven", "archived", "purged", "skipped", "undone")


class RedriveMessage(msgspec.Struct, frozen=True):
    """What a redrive job did with a message that it selected.

    Arguments:
        topic: None where the log does not have the message any more.
        outcome: `undone` if it is a dead letter again, as the job was undone.
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


MAX_PAGE = 1_000


def check_page(outcome: object, cursor: object, limit: object) -> None:
    """Raise InvalidRequest unless these are arguments of `list_redrive_messages`."""
    if outcome is not None:
        check_choice("The outcome", outcome, OUTCOMES)
    check_optional_text("cursor", cursor)
    check_int("limit", limit, 1, MAX_PAGE)
