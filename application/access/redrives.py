"""`AuthorizedRedrives`: redrive jobs as the bearer of one capability may use them."""

from functools import partial

import msgspec

from postroom.application.access.audit import Auditor, audit_refusals
from postroom.application.access.guard import Guard
from postroom.application.operations.mailbox import Mailbox, check_spec
from postroom.application.query_results import Outcome, RedriveMessages, RedrivePreview, RedriveReport
from postroom.domain.arguments import check_text
from postroom.domain.capability.access import uncovered_topic
from postroom.domain.capability.rights import Right
from postroom.domain.errors import NotFound
from postroom.domain.names import job_of_topics
from postroom.domain.redrive.spec import JobAction, RedriveSpec

_NO_CRITERIA = ("action", "topics", "rate", "delay_ms", "limit")


class AuthorizedRedrives(Mailbox):
    """The redrive jobs of `AuthorizedMailbox`; each call but the lists is audited.

    Jobs that redrive need the right `redrive`, those that archive or purge `admin`. Criteria of headers need
    `read-headers`, and words, which may be in payloads, `read-payload`; those that send copies need `send`,
    too. A capability that is limited to topics must name topics, or globs, and a destination that it covers,
    and sees only jobs on such topics. The id that it gives a job is one of its topics, as that of a message:
    the job itself has another.
    """

    _mailbox: Mailbox
    _guard: Guard
    _auditor: Auditor

    async def preview_redrive(self, spec: RedriveSpec, /) -> RedrivePreview:
        checked = check_spec(spec)
        return await self._auditor.run(
            Right.READ_HEADERS,
            partial(self._preview, checked),
            lambda preview: preview.matched,
            topics=checked.topics,
            criteria=_criteria(checked),
        )

    async def start_redrive(
        self, spec: RedriveSpec, /, *, job_id: str | None = None, principal: str | None = None
    ) -> RedriveReport:
        """Start a job in the name of the capability's principal; see `Mailbox.start_redrive`."""
        checked = check_spec(spec)
        return await self._auditor.run(
            _right_of(checked),
            partial(self._start, checked, job_id),
            lambda report: report.matched,
            topics=checked.topics,
            criteria=_criteria(checked),
        )

    @audit_refusals(Right.REDRIVE)
    async def list_redrives(self) -> list[RedriveReport]:
        await self._guard.check(Right.REDRIVE)
        self._guard.charge()
        return [each for each in await self._mailbox.list_redrives() if self._covers(each.spec)]

    @audit_refusals(Right.REDRIVE)
    async def get_redrive(self, job_id: str, /) -> RedriveReport:
        await self._guard.check(Right.REDRIVE)
        self._guard.charge()
        return await self._find(job_id)

    @audit_refusals(Right.REDRIVE)
    async def list_redrive_messages(
        self, job_id: str, /, *, outcome: Outcome | None = None, cursor: str | None = None, limit: int = 100
    ) -> RedriveMessages:
        await self._guard.check(Right.REDRIVE)
        self._guard.charge()
        await self._find(job_id)
        return await self._mailbox.list_redrive_messages(
            job_id, outcome=outcome, cursor=cursor, limit=self._guard.at_most(limit)
        )

    async def change_redrive(
        self, job_id: str, action: JobAction, /, *, principal: str | None = None
    ) -> RedriveReport:
        return await self._auditor.run(
            Right.REDRIVE,
            partial(self._change, job_id, action),
            lambda report: report.matched,
            target=check_text("The redrive job id", job_id),
        )

    async def _preview(self, spec: RedriveSpec) -> RedrivePreview:
        await self._guard.check(Right.READ_HEADERS, Right.REDRIVE)
        self._check_selection(spec)
        return await self._mailbox.preview_redrive(spec)

    async def _start(self, spec: RedriveSpec, job_id: str | None) -> RedriveReport:
        await self._guard.check(_right_of(spec))
        self._check_selection(spec)
        most = self._guard.access.max_messages
        if most is not None:
            spec = msgspec.structs.replace(spec, limit=min(most, spec.limit or most))
        principal = self._guard.access.principal
        if job_id is not None and not self._guard.covers_all_topics:
            job_id = job_of_topics(self._guard.mailbox, job_id, spec.topics)
        return await self._mailbox.start_redrive(spec, job_id=job_id, principal=principal)

    async def _change(self, job_id: str, action: JobAction) -> RedriveReport:
        await self._guard.check(Right.REDRIVE)
        self._guard.charge()
        spec = (await self._find(job_id)).spec
        self._guard.check_operation(_right_of(spec))
        self._check_copies(spec)
        return await self._mailbox.change_redrive(job_id, action, principal=self._guard.access.principal)

    async def _find(self, job_id: str) -> RedriveReport:
        """Return a job; an unknown one and one of other topics have the same answer."""
        try:
            report = await self._mailbox.get_redrive(job_id)
        except NotFound:
            if self._guard.covers_all_topics:
                raise
            raise uncovered_topic() from None
        if not self._covers(report.spec):
            raise uncovered_topic()
        return report

    def _check_selection(self, spec: RedriveSpec) -> None:
        if spec.needs_log:
            self._guard.check_operation(Right.READ_HEADERS)
        if spec.match is not None:
            self._guard.check_operation(Right.READ_PAYLOAD)
        if not spec.topics:
            self._guard.check_all_topics()
        # The text of a glob is covered only if everything that it matches is.
        self._guard.check_topics(spec.topics)
        self._check_copies(spec)
        self._guard.charge()

    def _check_copies(self, spec: RedriveSpec) -> None:
        """Check that the capability covers sends to the topic of the copies; its own has been checked."""
        if spec.sends_copies:
            self._guard.check_operation(Right.SEND)
        if spec.destination is not None:
            self._guard.check_topics((spec.destination,))

    def _covers(self, spec: RedriveSpec) -> bool:
        """Return whether the capability covers all topics from which a job selects."""
        if self._guard.covers_all_topics:
            return True
        return bool(spec.topics) and all(map(self._guard.covers, spec.topics))


def _right_of(spec: RedriveSpec) -> Right:
    """Return the right that a job needs."""
    return Right.REDRIVE if spec.action == "redrive" else Right.ADMIN


def _criteria(spec: RedriveSpec) -> list[str]:
    """Return the names of the criteria of a selection, for the audit log."""
    fields = msgspec.structs.asdict(spec)
    criteria = {name: value for name, value in fields.items() if name not in _NO_CRITERIA}
    return [name for name, value in criteria.items() if value not in (None, (), {})]
