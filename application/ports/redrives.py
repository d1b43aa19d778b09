"""Port: the redrive jobs of a mailbox; part of `Mailbox`."""

from typing import Protocol

from postroom.application.redrive_results import Outcome, RedriveMessages, RedrivePreview, RedriveReport
from postroom.domain.redrive.spec import JobAction, RedriveSpec


class Redrives(Protocol):
    """The redrive jobs of a mailbox: durable jobs that redrive, archive or purge the dead letters of a query.

    The owner of the mailbox works on them, also after their caller has ended.
    """

    async def preview_redrive(self, spec: RedriveSpec, /) -> RedrivePreview:
        """Return counts and samples of the dead letters that a job would select now."""

    async def start_redrive(
        self, spec: RedriveSpec, /, *, job_id: str | None = None, principal: str | None = None
    ) -> RedriveReport:
        """Start a job on what is dead-lettered now; later failures never join.

        Arguments:
            job_id: a UUID, preferably a UUIDv7: starting it again with the same specification changes
                nothing. None generates one.
            principal: who starts it, for the record; a server enters that of the caller's capability.

        Raises: IdempotencyConflict when a job with this id has another specification, Saturated when too
            many jobs have not ended.
        """

    async def list_redrives(self) -> list[RedriveReport]:
        """Return the jobs that have not ended and the last 100 that have, newest first."""

    async def get_redrive(self, job_id: str, /) -> RedriveReport:
        """Return a job with its progress; raises NotFound for an unknown one."""

    async def list_redrive_messages(
        self, job_id: str, /, *, outcome: Outcome | None = None, cursor: str | None = None, limit: int = 100
    ) -> RedriveMessages:
        """Return a page of the messages of a job, in its order, with what it did with each.

        Arguments:
            outcome: only those that were `redriven`, `archived`, `purged`, `skipped` or `undone`.
            cursor: `next_cursor` of the previous page.
            limit: maximum number of messages, 1 to 1,000.

        Raises: NotFound for an unknown job.
        """

    async def change_redrive(
        self, job_id: str, action: JobAction, /, *, principal: str | None = None
    ) -> RedriveReport:
        """Pause, resume, cancel or undo a job, and return it; idempotent.

        What a job did before it was cancelled stays done. `undo` stops it, and makes the messages that it
        redrove dead letters again, but for those that were received or removed since.

        Arguments:
            action: `pause`, `resume`, `cancel` or `undo`.
            principal: as of `start_redrive`.

        Raises: NotFound for an unknown job; InvalidRequest for a job that has ended, and for the undoing of
            one that archives or purges.
        """
