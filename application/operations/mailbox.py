"""Port: a mailbox as its users see it, whether this process owns it or calls go to another.

The methods of `Mailbox` are the table of operations; `operation.py` has what is derived from them.
"""

from __future__ import annotations  # `help` shows the names of the types, not their bounds

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from functools import partial
from typing import Annotated

from msgspec import Meta

from postroom.application.message_stream import HEARTBEAT_MS, MAX_WAIT_MS, MessageStream
from postroom.application.messages import MessageResult, NewMessage, Sent
from postroom.application.operations.operation import (
    BY_SERVER,
    Check,
    SentAs,
    Title,
    operation,
    read_operations,
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
    check_due,
    check_moment,
)
from postroom.application.received_messages import ReceivedMessage
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
from postroom.application.worker_reports import WorkerReport, WorkerState, check_worker
from postroom.domain.arguments import MAX_INT, MAX_PAGE, MAX_TEXT_CHARS, check_ids
from postroom.domain.capability.rights import Right
from postroom.domain.errors import Rejected
from postroom.domain.mailbox.counts import TopicSummary
from postroom.domain.mailbox.topic_decisions import SettingsPreview
from postroom.domain.message import NackAction, Receipt
from postroom.domain.names import TOPIC_TEXT, UUID_TEXT, check_topic, check_uuid
from postroom.domain.policy import DEFAULT_MAX_BYTES, DEFAULT_MAX_MESSAGES, MAX_DURATION_MS, TopicPolicy
from postroom.domain.redrive.spec import JobAction, RedriveSpec, check_action, check_spec
from postroom.domain.saved_search import check_search_name, check_search_query
from postroom.domain.schedule import ScheduleSpec, check_schedule, check_schedule_name
from postroom.domain.search import EventFilter, FoundMessage
from postroom.domain.settings import (
    MailboxSettings,
    PolicyChanges,
    SettingsChanges,
    check_changes,
    check_policy_changes,
)
from postroom.domain.subscription import SubscriptionFilter, check_filter

Topic = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT_CHARS), Check(check_topic, TOPIC_TEXT)]
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
MessageId = Annotated[
    str,
    Meta(min_length=1, max_length=MAX_TEXT_CHARS),
    Title("The message id"),
    SentAs("msg_id"),
]
MessageIds = Annotated[Sequence[MessageId], Meta(max_length=MAX_PAGE), Check(partial(check_ids, "ids"))]
Before = Annotated[int, Meta(ge=0, le=MAX_INT), SentAs("older_than_us")]
JobId = Annotated[str, Check(partial(check_uuid, "The redrive job id"), UUID_TEXT)]
Limit = Annotated[int, Meta(ge=1, le=MAX_PAGE)]
WaitMs = Annotated[int, Meta(ge=0, le=MAX_WAIT_MS)]
Position = Annotated[int, Meta(ge=0, le=MAX_INT)]
At = Annotated[Position | datetime, Check(check_moment)]
Start = Annotated[Position | datetime, Check(partial(check_moment, name="start"))]
Due = Annotated[datetime, Check(check_due)]
Spec = Annotated[RedriveSpec, Check(check_spec)]
Changes = Annotated[SettingsChanges, Check(check_changes)]
Policy = Annotated[TopicPolicy | PolicyChanges, Check(check_policy_changes)]
Filter = Annotated[SubscriptionFilter, Check(check_filter), SentAs("filter")]
ScheduleName = Annotated[
    str, Meta(min_length=1, max_length=MAX_TEXT_CHARS), Check(check_schedule_name, TOPIC_TEXT)
]
SearchName = Annotated[str, Check(check_search_name)]
SearchQuery = Annotated[str, Check(check_search_query)]
SearchId = Annotated[str, Check(partial(check_uuid, "The id of a search"), UUID_TEXT)]
Scheduled = Annotated[ScheduleSpec, Check(check_schedule)]
Action = Annotated[JobAction, Check(check_action)]
WorkerId = Annotated[str, Check(partial(check_uuid, "The worker id"), UUID_TEXT), SentAs("id")]
Worker = Annotated[WorkerState, Check(check_worker)]
Principal = Annotated[Text | None, BY_SERVER]


