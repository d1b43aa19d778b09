"""Redrive jobs on a namespace: a job of the same id in each of its mailboxes, merged (ADR 0063)."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import uuid_utils

from postroom.application.cluster.namespace_queries import NamespaceQueries
from postroom.application.mailbox.outgoing import name_job
from postroom.application.operations.mailbox import Mailbox
from postroom.application.operations.operation import Arguments, Operation
from postroom.application.page import Page, invalid_cursor
from postroom.application.query_results import RedriveGroup, RedrivePreview
from postroom.application.reports import RedriveMessage, RedriveReport
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.domain.namespace import RESERVED_TOPIC
from postroom.domain.redrive.spec import RedriveSpec

_STATUSES = ("undoing", "running", "paused", "cancelled", "completed", "undone")
"""Statuses by precedence: the first that the job has in any mailbox is its status in the namespace."""
_SUMS = ("matched", "moved", "skipped", "restored", "retained")
MAX_SAMPLES = 10
MAX_GROUPS = 100


class NamespaceRedrives(NamespaceQueries):
    """The redrive jobs of `Mailbox` over the mailboxes of a namespace."""

    async def _preview_redrive(self, operation: Operation, arguments: Arguments) -> RedrivePreview:
        """Return the dead letters that the jobs would select."""
        await self._check(arguments["spec"])
        previews = await self._ask_all(lambda mailbox: operation.ask(mailbox, arguments))
        return merge_previews(self._directory.namespace, previews)

    async def _start_redrive(self, operation: Operation, arguments: Arguments) -> RedriveReport:
        """Start a job in each mailbox; several mailboxes have cut-offs of their own, not the preview's.

        Raises: InvalidRequest for a limit, if there are several mailboxes, and for the reserved topic.
        """
        await self._check(arguments["spec"])
        named = name_job(arguments, uuid_utils.uuid7)
        if len((await self._get_members()).names) > 1:
            named = {**named, "cutoff": None, "previewed": None}
        reports = await self._ask_all(lambda mailbox: operation.ask(mailbox, named))
        return merge_reports(self._directory.namespace, reports)

    async def list_redrives(self) -> list[RedriveReport]:
        """Return the jobs of all mailboxes; see `Mailbox.list_redrives`."""
        jobs: dict[str, list[RedriveReport]] = {}
        for reports in await self._ask_all(lambda mailbox: mailbox.list_redrives()):
            for report in reports:
                jobs.setdefault(report.job_id, []).append(report)
        merged = [merge_reports(self._directory.namespace, each) for each in jobs.values()]
        return sorted(merged, key=lambda report: report.started_at, reverse=True)

    async def _get_redrive(self, operation: Operation, arguments: Arguments) -> RedriveReport:
        """Return a job."""
        return await self._merge_reports_of(lambda mailbox: operation.ask(mailbox, arguments))

    async def _list_redrive_messages(
        self, operation: Operation, arguments: Arguments
    ) -> Page[RedriveMessage]:
        """Return a page of the messages of a job.

        The messages of one mailbox come after the messages of another; the cursor begins with the mailbox's
        name.
        """
        job_id, cursor, limit = arguments["job_id"], arguments["cursor"], arguments["limit"]
        await self._merge_reports_of(lambda mailbox: mailbox.get_redrive(job_id))
        names = sorted((await self._get_members()).names)
        name, rest = names[0], None
        if cursor is not None:
            name, _, text = cursor.rpartition(" ")
            rest = text or None
            if name not in names:
                raise invalid_cursor(cursor)
        page: list[RedriveMessage] = []
        for each in names:
            if each < name:
                continue
            try:
                own = {"cursor": rest if each == name else None, "limit": limit - len(page)}
                part: Page[RedriveMessage] = await operation.ask(
                    self._directory.mailbox(each), {**arguments, **own}
                )
            except NotFound:
                continue
            page += part.items
            if part.next_cursor is not None:
                return Page(tuple(page), f"{each} {part.next_cursor}")
            if len(page) == limit and each != names[-1]:
                return Page(tuple(page), f"{names[names.index(each) + 1]} ")
        return Page(tuple(page))

    async def _change_redrive(self, operation: Operation, arguments: Arguments) -> RedriveReport:
        """Pause, resume, cancel or undo a job in all mailboxes.

        Mailboxes in which it has ended are left as they are, unless it has ended in all.
        """
        refusals: list[InvalidRequest] = []

        async def change(mailbox: Mailbox) -> Any:
            try:
                return await operation.ask(mailbox, arguments)
            except InvalidRequest as refusal:
                refusals.append(refusal)
                return await mailbox.get_redrive(arguments["job_id"])

        members = await self._get_members()
        report = await self._merge_reports_of(change)
        if len(refusals) == len(members.names):
            raise refusals[0]
        return report

    async def _merge_reports_of(self, call: Callable[[Mailbox], Awaitable[RedriveReport]]) -> RedriveReport:
        """Return the merged reports; raises NotFound when no mailbox has the job."""
        reports = await self._at_each_that_has_it(call, self._ask_all)
        return merge_reports(self._directory.namespace, reports)

    async def _check(self, spec: RedriveSpec) -> None:
        if spec.destination == RESERVED_TOPIC:
            raise InvalidRequest(f"The topic {RESERVED_TOPIC} is reserved; send copies to another one.")
        if spec.limit is not None and len((await self._get_members()).names) > 1:
            raise InvalidRequest(
                "A limit applies to one mailbox, and the namespace has several; leave it out, or start a job "
                "in each of them."
            )


def merge_reports(namespace: str, reports: Sequence[RedriveReport]) -> RedriveReport:
    """Return the report of a job of a namespace; the cut-off is the greatest of its mailboxes."""
    if len(reports) == 1:
        return msgspec.structs.replace(reports[0], mailbox=namespace)
    return msgspec.structs.replace(
        reports[0],
        mailbox=namespace,
        status=min((each.status for each in reports), key=_STATUSES.index),
        cutoff=max(each.cutoff for each in reports),
        started_at=min(each.started_at for each in reports),
        changed_at=max(each.changed_at for each in reports),
        **{name: sum(getattr(each, name) for each in reports) for name in _SUMS},
    )


def merge_previews(namespace: str, previews: Sequence[RedrivePreview]) -> RedrivePreview:
    """Return the preview of a namespace."""
    groups: dict[tuple[str, str, str], RedriveGroup] = {}
    for group in (each for preview in previews for each in preview.groups):
        key = (group.topic, group.reason, group.fingerprint)
        before = groups[key].count if key in groups else 0
        groups[key] = msgspec.structs.replace(group, count=group.count + before)
    return RedrivePreview(
        namespace,
        max(each.cutoff for each in previews),
        sum(each.matched for each in previews),
        sorted(groups.values(), key=lambda group: -group.count)[:MAX_GROUPS],
        [sample for each in previews for sample in each.samples][:MAX_SAMPLES],
        " ".join(sorted(f"{each.mailbox}:{each.digest}" for each in previews if each.digest)),
    )
