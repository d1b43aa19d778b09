"""Port: a mailbox as its users see it, whether this process owns it or calls go to another."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from postroom.application.message_stream import HEARTBEAT_MS, MessageStream
from postroom.application.messages import NewMessage, ReceivedMessage, Sent
from postroom.application.ports.redrives import Redrives
from postroom.application.ports.settings import Settings
from postroom.application.query_results import (
    Backlog,
    DeadLetter,
    Explanation,
    MessageDetail,
    Moment,
    PeekedMessage,
)
from postroom.domain.errors import Rejected
from postroom.domain.mailbox.counts import TopicSummary
from postroom.domain.message import Receipt
from postroom.domain.policy import DEFAULT_MAX_BYTES, DEFAULT_MAX_MESSAGES, TopicPolicy
from postroom.domain.search import EventFilter, SearchPage
from postroom.domain.settings import PolicyChanges


class Mailbox(Redrives, Settings, Protocol):
    """The commands and queries of one mailbox; every adapter passes `tests/conformance/mailbox.py`.

    All of them raise InvalidRequest for an argument of a wrong type or out of range, Saturated when a limit
    is reached, and Unavailable, with a retry time, when the mailbox can't be used now. The outcome of a
    command that ends with Unavailable is unknown: it may have taken effect. Repeating it is safe for
    everything but `redrive_dead_letters` and `purge_topic`, and for sends that carry an `idem_key` or a
    `message_id`.
    """

    @property
    def name(self) -> str:
        """Return the name of the mailbox, `namespace@proxy`."""

    async def send_message(self, message: NewMessage, /) -> Sent:
        """Send a message and return when it is durable (svc-mailbox I-1, I-2).

        Returns: its id, and whether the send was a duplicate.
        Raises: FrameTooLarge, IdempotencyConflict.
        """

    async def send_batch(self, messages: Sequence[NewMessage], /) -> list[Sent | Rejected]:
        """Send messages and return an answer for each, in their order."""

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

        When the context ends, what was not settled is nacked without a delay, so that other consumers get it
        at once. So is what a process leaves that ends, unless it owned the mailbox.

        Arguments:
            topic, visibility_ms, consumer: as of `receive_messages`.
            max_messages: maximum number of unsettled messages at a time, 1 to 256. Those that this mailbox
                acks or nacks, and those that time out, make room.
            max_bytes: maximum total size of the payloads that are received at a time.
            heartbeat_ms: how often a connection without messages is checked, 250 to 60,000; one that is
                silent for three heartbeats is lost, and another is made.
            wait_ms: the iteration ends after this time without a message, 1 to 60,000; None is never.

        Raises, when messages are iterated over: what `receive_messages` raises, but Saturated. A server that
            can't be reached for the time of a call ends the stream with Unavailable.
        """

    async def ack_messages(self, receipts: Sequence[Receipt], /) -> list[Rejected | None]:
        """Settle deliveries; acks are final and idempotent (svc-mailbox I-3).

        Returns: for each, None if it is settled, else the error: StaleReceipt when the message was delivered
            again or is dead, NotFound when it is unknown, InvalidRequest for an invalid receipt.
        """

    async def nack_messages(
        self, receipts: Sequence[Receipt], /, *, reason: str | None = None, delay_ms: int | None = None
    ) -> list[Rejected | None]:
        """Fail deliveries: each is retried after a backoff, or dead-lettered (svc-mailbox P-7).

        Arguments:
            reason: the error, stored up to 1,000 characters; the dead letter's `last_error` if this was the
                last attempt.
            delay_ms: delay to use instead of the policy's backoff.

        Returns: as `ack_messages`.
        """

    async def extend_visibility(
        self, receipts: Sequence[Receipt], visibility_ms: int, /
    ) -> list[Rejected | None]:
        """Hide received messages for `visibility_ms` from now on (svc-mailbox P-9).

        Returns: as `ack_messages`.
        """

    async def redrive_dead_letters(
        self,
        topic: str,
        /,
        *,
        limit: int = 100,
        reason: str | None = None,
        message_ids: Sequence[str] | None = None,
    ) -> int:
        """Redrive dead letters of a topic, oldest first (svc-mailbox I-4, C-4).

        Arguments:
            limit: maximum number of messages.
            reason: redrive only those dead-lettered for this reason.
            message_ids: redrive only these.

        Returns: number of redriven messages; below `limit` when there are no more or the shards are full.
        Raises: NotFound for an unknown topic.
        """

    async def purge_topic(self, topic: str, /, *, dead: bool = True, ready: bool = False) -> int:
        """Remove the dead letters of a topic, its ready messages, or both.

        Returns: number of removed messages.
        Raises: NotFound for an unknown topic.
        """

    async def set_topic_policy(self, topic: str, policy: TopicPolicy | PolicyChanges, /) -> None:
        """Set the policy of a topic, in its own section; it applies from now on (svc-mailbox P-9).

        Another number of shards waits until the topic holds no messages (ADR 0098).

        Arguments:
            policy: a mapping sets the fields that it names; the others go on following the globs and the
                default policy, as does one that is None. A `TopicPolicy` sets all fields.
        """

    async def pause_topic(self, topic: str, /) -> None:
        """Stop the delivery of a topic's messages until it is resumed; idempotent.

        Receives return only messages of their other topics, and waiting ones keep waiting. Deliveries in
        flight can be settled; sends, delays, redrives, expiry and dead-lettering continue. The pause is
        recorded in the log, so it outlasts the owner.

        Raises: NotFound for an unknown topic.
        """

    async def resume_topic(self, topic: str, /) -> None:
        """Deliver the messages of a topic again, to waiting receivers at once; idempotent.

        Raises: NotFound for an unknown topic.
        """

    async def delete_old_events(self, older_than: int, /) -> int:
        """Remove the settled records written before log time `older_than` (µs); return how many."""

    async def get_message(self, id_: str, /) -> MessageDetail:
        """Return a message with its history.

        Raises: NotFound when the log has no such message, or retention removed it.
        """

    async def explain_message(self, id_: str, /) -> Explanation:
        """Return a message's history as sentences, its deliveries and its current state.

        Raises: NotFound when the log has no such message, or retention removed it.
        """

    async def get_backlog(self, topic: str | None = None, /, *, at: Moment | None = None) -> Backlog:
        """Return the unsettled messages of one topic or of all, by shard, now or at a past moment.

        Raises: NotFound when retention removed the moment, InvalidRequest when it is in the future.
        """

    async def list_dead_letters(
        self,
        topic: str | None = None,
        /,
        *,
        reason: str | None = None,
        limit: int = 100,
        cursor: int = 0,
        at: Moment | None = None,
    ) -> list[DeadLetter]:
        """Return up to `limit` dead letters, oldest message first.

        Arguments:
            reason: only dead letters with this reason.
            limit: 1 to 1,000.
            cursor: `position` of the last dead letter of the previous page.
            at: a past moment; None is now.
        """

    async def get_topic_policy(self, topic: str, /) -> TopicPolicy:
        """Return the policy of a topic, which need not exist."""

    async def list_topics(self) -> list[TopicSummary]:
        """Return the topics that hold messages or idempotency keys, have a section, or are paused."""

    async def peek_messages(self, topic: str, /, *, limit: int = 10) -> list[PeekedMessage]:
        """Return up to `limit` ready messages, 1 to 1,000, without receiving them; also of a paused topic."""

    async def search_messages(self, filter_: EventFilter, /) -> SearchPage:
        """Return a page of the messages of this mailbox that match (RFC-037 `QueryEvents`).

        The read models are searched, which know what a rebuild or a follower has processed; of a mailbox in
        memory, the unsettled messages. Answers over HTTP, and to callers who may not read payloads, have no
        envelopes.

        Raises: NotFound before the first rebuild; InvalidRequest for a filter that names another mailbox.
        """
