"""The commands and queries of a mailbox that several processes share."""

from collections.abc import Callable

from postroom.adapters.local.owner_thread import OwnerThread
from postroom.adapters.local.shared import SharedOwner
from postroom.application.mailbox.handlers import CommandHandlers
from postroom.application.mailbox.message_factory import NewId
from postroom.application.mailbox.redrive_client import check_job_id, check_spec
from postroom.application.metrics import Metric
from postroom.application.query_results import (
    Backlog,
    DeadLetter,
    Explanation,
    MessageDetail,
    Moment,
    PeekedMessage,
)
from postroom.application.redrive_results import Outcome, RedriveMessages, RedrivePreview, RedriveReport
from postroom.application.service import Search
from postroom.domain.errors import Unavailable, WrongMode
from postroom.domain.mailbox.counts import TopicSummary
from postroom.domain.mailbox.settings_effects import SettingsPreview
from postroom.domain.policy import TopicPolicy
from postroom.domain.redrive.spec import JobAction, RedriveSpec
from postroom.domain.search import EventFilter, SearchPage, filter_of_mailbox
from postroom.domain.settings import MailboxSettings, SettingsChanges, check_changes


class SharedMailbox(CommandHandlers):
    """A mailbox whose owner is this process or another; see `Mailbox`."""

    def __init__(
        self, owner: SharedOwner | OwnerThread, wall: Callable[[], int], new_id: NewId, search: Search | None
    ) -> None:
        """Take the owner, clock, generator of ids, and search of the read models, if there are any."""
        super().__init__(owner, wall, new_id)
        self._owner = owner
        self._new_id = new_id
        self._search = search or self.search_unsettled

    async def delete_old_events(self, older_than: int) -> int:
        """Remove settled records; see `Mailbox.delete_old_events`."""
        count: int = await self._owner.query("delete_old_events", older_than)
        return count

    async def erase_messages(self, pseudonym: str) -> int:
        """Remove ready messages and dead letters of a subject whose key was destroyed, and count them."""
        count: int = await self._owner.query("erase_messages", pseudonym)
        return count

    async def preview_redrive(self, spec: RedriveSpec, /) -> RedrivePreview:
        """Return the dead letters that a job would select; see `Mailbox.preview_redrive`."""
        preview: RedrivePreview = await self._owner.query("preview_redrive", check_spec(spec))
        return preview

    async def start_redrive(
        self, spec: RedriveSpec, /, *, job_id: str | None = None, principal: str | None = None
    ) -> RedriveReport:
        """Start a job; see `Mailbox.start_redrive`. It has an id, so that the call may be repeated."""
        id_ = check_job_id(job_id, self._new_id)
        report: RedriveReport = await self._owner.query(
            "start_redrive", check_spec(spec), job_id=id_, principal=principal
        )
        return report

    async def list_redrives(self) -> list[RedriveReport]:
        """Return the jobs; see `Mailbox.list_redrives`."""
        reports: list[RedriveReport] = await self._owner.query("list_redrives")
        return reports

    async def get_redrive(self, job_id: str, /) -> RedriveReport:
        """Return a job; see `Mailbox.get_redrive`."""
        report: RedriveReport = await self._owner.query("get_redrive", job_id)
        return report

    async def list_redrive_messages(
        self, job_id: str, /, *, outcome: Outcome | None = None, cursor: str | None = None, limit: int = 100
    ) -> RedriveMessages:
        """Return a page of the messages of a job; see `Mailbox.list_redrive_messages`."""
        page: RedriveMessages = await self._owner.query(
            "list_redrive_messages", job_id, outcome=outcome, cursor=cursor, limit=limit
        )
        return page

    async def change_redrive(
        self, job_id: str, action: JobAction, /, *, principal: str | None = None
    ) -> RedriveReport:
        """Pause, resume, cancel or undo a job; see `Mailbox.change_redrive`."""
        report: RedriveReport = await self._owner.query("change_redrive", job_id, action, principal=principal)
        return report

    async def get_message(self, id_: str) -> MessageDetail:
        """Return a message with its history; see `Mailbox.get_message`."""
        detail: MessageDetail = await self._owner.query("get_message", id_)
        return detail

    async def explain_message(self, id_: str) -> Explanation:
        """Return the explanation of a message; see `Mailbox.explain_message`."""
        explanation: Explanation = await self._owner.query("explain_message", id_)
        return explanation

    async def get_backlog(self, topic: str | None = None, *, at: Moment | None = None) -> Backlog:
        """Count unsettled messages; see `Mailbox.get_backlog`."""
        backlog: Backlog = await self._owner.query("get_backlog", topic, at=at)
        return backlog

    async def list_dead_letters(
        self,
        topic: str | None = None,
        *,
        reason: str | None = None,
        limit: int = 100,
        cursor: int = 0,
        at: Moment | None = None,
    ) -> list[DeadLetter]:
        """Return a page of dead letters; see `Mailbox.list_dead_letters`."""
        letters: list[DeadLetter] = await self._owner.query(
            "list_dead_letters", topic, reason=reason, limit=limit, cursor=cursor, at=at
        )
        return letters

    async def get_settings(self) -> MailboxSettings:
        """Return the settings; see `Mailbox.get_settings`."""
        settings: MailboxSettings = await self._owner.query("get_settings")
        return settings

    async def preview_settings(self, changes: SettingsChanges, *, replace: bool = False) -> SettingsPreview:
        """Return what a change of settings would do; see `Mailbox.preview_settings`."""
        checked = check_changes(changes)
        preview: SettingsPreview = await self._owner.query("preview_settings", checked, replace=replace)
        return preview

    async def get_topic_policy(self, topic: str) -> TopicPolicy:
        """Return the policy of a topic; see `Mailbox.get_topic_policy`."""
        policy: TopicPolicy = await self._owner.query("get_topic_policy", topic)
        return policy

    async def list_topics(self) -> list[TopicSummary]:
        """Return the topics; see `Mailbox.list_topics`."""
        topics: list[TopicSummary] = await self._owner.query("list_topics")
        return topics

    async def peek_messages(self, topic: str, *, limit: int = 10) -> list[PeekedMessage]:
        """Return ready messages without receiving them; see `Mailbox.peek_messages`."""
        messages: list[PeekedMessage] = await self._owner.query("peek_messages", topic, limit=limit)
        return messages

    async def search_messages(self, filter_: EventFilter, /) -> SearchPage:
        """Return a page of the messages that match; see `Mailbox.search_messages`."""
        return await self._search(filter_of_mailbox(filter_, self.name))

    async def search_unsettled(self, filter_: EventFilter, /) -> SearchPage:
        """Return a page of the unsettled messages that match; they need no read models."""
        page: SearchPage = await self._owner.query("search_unsettled", filter_)
        return page

    async def measure(self) -> list[Metric]:
        """Return the metrics of the mailbox, as its owner measures them."""
        metrics: list[Metric] = await self._owner.query("measure")
        return metrics

    async def measure_owned(self) -> list[Metric]:
        """Return the metrics of the mailbox if this process owns it and can use it; else none."""
        if not self._owner.is_here:
            return []
        try:
            return await self.measure()
        except Unavailable:
            return []

    async def check_mode(self, mode: str) -> None:
        """Raise WrongMode unless the mailbox has this mode."""
        actual: str = await self._owner.query("get_mode")
        if actual != mode:
            raise WrongMode(self.name, actual, mode)
