"""The queries on a mailbox in the process that owns it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property, partial
from typing import ParamSpec, TypeVar

from msgspec.structs import replace

from postroom.application.caller import caller_covers
from postroom.application.erasure.erase_subject import as_stored
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.message_stream import MAX_WAIT_MS
from postroom.application.metrics import Metric
from postroom.application.page import Page
from postroom.application.queries.describe_topic import DescribeTopic, count_receivers
from postroom.application.queries.explain_message import ExplainMessage
from postroom.application.queries.get_message import GetMessage
from postroom.application.queries.mailbox_past import StateAt
from postroom.application.queries.measure_mailbox import GetBacklog, ListTopics, MeasureMailbox
from postroom.application.queries.message_lists import ListDeadLetters, PeekMessages, SearchUnsettled
from postroom.application.queries.preview_settings import PreviewSettings
from postroom.application.query_results import (
    Backlog,
    DeadLetter,
    DlqProfile,
    Explanation,
    MessageDetail,
    MessageOutcome,
    Moment,
    PeekedMessage,
)
from postroom.application.reports import ConsumerReport, TopicReport
from postroom.application.worker_reports import WorkerRegistry, WorkerReport, WorkerState, check_worker
from postroom.domain.arguments import check_int, check_optional_text, check_text, check_type
from postroom.domain.errors import BrokenLog, NotFound
from postroom.domain.mailbox.counts import TopicSummary
from postroom.domain.mailbox.events import MailboxMode
from postroom.domain.mailbox.topic_decisions import SettingsPreview
from postroom.domain.names import check_topic, check_uuid, message_stream
from postroom.domain.policy import TopicPolicy
from postroom.domain.search import EventFilter, FoundMessage, filter_of_mailbox
from postroom.domain.settings import MailboxSettings, SettingsChanges

P = ParamSpec("P")
T = TypeVar("T")


class OwnerQueries:
    """The queries on a mailbox for its owner; see `Mailbox`.

    The present is the engine's state, read on the event loop, which alone changes it. It is read after a
    check of the log, made for each call, that no other process has taken the mailbox over: an owner that was
    paused and replaced answers nothing from its memory (ADR 0104). Queries that read or fold the log run in a
    thread.
    """

    def __init__(
        self,
        engine: MailboxEngine,
        search: Callable[[EventFilter], Awaitable[Page[FoundMessage]]] | None = None,
        lateness: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """Take the engine, and the search of the store's read models; None if it has none.

        Arguments:
            lateness: returns the lateness of schedules by name, in seconds.
        """
        self._engine = engine
        self._search = search or self.search_unsettled
        log = engine.log
        self._dlq_profile: DlqProfile = "ephemeral" if log.durability == "nothing" else "durable"
        state_at = StateAt(log, engine.now, lambda: engine.mailbox)
        self._get_message = GetMessage(log, engine.now, engine.protection)
        self._list_dead_letters = ListDeadLetters(state_at, log)
        self.describe_dead_letters = self._list_dead_letters.describe
        self._state_at = state_at
        self._measure = MeasureMailbox(
            lambda: engine.mailbox, engine.metrics, self._dlq_profile, lateness, lambda: log.durability
        )

    async def get_mode(self) -> MailboxMode:
        """Return the mode of the mailbox: `queue` or `archive`."""
        return self._engine.mailbox.mode

    async def get_settings(self) -> MailboxSettings:
        """Return the settings but for the saved searches; see `Mailbox.get_settings`."""
        return await self._now(lambda: self._engine.mailbox.settings.with_searches({}))

    async def preview_settings(self, changes: SettingsChanges, *, replace: bool = False) -> SettingsPreview:
        """Return the effects of a change of settings; see `Mailbox.preview_settings`."""
        query = PreviewSettings(self._engine.log, self._engine.now, lambda: self._engine.mailbox)
        preview, last = await self._now(query, changes, replace=replace)
        return await asyncio.to_thread(query.count_removed, preview, last)

    async def get_message(self, id_: str) -> MessageDetail:
        """Return a message with its history; see `Mailbox.get_message`."""
        self._engine.check_process()
        return await asyncio.to_thread(self._get_message, id_, caller_covers)

    async def wait_for_result(self, id_: str, *, wait_ms: int = 0) -> MessageOutcome:
        """Wait for the result of a message; see `Mailbox.wait_for_result`."""
        await self._engine.check_ownership()  # which alone learns of the end
        check_text("The message id", id_, 1)
        now = asyncio.get_running_loop().time
        end = now() + check_int("wait_ms", wait_ms, 0, MAX_WAIT_MS) / 1_000
        find, stream = self._get_message.find, message_stream(self._engine.name, id_)
        with self._engine.long_polls.watch(stream) as watch:  # before the log is read, to miss no end
            try:
                sent, outcome = await asyncio.to_thread(find, id_, caller_covers, watch.ends)
            except NotFound:  # in amnesia mode, a message whose end is durable, but not noted yet
                await self._engine.committer.wait_until_durable()
                sent, outcome = await asyncio.to_thread(find, id_, caller_covers, watch.ends)
            if sent.stream not in watch.ends and (outcome.is_final or not wait_ms):
                return outcome
            while sent.stream not in watch.ends and (seconds := end - now()) > 0:
                await watch.wait(seconds)
            if (ended := watch.ends.get(sent.stream)) is None:
                return (await asyncio.to_thread(find, id_, caller_covers, watch.ends))[1]
            # Not read from the log, which forgets results in amnesia mode.
            return await asyncio.to_thread(self._get_message.end, sent, ended)

    async def explain_message(self, id_: str) -> Explanation:
        """Return the explanation of a message; see `Mailbox.explain_message`."""
        self._engine.check_process()
        query = ExplainMessage(self._engine.log, self._engine.now)
        return await asyncio.to_thread(query, id_, caller_covers)

    async def get_backlog(self, topic: str | None = None, *, at: Moment | None = None) -> Backlog:
        """Count unsettled messages; see `Mailbox.get_backlog`."""
        return await self._at(at, GetBacklog(self._state_at, self._dlq_profile), topic, at=at)

    async def list_dead_letters(
        self,
        topic: str | None = None,
        *,
        reason: str | None = None,
        held_keys: bool = False,
        limit: int = 100,
        cursor: str | None = None,
        at: Moment | None = None,
    ) -> Page[DeadLetter]:
        """Return a page of dead letters; see `Mailbox.list_dead_letters`."""
        query = partial(self._list_dead_letters, topic, reason=reason, held_keys=held_keys)
        return await self._at(at, query, limit=limit, cursor=cursor, at=at)

    async def get_topic_policy(self, topic: str) -> TopicPolicy:
        """Return the policy of a topic; see `Mailbox.get_topic_policy`."""
        check_topic(topic)
        policy = await self._now(lambda: self._engine.mailbox.policy(topic))
        return replace(policy, key_weights=dict(policy.key_weights))  # the caller's own

    async def measure(self) -> list[Metric]:
        """Return the metrics of the mailbox."""
        return await self._now(self._measure)

    async def list_topics(self) -> list[TopicSummary]:
        """Return the topics; see `Mailbox.list_topics`."""
        topics = await self._now(ListTopics(self._state_at))
        count = self._engine.long_polls.count
        return [replace(each, receivers=n) if (n := count(each.topic)) else each for each in topics]

    async def describe_topic(self, topic: str) -> TopicReport:
        """Return a topic with what happens in it; see `Mailbox.describe_topic`."""
        query = self._topic_queries()
        report = await self._now(query.read_state, topic)
        return await asyncio.to_thread(query.add_events, report)

    async def list_consumers(self) -> list[ConsumerReport]:
        """Return the consumers; see `Mailbox.list_consumers`."""
        receivers = await self._now(self._count_receivers)
        return await asyncio.to_thread(self._topic_queries().list_consumers, receivers)

    @cached_property
    def _workers(self) -> WorkerRegistry:
        return WorkerRegistry(self._engine.now)

    async def report_worker(
        self, id_: str, worker: WorkerState, *, ended: bool = False, principal: str | None = None
    ) -> None:
        """Note a report of a worker; see `Mailbox.report_worker`."""
        check_uuid("The worker id", id_)
        state = check_worker(worker)
        check_type("ended", ended, bool)
        check_optional_text("principal", principal)
        await self._now(self._workers.report, id_, state, principal, ended=ended)

    async def list_workers(self) -> list[WorkerReport]:
        """Return the workers; see `Mailbox.list_workers`."""
        return await self._now(self._workers.list_workers)

    def _topic_queries(self) -> DescribeTopic:
        engine = self._engine
        return DescribeTopic(engine.log, self._state_at, engine.now, self._count_receivers)

    def _count_receivers(self) -> Mapping[tuple[str, str], int]:
        return count_receivers(self._engine.long_polls.list_receivers())

    async def peek_messages(self, topic: str, *, limit: int = 10) -> list[PeekedMessage]:
        """Return ready messages without receiving them; see `Mailbox.peek_messages`."""
        engine = self._engine
        query = PeekMessages(self._state_at, engine.log, engine.protection, is_swept=True)
        return await self._now(query, topic, limit=limit)

    async def search_messages(self, filter_: EventFilter) -> Page[FoundMessage]:
        """Return a page of the messages that match; see `Mailbox.search_messages`."""
        self._engine.check_process()
        return await self._search(filter_of_mailbox(filter_, self._engine.name))

    async def search_unsettled(self, filter_: EventFilter) -> Page[FoundMessage]:
        """Return a page of the unsettled messages that match, without read models."""
        if self._engine.protection is not None:
            filter_ = await asyncio.to_thread(as_stored, filter_, self._engine.protection)
        messages = await self._now(lambda: list(self._engine.mailbox.messages.values()))
        return await asyncio.to_thread(SearchUnsettled(self._engine.log), filter_, messages)

    async def _now(self, query: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a query of the present on the event loop; raises Fenced when the mailbox was taken over."""
        await self._engine.check_ownership()
        try:
            return query(*args, **kwargs)
        except BrokenLog:  # memory and log differ: the log may have a new owner since the check
            await self._engine.check_ownership()
            raise

    async def _at(self, at: Moment | None, query: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a query of the present on the event loop, and one of the past in a thread."""
        if at is None:
            return await self._now(query, *args, **kwargs)
        self._engine.check_process()
        return await asyncio.to_thread(query, *args, **kwargs)
