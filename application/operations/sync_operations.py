"""Operations of a mailbox for code without an event loop; written by scripts/operations.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from postroom.application.messages import MessageResult, NewMessage, Sent
from postroom.application.operations.mailbox import (
    Action,
    At,
    Before,
    Changes,
    Due,
    Filter,
    JobId,
    Limit,
    Mailbox,
    MessageId,
    MessageIds,
    Policy,
    Position,
    Principal,
    Scheduled,
    ScheduleName,
    SearchId,
    SearchName,
    SearchQuery,
    Spec,
    Start,
    Text,
    Topic,
    WaitMs,
    Worker,
    WorkerId,
)
from postroom.application.page import Page
from postroom.application.query_results import (
    Backlog,
    DeadLetter,
    Explanation,
    MessageChange,
    MessageDetail,
    MessageOutcome,
    Outcome,
    PeekedMessage,
    RedrivePreview,
)
from postroom.application.reports import (
    ConsumerReport,
    DeletionReport,
    RedriveMessage,
    RedriveReport,
    RewindReport,
    ScheduleReport,
    SearchReport,
    SubscriptionReport,
    TopicReport,
)
from postroom.application.worker_reports import WorkerReport
from postroom.domain.errors import Rejected
from postroom.domain.mailbox.counts import TopicSummary
from postroom.domain.mailbox.topic_decisions import SettingsPreview
from postroom.domain.message import NackAction, Receipt
from postroom.domain.policy import MAX_DURATION_MS, TopicPolicy
from postroom.domain.search import EventFilter, FoundMessage
from postroom.domain.settings import MailboxSettings

T = TypeVar("T")


class SyncOperations(ABC):
    """The operations of `Mailbox` as functions that return when they are done."""

    @property
    @abstractmethod
    def _open(self) -> Mailbox:
        """Return the mailbox."""

    @abstractmethod
    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine."""

    def send_message(self, message: NewMessage, /) -> Sent:
        """Send a message and return when it is durable (svc-mailbox I-1, I-2).

        Returns: its id, and whether the send was a duplicate.
        Raises: FrameTooLarge, IdempotencyConflict.
        """
        return self._run(self._open.send_message(message))

    def send_batch(self, messages: Sequence[NewMessage], /) -> list[Sent | Rejected]:
        """Send messages and return an answer for each, in their order."""
        return self._run(self._open.send_batch(messages))

    def ack_messages(
        self, receipts: Sequence[Receipt], /, *, results: Sequence[MessageResult | None] | None = None
    ) -> list[Rejected | None]:
        """Settle deliveries; acks are final and idempotent (svc-mailbox I-3).

        Arguments:
            results: one for each receipt, a result or None, which `wait_for_result` and `get_message` return;
                the first ack of a message counts, and a repeated one changes nothing.

        Returns: for each, None if it is settled, else the error: StaleReceipt when the message was delivered
            again or is dead, NotFound when it is unknown, InvalidRequest for an invalid receipt,
            FrameTooLarge when its result is above the limit `result_bytes`; it is not settled then.
        """
        return self._run(self._open.ack_messages(receipts, results=results))

    def nack_messages(
        self,
        receipts: Sequence[Receipt],
        /,
        *,
        reason: str | None = None,
        delay_ms: int | None = None,
        action: NackAction = "retry",
        traceback: str | None = None,
    ) -> list[Rejected | None]:
        """Fail deliveries: each is retried after a backoff, or dead-lettered (svc-mailbox P-7).

        Arguments:
            reason: the error, stored up to 1,000 characters; the dead letter's `last_error` if this was the
                last attempt.
            delay_ms: delay to use instead of the policy's backoff; with `release`, instead of none.
            action: `retry`; `reject` dead-letters them at once, as no attempt can succeed; `release` requeues
                them and counts no attempt, as the consumer did not try.
            traceback: of the error; a message that becomes a dead letter keeps it, up to the limit
                `traceback_bytes`, for those who may read its payload.

        Returns: as `ack_messages`.
        """
        return self._run(
            self._open.nack_messages(
                receipts, reason=reason, delay_ms=delay_ms, action=action, traceback=traceback
            )
        )

    def extend_visibility(self, receipts: Sequence[Receipt], visibility_ms: int, /) -> list[Rejected | None]:
        """Hide received messages for `visibility_ms` from now on (svc-mailbox P-9).

        Returns: as `ack_messages`.
        """
        return self._run(self._open.extend_visibility(receipts, visibility_ms))

    def redrive_dead_letters(
        self,
        topic: Topic,
        /,
        *,
        limit: Annotated[int, Meta(ge=1)] = 100,
        reason: Text | None = None,
        message_ids: Sequence[MessageId] | None = None,
    ) -> int:
        """Redrive dead letters of a topic, oldest first (svc-mailbox I-4, C-4).

        Arguments:
            limit: maximum number of messages.
            reason: redrive only those dead-lettered for this reason.
            message_ids: redrive only these.

        Returns: number of redriven messages; below `limit` when there are no more or the shards are full.
        Raises: NotFound for an unknown topic.
        """
        return self._run(
            self._open.redrive_dead_letters(topic, limit=limit, reason=reason, message_ids=message_ids)
        )

    def purge_topic(self, topic: Topic, /, *, dead: bool = True, ready: bool = False) -> int:
        """Remove the dead letters of a topic, its ready messages, or both.

        Returns: number of removed messages.
        Raises: NotFound for an unknown topic.
        """
        return self._run(self._open.purge_topic(topic, dead=dead, ready=ready))

    def cancel_messages(
        self, ids: MessageIds, /, *, reason: Text | None = None, principal: Principal = None
    ) -> list[MessageChange]:
        """Remove messages that are ready, delayed or in flight; their receipts are stale then.

        The log records that they were cancelled, by whom and why. Dead letters are not cancelled; use
        `purge_topic` or a redrive job.

        Arguments:
            ids: up to 1,000 message ids.
            principal: who cancels them, for the record; a server enters the principal of the caller's
                capability.

        Returns: the outcome of each, in their order.
        """
        return self._run(self._open.cancel_messages(ids, reason=reason, principal=principal))

    def reschedule_messages(
        self,
        ids: MessageIds,
        /,
        *,
        deliver_after_ms: Annotated[int, Meta(ge=0, le=MAX_DURATION_MS)] | None = None,
        at: Due | None = None,
        principal: Principal = None,
    ) -> list[MessageChange]:
        """Change when waiting messages may be delivered: `deliver_after_ms` from now, or `at` a time.

        Their retention begins anew when they are due; a time to live that their sender set stays.

        Arguments:
            ids: up to 1,000 message ids.
            deliver_after_ms: 0 is now.
            at: a time with its UTC offset, instead of `deliver_after_ms`; one in the past is now.
            principal: as of `cancel_messages`.

        Returns: the outcome of each, in their order.
        Raises: InvalidRequest unless exactly one of `deliver_after_ms` and `at` is given.
        """
        return self._run(
            self._open.reschedule_messages(ids, deliver_after_ms=deliver_after_ms, at=at, principal=principal)
        )

    def set_topic_policy(self, topic: Topic, policy: Policy, /) -> None:
        """Set the policy of a topic, in its own section; it applies from now on (svc-mailbox P-9).

        Another number of shards waits until the topic holds no messages (ADR 0098).

        Arguments:
            policy: a mapping sets the fields that it names; other fields, and fields set to None, follow the
                globs and the default policy. A `TopicPolicy` sets all fields.
        """
        self._run(self._open.set_topic_policy(topic, policy))

    def get_settings(self) -> MailboxSettings:
        """Return the settings of the mailbox: limits, default policy, and sections of topics."""
        return self._run(self._open.get_settings())

    def preview_settings(self, changes: Changes, /, *, replace: bool = False) -> SettingsPreview:
        """Return what `set_settings` would do: the settings after it, and what would expire at once."""
        return self._run(self._open.preview_settings(changes, replace=replace))

    def set_settings(self, changes: Changes, /, *, replace: bool = False) -> bool:
        """Change the settings of the mailbox; they apply from now on, and stay whoever owns it.

        The owner applies the changes to the settings as they are then, so concurrent changes are not lost.
        `preview_settings` tells what would expire at once.

        Arguments:
            replace: everything that the changes leave out becomes the default, except labels and the sections
                of topics with labels.

        Returns: whether that changed anything.
        """
        return self._run(self._open.set_settings(changes, replace=replace))

    def pause_topic(self, topic: Topic, /) -> None:
        """Stop the delivery of a topic's messages until it is resumed; idempotent.

        Receives return only messages of their other topics, and waiting ones keep waiting. Deliveries in
        flight can be settled; sends, delays, redrives, expiry and dead-lettering continue. The pause is
        recorded in the log, so it outlasts the owner.

        Raises: NotFound for an unknown topic.
        """
        self._run(self._open.pause_topic(topic))

    def resume_topic(self, topic: Topic, /) -> None:
        """Deliver the messages of a topic again, to waiting receivers at once; idempotent.

        Raises: NotFound for an unknown topic.
        """
        self._run(self._open.resume_topic(topic))

    def set_subscription(
        self,
        name: Topic,
        filter_: Filter,
        /,
        *,
        start: Start | None = None,
        if_missing: bool = False,
        principal: Principal = None,
    ) -> SubscriptionReport:
        """Create a subscription, or change its filter from now on; idempotent.

        A subscription is a topic with the name of the subscription. It gets a copy of each message that is
        sent to a topic of its filter, in the commit of the send. Receive from it, settle, pause, redrive and
        set its policy as with any topic; only sends to it are refused.

        Arguments:
            start: a new one also gets messages sent since this moment, as far as retention left them: a time,
                or the position of the log after which it begins; 0 is the beginning. None is now. It does not
                change a subscription that exists; `rewind_subscription` does.
            if_missing: only create it; one that exists stays as it is, and the report has its filter.
            principal: who sets it, for the record; a server enters the principal of the caller's capability.

        Raises: InvalidRequest when the topic holds messages, and for another filter of a subscription that
            is not live; Saturated when the mailbox has too many subscriptions.
        """
        return self._run(
            self._open.set_subscription(
                name, filter_, start=start, if_missing=if_missing, principal=principal
            )
        )

    def list_subscriptions(self) -> list[SubscriptionReport]:
        """Return the subscriptions with their progress, sorted by name."""
        return self._run(self._open.list_subscriptions())

    def rewind_subscription(
        self, name: Topic, start: Start, /, *, dry_run: bool = False, principal: Principal = None
    ) -> RewindReport:
        """Empty the topic of a subscription, and copy the messages sent since a moment again.

        Messages in flight are removed, too: their receipts are stale then. Unsettled messages from before
        `start` are removed and not copied again.

        Arguments:
            start: a time, or the position of the log after which it begins; 0 is the beginning.
            dry_run: only return what would be removed and copied.
            principal: as of `set_subscription`.

        Raises: NotFound for an unknown subscription.
        """
        return self._run(self._open.rewind_subscription(name, start, dry_run=dry_run, principal=principal))

    def delete_subscription(
        self, name: Topic, /, *, dry_run: bool = False, principal: Principal = None
    ) -> DeletionReport:
        """Delete a subscription: it gets no more copies; the messages in its topic stay.

        Arguments:
            dry_run: only return what would be left.
            principal: as of `set_subscription`.

        Returns: the messages in its topic, to be received or purged.
        Raises: NotFound for an unknown subscription.
        """
        return self._run(self._open.delete_subscription(name, dry_run=dry_run, principal=principal))

    def set_schedule(
        self,
        name: ScheduleName,
        schedule: Scheduled,
        /,
        *,
        from_code: bool = False,
        principal: Principal = None,
    ) -> ScheduleReport:
        """Create a schedule, or change it from now on; idempotent.

        The owner sends a message to its topic at each tick, in the commit that marks the tick as done, so
        each is sent once. A new time applies from now on; other changes keep the ticks as they are.

        Arguments:
            from_code: a worker sets what its code says: nothing changes unless the code differs from what was
                set by code last, so that what an operator changed stays until the code changes.
            principal: who sets it, for the record; a server enters the principal of the caller's capability.

        Raises: InvalidRequest for an invalid expression or time zone, for the topic of a subscription, and
            for one whose messages are encrypted; FrameTooLarge; Saturated when there are too many schedules.
        """
        return self._run(self._open.set_schedule(name, schedule, from_code=from_code, principal=principal))

    def list_schedules(self) -> list[ScheduleReport]:
        """Return the schedules with their last and next runs, sorted by name."""
        return self._run(self._open.list_schedules())

    def pause_schedule(self, name: ScheduleName, /, *, principal: Principal = None) -> ScheduleReport:
        """Send no more ticks of a schedule until it is resumed; idempotent.

        Arguments:
            principal: as of `set_schedule`.

        Raises: NotFound for an unknown schedule.
        """
        return self._run(self._open.pause_schedule(name, principal=principal))

    def resume_schedule(self, name: ScheduleName, /, *, principal: Principal = None) -> ScheduleReport:
        """Resume a schedule: its ticks from now on are sent; idempotent.

        Arguments:
            principal: as of `set_schedule`.

        Raises: NotFound for an unknown schedule.
        """
        return self._run(self._open.resume_schedule(name, principal=principal))

    def run_schedule(self, name: ScheduleName, /, *, principal: Principal = None) -> Sent:
        """Send the message of a schedule now, besides its ticks; also of one that is paused.

        Arguments:
            principal: as of `set_schedule`.

        Raises: NotFound for an unknown schedule.
        """
        return self._run(self._open.run_schedule(name, principal=principal))

    def delete_schedule(self, name: ScheduleName, /, *, principal: Principal = None) -> None:
        """Delete a schedule; the messages that it sent stay.

        Arguments:
            principal: as of `set_schedule`.

        Raises: NotFound for an unknown schedule.
        """
        self._run(self._open.delete_schedule(name, principal=principal))

    def save_search(
        self, name: SearchName, query: SearchQuery, /, *, replace: bool = False, principal: Principal = None
    ) -> SearchReport:
        """Save a query of the console's search page under a name, for all who may search its topics.

        Names are unique among the searches of the same topics. Saving the same query again changes nothing.

        Arguments:
            name: up to 80 characters.
            query: what the page's link has after the `?`, up to 2,000 characters.
            replace: replace a search of this name that has another query.
            principal: who saves it, for the record; a server enters the principal of the caller's capability.

        Raises: IdempotencyConflict when the name has another query, Saturated when there are too many.
        """
        return self._run(self._open.save_search(name, query, replace=replace, principal=principal))

    def list_searches(self) -> list[SearchReport]:
        """Return the saved searches, sorted by name."""
        return self._run(self._open.list_searches())

    def delete_search(self, search_id: SearchId, /) -> None:
        """Delete a saved search.

        Raises: NotFound for an unknown one.
        """
        self._run(self._open.delete_search(search_id))

    def delete_old_events(self, older_than: Before, /) -> int:
        """Remove the settled records written before log time `older_than` (µs); return how many."""
        return self._run(self._open.delete_old_events(older_than))

    def preview_redrive(self, spec: Spec, /) -> RedrivePreview:
        """Return counts and samples of the messages that a job would select now."""
        return self._run(self._open.preview_redrive(spec))

    def start_redrive(
        self,
        spec: Spec,
        /,
        *,
        job_id: JobId | None = None,
        cutoff: Position | None = None,
        previewed: Position | None = None,
        principal: Principal = None,
    ) -> RedriveReport:
        """Start a job on messages that are dead letters now, or wait now; later ones never join.

        With the `cutoff` and the number of messages of a preview, the job selects the messages that the
        preview showed. Messages that have changed since are skipped, and listed with the reason.

        Arguments:
            job_id: a UUID, preferably a UUIDv7: starting it again with the same specification changes
                nothing. None generates one.
            cutoff: `cutoff` of the preview; None is the end of the log.
            previewed: `matched` of the preview; None if there was none.
            principal: who starts it, for the record; a server enters the principal of the caller's
                capability.

        Raises: IdempotencyConflict when a job with this id has another specification, Saturated when too
            many jobs have not ended.
        """
        return self._run(
            self._open.start_redrive(
                spec, job_id=job_id, cutoff=cutoff, previewed=previewed, principal=principal
            )
        )

    def list_redrives(self) -> list[RedriveReport]:
        """Return the jobs that have not ended and the last 100 that have, newest first."""
        return self._run(self._open.list_redrives())

    def get_redrive(self, job_id: JobId, /) -> RedriveReport:
        """Return a job with its progress; raises NotFound for an unknown one."""
        return self._run(self._open.get_redrive(job_id))

    def list_redrive_messages(
        self,
        job_id: JobId,
        /,
        *,
        outcome: Outcome | None = None,
        cursor: Text | None = None,
        limit: Limit = 100,
    ) -> Page[RedriveMessage]:
        """Return a page of the messages of a job, in its order, with what it did with each.

        Arguments:
            outcome: only those that were `redriven`, `archived`, `purged`, `cancelled`, `rescheduled`,
                `skipped` or `undone`.
            cursor: `next_cursor` of the previous page.
            limit: maximum number of messages, 1 to 1,000.

        Raises: NotFound for an unknown job.
        """
        return self._run(
            self._open.list_redrive_messages(job_id, outcome=outcome, cursor=cursor, limit=limit)
        )

    def change_redrive(
        self, job_id: JobId, action: Action, /, *, principal: Principal = None
    ) -> RedriveReport:
        """Pause, resume, cancel or undo a job, and return it; idempotent.

        What a job did before it was cancelled stays done. `undo` stops it, and makes the messages that it
        redrove dead letters again, except messages that were received or removed since.

        Arguments:
            action: `pause`, `resume`, `cancel` or `undo`.
            principal: as of `start_redrive`.

        Raises: NotFound for an unknown job; InvalidRequest for a job that has ended, and for undoing a job
            that does not redrive.
        """
        return self._run(self._open.change_redrive(job_id, action, principal=principal))

    def get_message(self, id_: MessageId, /) -> MessageDetail:
        """Return a message with its history.

        Raises: NotFound when the log has no such message, or retention removed it.
        """
        return self._run(self._open.get_message(id_))

    def wait_for_result(self, id_: MessageId, /, *, wait_ms: WaitMs = 0) -> MessageOutcome:
        """Wait until a message is acked, dead-lettered or removed, and return which, with its result.

        Arguments:
            wait_ms: maximum wait, up to 60,000; a message that has not ended by then is returned as it is.

        Raises: NotFound when the log has no such message, or retention removed it.
        """
        return self._run(self._open.wait_for_result(id_, wait_ms=wait_ms))

    def explain_message(self, id_: MessageId, /) -> Explanation:
        """Return a message's history as sentences, its deliveries and its current state.

        Raises: NotFound when the log has no such message, or retention removed it.
        """
        return self._run(self._open.explain_message(id_))

    def get_backlog(self, topic: Text | None = None, /, *, at: At | None = None) -> Backlog:
        """Return the unsettled messages of one topic or of all, by shard, now or at a past moment.

        Raises: NotFound when retention removed the moment, InvalidRequest when it is in the future.
        """
        return self._run(self._open.get_backlog(topic, at=at))

    def list_dead_letters(
        self,
        topic: Text | None = None,
        /,
        *,
        reason: Text | None = None,
        held_keys: bool = False,
        limit: Limit = 100,
        cursor: Text | None = None,
        at: At | None = None,
    ) -> Page[DeadLetter]:
        """Return a page of dead letters, oldest message first.

        Arguments:
            reason: only dead letters with this reason.
            held_keys: only dead letters that hold their ordered key, by the policy `dead_letters_hold_keys`.
            limit: maximum number of dead letters, 1 to 1,000.
            cursor: `next_cursor` of the previous page.
            at: a past moment; None is now.
        """
        return self._run(
            self._open.list_dead_letters(
                topic, reason=reason, held_keys=held_keys, limit=limit, cursor=cursor, at=at
            )
        )

    def get_topic_policy(self, topic: Topic, /) -> TopicPolicy:
        """Return the policy of a topic, which need not exist."""
        return self._run(self._open.get_topic_policy(topic))

    def list_topics(self) -> list[TopicSummary]:
        """Return the topics that hold messages or idempotency keys, have a section, or are paused.

        Subscriptions are among them, also while they hold nothing.
        """
        return self._run(self._open.list_topics())

    def describe_topic(self, topic: Topic, /) -> TopicReport:
        """Return the policy, keys, consumers and recent activity of a topic, which need not exist.

        The operation reads the latest 100,000 events of the log; `is_whole` says whether they cover a period.
        """
        return self._run(self._open.describe_topic(topic))

    def list_consumers(self) -> list[ConsumerReport]:
        """Return the consumers of the latest 100,000 events of the log, and those that wait for messages now.

        Consumers that have or wait for messages come first, then the latest receivers; up to 1,000.
        """
        return self._run(self._open.list_consumers())

    def report_worker(
        self, id_: WorkerId, worker: Worker, /, *, ended: bool = False, principal: Principal = None
    ) -> None:
        """Tell the owner what a worker is and does; a worker repeats it every 10 s, as long as it runs.

        The owner keeps it in memory: after 30 s without a report, a worker is stale, and after an hour
        forgotten. Under a capability that is limited to topics, handlers of other topics are left out.

        Arguments:
            id_: a UUID of this run of the worker.
            ended: the run ends, and is forgotten.
            principal: whose worker it is; a server enters the principal of the caller's capability.
        """
        self._run(self._open.report_worker(id_, worker, ended=ended, principal=principal))

    def list_workers(self) -> list[WorkerReport]:
        """Return the workers that reported within an hour and have not ended, stale ones last.

        The owner knows the workers that reported since it opened the mailbox: up to 4,000 workers and
        handlers.
        """
        return self._run(self._open.list_workers())

    def peek_messages(self, topic: Topic, /, *, limit: Limit = 10) -> list[PeekedMessage]:
        """Return up to `limit` ready messages, 1 to 1,000, without receiving them; also of a paused topic."""
        return self._run(self._open.peek_messages(topic, limit=limit))

    def search_messages(self, filter_: EventFilter, /) -> Page[FoundMessage]:
        """Return a page of the messages of this mailbox that match (RFC-037 `QueryEvents`).

        The search reads the read models, which have what a rebuild or a follower has processed; in a mailbox
        in memory, it reads the unsettled messages. Answers over HTTP, and to callers who may not read
        payloads, have no envelopes.

        Raises: NotFound before the first rebuild; InvalidRequest for a filter that names another mailbox.
        """
        return self._run(self._open.search_messages(filter_))