class Mailbox:
    """The commands and queries of one mailbox; every adapter passes `tests/conformance/mailbox.py`.

    All of them raise InvalidRequest for an argument of a wrong type or out of range, Saturated when a limit
    is reached, and Unavailable, with a retry time, when the mailbox can't be used now. The outcome of a
    command that ends with Unavailable is unknown: it may have taken effect. Repeating it is safe except for
    `redrive_dead_letters`, `purge_topic`, `rewind_subscription`, `delete_subscription`, `run_schedule` and
    `delete_schedule`; repeating a send is safe if it carries an `idem_key` or a `message_id`.
    """

    @property
    def name(self) -> str:
        """Return the name of the mailbox, `namespace@proxy`."""

    @operation(Right.SEND, "POST /v1/send")
    async def send_message(self, message: NewMessage, /) -> Sent:
        """Send a message and return when it is durable (svc-mailbox I-1, I-2).

        Returns: its id, and whether the send was a duplicate.
        Raises: FrameTooLarge, IdempotencyConflict.
        """

    @operation(Right.SEND, "POST /v1/send")
    async def send_batch(self, messages: Sequence[NewMessage], /) -> list[Sent | Rejected]:
        """Send messages and return an answer for each, in their order."""

    @operation(Right.RECV, "POST /v1/recv")
    async def receive_messages(
        self,
        topic: str | Sequence[str],
        /,
        *,
        max_messages: int = DEFAULT_MAX_MESSAGES,
        max_bytes: int = DEFAULT_MAX_BYTES,
        visibility_ms: int | None = None,
        consumer: str | None = None,
        wait_ms: int = 0,
    ) -> list[ReceivedMessage]:
        """Receive messages of one topic or of several, in the order of their shards (svc-mailbox I-3).

        A shard is FIFO, unless the topic's policy has priorities.

        Arguments:
            topic: the topic, or a list of up to 1,000; they take turns in being served first.
            max_messages: maximum number of messages.
            max_bytes: maximum total size of their payloads; the first message is always delivered.
            visibility_ms: how long they are hidden, 250 ms to 30 days; None uses the policy of each topic.
            consumer: name of the consumer, recorded in the log; up to 255 characters.
            wait_ms: maximum wait for a message, up to 60,000.

        Returns: the messages; empty if none is ready.
        """

    def stream_messages(
        self,
        topic: str | Sequence[str],
        /,
        *,
        max_messages: int = DEFAULT_MAX_MESSAGES,
        max_bytes: int = DEFAULT_MAX_BYTES,
        visibility_ms: int | None = None,
        consumer: str | None = None,
        heartbeat_ms: int = HEARTBEAT_MS,
        wait_ms: int | None = None,
    ) -> AbstractAsyncContextManager[MessageStream]:
        """Receive messages for the length of a context, which yields an asynchronous iterator of them.

        When the context ends, messages that were not settled are nacked without a delay, so that other
        consumers get them at once. The same happens when the process ends, unless it owned the mailbox.

        Arguments:
            topic, visibility_ms, consumer: as of `receive_messages`.
            max_messages: maximum number of unsettled messages at a time, 1 to 256. Messages that this mailbox
                acks or nacks, and messages that time out, make room.
            max_bytes: maximum total size of the payloads that are received at a time.
            heartbeat_ms: how often a connection without messages is checked, 250 to 60,000; one that is
                silent for three heartbeats is lost, and another is made.
            wait_ms: the iteration ends after this time without a message, 1 to 60,000; None is never.

        Raises, when messages are iterated over: the errors of `receive_messages` except Saturated. A server
            that can't be reached for the time of a call ends the stream with Unavailable.
        """

    @operation(Right.ACK, "POST /v1/ack")
    async def ack_messages(
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

    @operation(Right.NACK, "POST /v1/nack")
    async def nack_messages(
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

    @operation(Right.EXTEND, "POST /v1/extend")
    async def extend_visibility(
        self, receipts: Sequence[Receipt], visibility_ms: int, /
    ) -> list[Rejected | None]:
        """Hide received messages for `visibility_ms` from now on (svc-mailbox P-9).

        Returns: as `ack_messages`.
        """

    @operation(Right.REDRIVE, "POST /v1/dlq/reprocess", is_repeatable=False, answer="redriven")
    async def redrive_dead_letters(
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

    @operation(Right.ADMIN, "POST /v1/topics/{topic}/purge", is_repeatable=False, answer="removed")
    async def purge_topic(self, topic: Topic, /, *, dead: bool = True, ready: bool = False) -> int:
        """Remove the dead letters of a topic, its ready messages, or both.

        Returns: number of removed messages.
        Raises: NotFound for an unknown topic.
        """

    @operation(Right.ADMIN, "POST /v1/cancel", answer="messages")
    async def cancel_messages(
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

    @operation(Right.ADMIN, "POST /v1/reschedule", answer="messages")
    async def reschedule_messages(
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

    @operation(Right.ADMIN, "PUT /v1/topics/{topic}/policy")
    async def set_topic_policy(self, topic: Topic, policy: Policy, /) -> None:
        """Set the policy of a topic, in its own section; it applies from now on (svc-mailbox P-9).

        Another number of shards waits until the topic holds no messages (ADR 0098).

        Arguments:
            policy: a mapping sets the fields that it names; other fields, and fields set to None, follow the
                globs and the default policy. A `TopicPolicy` sets all fields.
        """

    @operation(Right.READ_HEADERS, "GET /v1/settings", answer="settings")
    async def get_settings(self) -> MailboxSettings:
        """Return the settings of the mailbox: limits, default policy, and sections of topics."""

    @operation(Right.ADMIN, "POST /v1/settings/preview")
    async def preview_settings(self, changes: Changes, /, *, replace: bool = False) -> SettingsPreview:
        """Return what `set_settings` would do: the settings after it, and what would expire at once."""

    @operation(Right.ADMIN, "PUT /v1/settings", answer="changed")
    async def set_settings(self, changes: Changes, /, *, replace: bool = False) -> bool:
        """Change the settings of the mailbox; they apply from now on, and stay whoever owns it.

        The owner applies the changes to the settings as they are then, so concurrent changes are not lost.
        `preview_settings` tells what would expire at once.

        Arguments:
            replace: everything that the changes leave out becomes the default, except labels and the sections
                of topics with labels.

        Returns: whether that changed anything.
        """

    @operation(Right.ADMIN, "PUT /v1/topics/{topic}/pause")
    async def pause_topic(self, topic: Topic, /) -> None:
        """Stop the delivery of a topic's messages until it is resumed; idempotent.

        Receives return only messages of their other topics, and waiting ones keep waiting. Deliveries in
        flight can be settled; sends, delays, redrives, expiry and dead-lettering continue. The pause is
        recorded in the log, so it outlasts the owner.

        Raises: NotFound for an unknown topic.
        """

    @operation(Right.ADMIN, "PUT /v1/topics/{topic}/resume")
    async def resume_topic(self, topic: Topic, /) -> None:
        """Deliver the messages of a topic again, to waiting receivers at once; idempotent.

        Raises: NotFound for an unknown topic.
        """

    @operation(Right.ADMIN, "PUT /v1/subscriptions/{name}")
    async def set_subscription(
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

    @operation(Right.READ_HEADERS, "GET /v1/subscriptions", answer="subscriptions")
    async def list_subscriptions(self) -> list[SubscriptionReport]:
        """Return the subscriptions with their progress, sorted by name."""

    @operation(Right.ADMIN, "POST /v1/subscriptions/{name}/rewind", is_repeatable=False)
    async def rewind_subscription(
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

    @operation(Right.ADMIN, "DELETE /v1/subscriptions/{name}", is_repeatable=False)
    async def delete_subscription(
        self, name: Topic, /, *, dry_run: bool = False, principal: Principal = None
    ) -> DeletionReport:
        """Delete a subscription: it gets no more copies; the messages in its topic stay.

        Arguments:
            dry_run: only return what would be left.
            principal: as of `set_subscription`.

        Returns: the messages in its topic, to be received or purged.
        Raises: NotFound for an unknown subscription.
        """

    @operation(Right.ADMIN, "PUT /v1/schedules/{name}")
    async def set_schedule(
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

    @operation(Right.READ_HEADERS, "GET /v1/schedules", answer="schedules")
    async def list_schedules(self) -> list[ScheduleReport]:
        """Return the schedules with their last and next runs, sorted by name."""

    @operation(Right.ADMIN, "PUT /v1/schedules/{name}/pause")
    async def pause_schedule(self, name: ScheduleName, /, *, principal: Principal = None) -> ScheduleReport:
        """Send no more ticks of a schedule until it is resumed; idempotent.

        Arguments:
            principal: as of `set_schedule`.

        Raises: NotFound for an unknown schedule.
        """

    @operation(Right.ADMIN, "PUT /v1/schedules/{name}/resume")
    async def resume_schedule(self, name: ScheduleName, /, *, principal: Principal = None) -> ScheduleReport:
        """Resume a schedule: its ticks from now on are sent; idempotent.

        Arguments:
            principal: as of `set_schedule`.

        Raises: NotFound for an unknown schedule.
        """

    @operation(Right.ADMIN, "POST /v1/schedules/{name}/run", is_repeatable=False)
    async def run_schedule(self, name: ScheduleName, /, *, principal: Principal = None) -> Sent:
        """Send the message of a schedule now, besides its ticks; also of one that is paused.

        Arguments:
            principal: as of `set_schedule`.

        Raises: NotFound for an unknown schedule.
        """

    @operation(Right.ADMIN, "DELETE /v1/schedules/{name}", is_repeatable=False)
    async def delete_schedule(self, name: ScheduleName, /, *, principal: Principal = None) -> None:
        """Delete a schedule; the messages that it sent stay.

        Arguments:
            principal: as of `set_schedule`.

        Raises: NotFound for an unknown schedule.
        """

    @operation(Right.REDRIVE, "POST /v1/searches")
    async def save_search(
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

    @operation(Right.READ_HEADERS, "GET /v1/searches", answer="searches")
    async def list_searches(self) -> list[SearchReport]:
        """Return the saved searches, sorted by name."""

    @operation(Right.REDRIVE, "DELETE /v1/searches/{search_id}")
    async def delete_search(self, search_id: SearchId, /) -> None:
        """Delete a saved search.

        Raises: NotFound for an unknown one.
        """

    @operation(Right.ADMIN, "POST /v1/log/delete", answer="removed")
    async def delete_old_events(self, older_than: Before, /) -> int:
        """Remove the settled records written before log time `older_than` (µs); return how many."""

    @operation(Right.REDRIVE, "POST /v1/redrives/preview")
    async def preview_redrive(self, spec: Spec, /) -> RedrivePreview:
        """Return counts and samples of the messages that a job would select now."""

    @operation(Right.REDRIVE, "POST /v1/redrives")
    async def start_redrive(
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

    @operation(Right.REDRIVE, "GET /v1/redrives", answer="jobs")
    async def list_redrives(self) -> list[RedriveReport]:
        """Return the jobs that have not ended and the last 100 that have, newest first."""

    @operation(Right.REDRIVE, "GET /v1/redrives/{job_id}")
    async def get_redrive(self, job_id: JobId, /) -> RedriveReport:
        """Return a job with its progress; raises NotFound for an unknown one."""

    @operation(Right.REDRIVE, "GET /v1/redrives/{job_id}/messages", answer="messages")
    async def list_redrive_messages(
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

    @operation(Right.REDRIVE, "PUT /v1/redrives/{job_id}/{action}")
    async def change_redrive(
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

    @operation(Right.READ_HEADERS, "GET /v1/messages/{msg_id}")
    async def get_message(self, id_: MessageId, /) -> MessageDetail:
        """Return a message with its history.

        Raises: NotFound when the log has no such message, or retention removed it.
        """

    @operation(Right.READ_PAYLOAD, "GET /v1/messages/{msg_id}/result")
    async def wait_for_result(self, id_: MessageId, /, *, wait_ms: WaitMs = 0) -> MessageOutcome:
        """Wait until a message is acked, dead-lettered or removed, and return which, with its result.

        Arguments:
            wait_ms: maximum wait, up to 60,000; a message that has not ended by then is returned as it is.

        Raises: NotFound when the log has no such message, or retention removed it.
        """

    @operation(Right.READ_HEADERS, "GET /v1/messages/{msg_id}/explanation")
    async def explain_message(self, id_: MessageId, /) -> Explanation:
        """Return a message's history as sentences, its deliveries and its current state.

        Raises: NotFound when the log has no such message, or retention removed it.
        """

    @operation(Right.READ_HEADERS, "GET /v1/backlog")
    async def get_backlog(self, topic: Text | None = None, /, *, at: At | None = None) -> Backlog:
        """Return the unsettled messages of one topic or of all, by shard, now or at a past moment.

        Raises: NotFound when retention removed the moment, InvalidRequest when it is in the future.
        """

    @operation(Right.READ_HEADERS, "GET /v1/dlq", answer="items")
    async def list_dead_letters(
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

    @operation(Right.READ_HEADERS, "GET /v1/topics/{topic}/policy", answer="policy")
    async def get_topic_policy(self, topic: Topic, /) -> TopicPolicy:
        """Return the policy of a topic, which need not exist."""

    @operation(Right.READ_HEADERS, "GET /v1/topics", answer="topics")
    async def list_topics(self) -> list[TopicSummary]:
        """Return the topics that hold messages or idempotency keys, have a section, or are paused.

        Subscriptions are among them, also while they hold nothing.
        """

    @operation(Right.READ_HEADERS, "GET /v1/topics/{topic}/report")
    async def describe_topic(self, topic: Topic, /) -> TopicReport:
        """Return the policy, keys, consumers and recent activity of a topic, which need not exist.

        The operation reads the latest 100,000 events of the log; `is_whole` says whether they cover a period.
        """

    @operation(Right.READ_HEADERS, "GET /v1/consumers", answer="consumers")
    async def list_consumers(self) -> list[ConsumerReport]:
        """Return the consumers of the latest 100,000 events of the log, and those that wait for messages now.

        Consumers that have or wait for messages come first, then the latest receivers; up to 1,000.
        """

    @operation(Right.RECV, "PUT /v1/workers/{id}")
    async def report_worker(
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

    @operation(Right.READ_HEADERS, "GET /v1/workers", answer="workers")
    async def list_workers(self) -> list[WorkerReport]:
        """Return the workers that reported within an hour and have not ended, stale ones last.

        The owner knows the workers that reported since it opened the mailbox: up to 4,000 workers and
        handlers.
        """

    @operation(Right.READ_PAYLOAD, "GET /v1/peek", answer="messages")
    async def peek_messages(self, topic: Topic, /, *, limit: Limit = 10) -> list[PeekedMessage]:
        """Return up to `limit` ready messages, 1 to 1,000, without receiving them; also of a paused topic."""

    @operation(Right.READ_HEADERS, "GET /v1/messages", answer="items")
    async def search_messages(self, filter_: EventFilter, /) -> Page[FoundMessage]:
        """Return a page of the messages of this mailbox that match (RFC-037 `QueryEvents`).

        The search reads the read models, which have what a rebuild or a follower has processed; in a mailbox
        in memory, it reads the unsettled messages. Answers over HTTP, and to callers who may not read
        payloads, have no envelopes.

        Raises: NotFound before the first rebuild; InvalidRequest for a filter that names another mailbox.
        """


OPERATIONS = read_operations(Mailbox)
"""The operations of a mailbox by name."""
