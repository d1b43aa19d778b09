"""Handlers of redrive jobs: preview, start, list, show and change them."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from postroom.application.erasure.search import spec_as_stored
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.mailbox.message_factory import NewId
from postroom.application.query_results import DeadLetter
from postroom.application.redrive.messages import list_messages
from postroom.application.redrive.runner import RedriveRunner
from postroom.application.redrive.selection import CHUNK, find_candidates, select
from postroom.application.redrive_results import (
    Outcome,
    RedriveGroup,
    RedriveMessages,
    RedrivePreview,
    RedriveReport,
    check_page,
    report_of,
)
from postroom.domain.arguments import check_optional_text, check_type
from postroom.domain.errors import Rejected
from postroom.domain.fingerprint import fingerprint
from postroom.domain.mailbox.commands import Sweep
from postroom.domain.mailbox.redrive_decisions import find_job
from postroom.domain.message import Message
from postroom.domain.names import check_uuid, message_stream
from postroom.domain.redrive.commands import ChangeRedrive, RedriveCommand, StartRedrive
from postroom.domain.redrive.spec import JobAction, RedriveSpec, check_action

MAX_SAMPLES = 10
MAX_GROUPS = 100

DescribeDeadLetters = Callable[[str, Sequence[Message]], list[DeadLetter]]
"""Returns descriptions of dead letters of a mailbox."""


class RedriveJobs:
    """The redrive jobs of a mailbox, for its owner; see `Mailbox`."""

    def __init__(self, engine: MailboxEngine, describe: DescribeDeadLetters, new_id: NewId) -> None:
        self._engine = engine
        self._describe = describe
        self._new_id = new_id
        self.runner = RedriveRunner(engine)

    async def preview_redrive(self, spec: RedriveSpec, /) -> RedrivePreview:
        """Return the dead letters that a job would select now; see `Mailbox.preview_redrive`."""
        spec = await self._as_stored(check_type("The redrive specification", spec, RedriveSpec).validate())
        await self._engine.check_ownership()
        cutoff, matches = await self._select(spec)
        groups: Counter[tuple[str, str, str]] = Counter()
        errors: dict[tuple[str, str, str], str | None] = {}
        for number, each in enumerate(matches):
            reason = each.reason or ""
            key = (each.topic, reason, fingerprint(reason, each.last_error))
            groups[key] += 1
            errors[key] = each.last_error
            if number % CHUNK == 0:
                await asyncio.sleep(0)  # lets the mailbox run
        return RedrivePreview(
            self._engine.name,
            cutoff,
            len(matches),
            [RedriveGroup(*key, count, errors[key]) for key, count in groups.most_common(MAX_GROUPS)],
            self._describe(self._engine.name, matches[:MAX_SAMPLES]),
        )

    async def start_redrive(
        self, spec: RedriveSpec, /, *, job_id: str | None = None, principal: str | None = None
    ) -> RedriveReport:
        """Start a job, and return it; see `Mailbox.start_redrive`."""
        check_type("The redrive specification", spec, RedriveSpec).validate()
        check_optional_text("principal", principal)
        spec = await self._as_stored(spec)
        job = self._new_id().bytes if job_id is None else self._stream(job_id)
        self._engine.check_process()
        if job not in self._engine.mailbox.redrives:
            cutoff, matches = await self._select(spec)
            await self._submit(StartRedrive(job, spec, cutoff, len(matches), principal))
        else:  # a repeated request: has no effect, or is refused if it differs
            await self._submit(StartRedrive(job, spec, 0, 0, principal))
        return self._report(job)

    async def list_redrives(self) -> list[RedriveReport]:
        """Return the jobs; see `Mailbox.list_redrives`."""
        await self._engine.check_ownership()
        mailbox = self._engine.mailbox
        jobs = sorted(mailbox.redrives.values(), key=lambda job: (job.started_at, job.job), reverse=True)
        return [report_of(mailbox.name, job) for job in jobs]

    async def get_redrive(self, job_id: str, /) -> RedriveReport:
        """Return a job; see `Mailbox.get_redrive`."""
        await self._engine.check_ownership()
        return self._report(self._stream(job_id))

    async def list_redrive_messages(
        self, job_id: str, /, *, outcome: Outcome | None = None, cursor: str | None = None, limit: int = 100
    ) -> RedriveMessages:
        """Return a page of the messages of a job; see `Mailbox.list_redrive_messages`."""
        check_page(outcome, cursor, limit)
        await self._engine.check_ownership()
        job = find_job(self._stream(job_id), self._engine.mailbox)
        await self._engine.submit([Sweep()])  # returns when earlier decisions are durable
        return await asyncio.to_thread(list_messages, self._engine.log, job, outcome, cursor, limit)

    async def change_redrive(
        self, job_id: str, action: JobAction, /, *, principal: str | None = None
    ) -> RedriveReport:
        """Pause, resume, cancel or undo a job; see `Mailbox.change_redrive`."""
        job = self._stream(job_id)
        check_optional_text("principal", principal)
        await self._submit(ChangeRedrive(job, check_action(action), principal))
        return self._report(job)

    async def _as_stored(self, spec: RedriveSpec) -> RedriveSpec:
        """Return a specification whose criteria match encrypted messages, and name no subject."""
        protection = self._engine.protection
        return spec if protection is None else await asyncio.to_thread(spec_as_stored, spec, protection)

    async def _select(self, spec: RedriveSpec) -> tuple[int, list[Message]]:
        """Return the end of the log, and the dead letters that match, up to the limit of a job."""
        mailbox = self._engine.mailbox
        cutoff = mailbox.position
        candidates = await find_candidates(spec, mailbox, cutoff)
        messages: list[Message] = []
        async for chunk in select(spec, candidates, self._engine.log):
            messages += (each.message for each in chunk)
        return cutoff, messages[: spec.limit]

    async def _submit(self, command: RedriveCommand) -> None:
        (answer,) = await self._engine.submit([command])
        self.runner.wake()
        if isinstance(answer, Rejected):
            raise answer

    def _report(self, job: bytes) -> RedriveReport:
        mailbox = self._engine.mailbox
        return report_of(mailbox.name, find_job(job, mailbox))

    def _stream(self, job_id: object) -> bytes:
        return message_stream(self._engine.name, check_uuid("The redrive job id", job_id))
