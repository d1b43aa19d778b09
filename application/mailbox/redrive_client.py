"""Redrive jobs of a mailbox that another process serves."""

from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import TypeVar

from postroom.application.mailbox.message_factory import NewId
from postroom.application.ports.mailbox_transport import MailboxTransport
from postroom.application.redrive_results import (
    Outcome,
    RedriveMessages,
    RedrivePreview,
    RedriveReport,
    check_page,
)
from postroom.domain.arguments import check_optional_text, check_type
from postroom.domain.names import check_uuid, message_id
from postroom.domain.redrive.spec import JobAction, RedriveSpec, check_action

T = TypeVar("T")


class RedriveClient:
    """The calls of `Redrives`, over a transport."""

    _transport: MailboxTransport
    _new_id: NewId

    @abstractmethod
    async def _repeat(
        self, call: Callable[[], Awaitable[T]], wait_ms: int = 0, *, is_idempotent: bool = True
    ) -> T:
        """Return the answer of a call, which is repeated while its time lasts."""

    async def preview_redrive(self, spec: RedriveSpec, /) -> RedrivePreview:
        """Return the dead letters that a job would select; see `Mailbox.preview_redrive`."""
        checked = check_spec(spec)
        return await self._repeat(lambda: self._transport.preview_redrive(checked))

    async def start_redrive(
        self, spec: RedriveSpec, /, *, job_id: str | None = None, principal: str | None = None
    ) -> RedriveReport:
        """Start a job; see `Mailbox.start_redrive`. The server enters the principal."""
        checked, id_ = check_spec(spec), check_job_id(job_id, self._new_id)
        check_optional_text("principal", principal)
        return await self._repeat(lambda: self._transport.start_redrive(checked, id_))

    async def list_redrives(self) -> list[RedriveReport]:
        """Return the jobs; see `Mailbox.list_redrives`."""
        return await self._repeat(self._transport.list_redrives)

    async def get_redrive(self, job_id: str, /) -> RedriveReport:
        """Return a job; see `Mailbox.get_redrive`."""
        id_ = check_uuid("The redrive job id", job_id)
        return await self._repeat(lambda: self._transport.get_redrive(id_))

    async def list_redrive_messages(
        self, job_id: str, /, *, outcome: Outcome | None = None, cursor: str | None = None, limit: int = 100
    ) -> RedriveMessages:
        """Return a page of the messages of a job; see `Mailbox.list_redrive_messages`."""
        id_ = check_uuid("The redrive job id", job_id)
        check_page(outcome, cursor, limit)
        return await self._repeat(lambda: self._transport.list_redrive_messages(id_, outcome, cursor, limit))

    async def change_redrive(
        self, job_id: str, action: JobAction, /, *, principal: str | None = None
    ) -> RedriveReport:
        """Pause, resume, cancel or undo a job; see `Mailbox.change_redrive`."""
        id_, checked = check_uuid("The redrive job id", job_id), check_action(action)
        check_optional_text("principal", principal)
        return await self._repeat(lambda: self._transport.change_redrive(id_, checked))


def check_spec(spec: object) -> RedriveSpec:
    """Return a specification whose fields are valid, or raise InvalidRequest."""
    return check_type("The redrive specification", spec, RedriveSpec).validate()


def check_job_id(job_id: object, new_id: NewId) -> str:
    """Return the id of a job, or a new one for None; raises InvalidRequest unless it is a UUID."""
    return message_id(new_id().bytes) if job_id is None else check_uuid("The redrive job id", job_id)
