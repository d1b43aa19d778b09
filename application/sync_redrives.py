"""Redrive jobs for callers without an event loop."""

from abc import abstractmethod
from collections.abc import Coroutine
from typing import Any, TypeVar

from postroom.application.ports.mailbox import Mailbox
from postroom.application.redrive_results import Outcome, RedriveMessages, RedrivePreview, RedriveReport
from postroom.domain.redrive.spec import JobAction, RedriveSpec

T = TypeVar("T")


class SyncRedrives:
    """The calls of `Redrives`, without `await`."""

    @property
    @abstractmethod
    def _open(self) -> Mailbox:
        """Return the mailbox."""

    @abstractmethod
    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        """Return the answer of a call."""

    def preview_redrive(self, spec: RedriveSpec, /) -> RedrivePreview:
        """Return the dead letters that a job would select; see `Mailbox.preview_redrive`."""
        return self._run(self._open.preview_redrive(spec))

    def start_redrive(
        self, spec: RedriveSpec, /, *, job_id: str | None = None, principal: str | None = None
    ) -> RedriveReport:
        """Start a job; see `Mailbox.start_redrive`."""
        return self._run(self._open.start_redrive(spec, job_id=job_id, principal=principal))

    def list_redrives(self) -> list[RedriveReport]:
        """Return the jobs; see `Mailbox.list_redrives`."""
        return self._run(self._open.list_redrives())

    def get_redrive(self, job_id: str, /) -> RedriveReport:
        """Return a job; see `Mailbox.get_redrive`."""
        return self._run(self._open.get_redrive(job_id))

    def list_redrive_messages(
        self, job_id: str, /, *, outcome: Outcome | None = None, cursor: str | None = None, limit: int = 100
    ) -> RedriveMessages:
        """Return a page of the messages of a job; see `Mailbox.list_redrive_messages`."""
        return self._run(
            self._open.list_redrive_messages(job_id, outcome=outcome, cursor=cursor, limit=limit)
        )

    def change_redrive(
        self, job_id: str, action: JobAction, /, *, principal: str | None = None
    ) -> RedriveReport:
        """Pause, resume, cancel or undo a job; see `Mailbox.change_redrive`."""
        return self._run(self._open.change_redrive(job_id, action, principal=principal))
