"""`AuthorizedMailbox`: a mailbox as the bearer of one capability may use it (svc-mailbox I-8, I-15)."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, cast

import msgspec

from postroom.application.access.audit import MAX_TOPICS, Auditor, audit_refusals, topics_of
from postroom.application.access.guard import Deliveries, Guard
from postroom.application.access.reads import AuthorizedReads
from postroom.application.access.settlements import AuthorizedRedrives, AuthorizedSettlements
from postroom.application.caller import Caller, call_as
from postroom.application.mailbox.receive import StreamMessages
from postroom.application.mailbox.settle import DeliveryWindows
from postroom.application.message_stream import HEARTBEAT_MS, MessageStream
from postroom.application.messages import NewMessage, Sent
from postroom.application.operations.mailbox import Mailbox
from postroom.application.operations.operation import Arguments, Operation, derive
from postroom.application.received_messages import ReceivedMessage
from postroom.application.reports import SearchReport
from postroom.application.service import Search
from postroom.domain.arguments import check_items
from postroom.domain.capability.access import uncovered_topic
from postroom.domain.capability.rights import Right
from postroom.domain.errors import Forbidden, NotFound, Rejected
from postroom.domain.mailbox.topic_decisions import unknown_topic
from postroom.domain.names import check_topic
from postroom.domain.policy import DEFAULT_MAX_BYTES, DEFAULT_MAX_MESSAGES, MailboxLimits, TopicPolicy
from postroom.domain.saved_search import topics_of_query
from postroom.domain.settings import SettingsChanges


class AuthorizedSearches(Mailbox):
    """The saved searches of `AuthorizedMailbox`; changes are audited, with the topics of the search.

    A capability sees the searches whose topics it covers, and searches without topics only if it covers all
    topics. With the right `redrive`, it may save, replace and delete those that it sees.
    """

    _mailbox: Mailbox
    _guard: Guard
    _auditor: Auditor

    @audit_refusals(Right.READ_HEADERS)
    async def list_searches(self) -> list[SearchReport]:
        await self._guard.check(Right.READ_HEADERS)
        self._guard.charge()
        return [each for each in await self._mailbox.list_searches() if self._covers_search(each.topics)]

    async def _save_search(self, operation: Operation, arguments: Arguments) -> SearchReport:
        """Save a search in the name of the capability's principal."""
        topics = topics_of_query(arguments["query"])

        async def save() -> SearchReport:
            await self._check_change(topics)
            named = {**arguments, "principal": self._guard.access.principal}
            report: SearchReport = await operation.ask(self._mailbox, named)
            return report

        return await self._auditor.run(
            Right.REDRIVE, save, lambda _: 0, topics=topics, criteria=(operation.name,)
        )

    async def _delete_search(self, operation: Operation, arguments: Arguments) -> None:
        """Delete a search; for an unknown search the answer is the same as for one on other topics."""
        id_ = arguments["search_id"]

        async def delete() -> None:
            await self._guard.check(Right.REDRIVE)
            searches = {each.search_id: each for each in await self._mailbox.list_searches()}
            if not self._guard.covers_all_topics and id_ not in searches:
                raise uncovered_topic()
            await self._check_change(searches[id_].topics if id_ in searches else ())
            try:
                await operation.ask(self._mailbox, arguments)
            except NotFound:
                if self._guard.covers_all_topics:
                    raise
                raise uncovered_topic() from None

        await self._auditor.run(Right.REDRIVE, delete, lambda _: 0, target=id_, criteria=(operation.name,))

    async def _check_change(self, topics: tuple[str, ...] | list[str]) -> None:
        await self._guard.check(Right.REDRIVE)
        if not self._covers_search(topics):
            raise uncovered_topic()
        self._guard.charge()

    def _covers_search(self, topics: tuple[str, ...] | list[str]) -> bool:
        """Return whether the capability covers all topics that a search names, or all if it names none."""
        if self._guard.covers_all_topics:
            return True
        return bool(topics) and all(map(self._guard.covers, topics))


CRITERIA = {
    "redrive_dead_letters": "redrive",
    "purge_topic": "purge",
    "set_topic_policy": "policy",
    "pause_topic": "pause",
    "resume_topic": "resume",
}
"""Names of changes of topics in the audit log, where they differ from the operations' names."""


@derive(Mailbox)
class AuthorizedMailbox(AuthorizedSettlements, AuthorizedRedrives, AuthorizedSearches, AuthorizedReads):
    """`Mailbox` that checks each call against a capability before the mailbox itself gets it.

    A capability that is limited to topics gets one answer, Forbidden, for unknown messages and for messages
    of other topics. Messages that it received can be acked and nacked after it has expired or was revoked,
    until the visibility timeout ends. Acks and nacks are not charged to quotas.

    Changes are audited, and so are refusals. Sends, receives and settlements leave events in the log of the
    mailbox; settlements of a message that another capability received are audited, too.

    Arguments:
        mailbox: the mailbox, which permits everything.
        deliveries, windows: of all capabilities on the mailbox.
        wall: the wall clock in µs since 1970 UTC.
        search: searches the messages that the capability covers.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        guard: Guard,
        auditor: Auditor,
        deliveries: Deliveries,
        windows: DeliveryWindows,
        wall: Callable[[], int],
        search: Search,
    ) -> None:
        super().__init__(mailbox, guard, auditor, search)
        access = guard.access
        topics = () if guard.covers_all_topics else access.topics
        self.caller = Caller(access.principal, access.nonce.hex(), topics)
        self._deliveries = deliveries
        self._wall = wall
        self._windows = windows

    @property
    def name(self) -> str:
        """Return the name of the mailbox."""
        return self._mailbox.name

    @audit_refusals(Right.SEND)
    async def send_message(self, message: NewMessage, /) -> Sent:
        await self._guard.check(Right.SEND)
        if isinstance(message, NewMessage):
            message = self._begin_send(message)
        with call_as(self.caller):
            return await self._mailbox.send_message(message)

    @audit_refusals(Right.SEND)
    async def send_batch(self, messages: Sequence[NewMessage], /) -> list[Sent | Rejected]:
        """Send messages; those that are not covered are refused alone; see `Mailbox.send_batch`."""
        await self._guard.check(Right.SEND)
        items = list(check_items("messages", messages))
        most = self._guard.at_most(len(items))
        answers: list[Sent | Rejected | None] = [None] * len(items)
        for index, item in enumerate(items):
            try:
                if index >= most:
                    raise Forbidden(f"The capability covers {most} messages a call; send fewer.", "messages")
                if isinstance(item, NewMessage):
                    items[index] = self._begin_send(item)
            except Rejected as refusal:
                answers[index] = refusal
        allowed = [item for item, answer in zip(items, answers, strict=True) if answer is None]
        forbidden = [item for item, each in zip(items, answers, strict=True) if isinstance(each, Forbidden)]
        if forbidden:
            topics = topics_of(forbidden)
            await self._auditor.record(Right.SEND, Forbidden.code, len(forbidden), topics=topics)
        with call_as(self.caller):
            results = iter(await self._mailbox.send_batch(cast(list[NewMessage], allowed)) if allowed else ())
        return [next(results) if answer is None else answer for answer in answers]

    @audit_refusals(Right.RECV)
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
        await self._guard.check(Right.RECV)
        topics = self._check_topics(topic)
        self._guard.charge()
        with call_as(self.caller):
            received = await self._mailbox.receive_messages(
                topics,
                max_messages=self._guard.at_most(max_messages),
                max_bytes=max_bytes,
                visibility_ms=visibility_ms,
                consumer=consumer,
                wait_ms=wait_ms,
            )
        if received and wait_ms and not await self._guard.is_valid():
            # It became invalid during the wait, so others get the messages.
            await self._mailbox.nack_messages(
                [each.receipt for each in received], reason="the capability became invalid", delay_ms=0
            )
            self._guard.check_validity()
        messages = [ReceivedMessage(each.delivery, self) for each in received]
        self._deliveries.add(self._guard.access.nonce, messages, self._wall())
        self._guard.count_bytes(len(each.delivery.envelope) for each in messages)
        return messages

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
        """Receive messages for the length of a context; see `Mailbox.stream_messages`.

        When the capability expires or is revoked, the stream ends; its deliveries can still be settled.
        """
        stream = StreamMessages(self._receive_for_stream, self._return_messages, self._windows)
        return stream(
            topic,
            max_messages=self._guard.at_most(max_messages),
            max_bytes=max_bytes,
            visibility_ms=visibility_ms,
            consumer=consumer,
            heartbeat_ms=heartbeat_ms,
            wait_ms=wait_ms,
        )

    @audit_refusals(Right.RECV)
    async def _report_worker(self, operation: Operation, arguments: Arguments) -> None:
        """Report a worker of the capability, with its handlers of covered topics."""
        await self._guard.check(Right.RECV)
        self._guard.charge()
        worker = arguments["worker"]
        own = tuple(each for each in worker.handlers if self._guard.covers(each.topic))
        changes = {
            "worker": msgspec.structs.replace(worker, handlers=own),
            "principal": self._guard.access.principal,
        }
        await operation.ask(self._mailbox, {**arguments, **changes})

    async def _call(self, operation: Operation, arguments: Arguments) -> Any:
        """Make a call of an operation that needs no more than its right, and its topic if it names one."""
        topic = arguments.get("topic")
        if operation.right not in (Right.ADMIN, Right.REDRIVE):
            return await self._read(topic, operation, arguments)
        if "limit" in arguments:
            arguments = {**arguments, "limit": self._guard.at_most(arguments["limit"])}
        if "principal" in arguments:
            arguments = {**arguments, "principal": self._guard.access.principal}
        change = partial(operation.ask, self._mailbox, arguments)
        name = CRITERIA.get(operation.name, operation.name)
        if topic is not None:
            return await self._change_topic(operation.right, topic, change, name)
        fields: Mapping[str, Sequence[str]] | None = None
        if "changes" in arguments:
            fields = _fields_of(arguments["changes"])
        elif "name" in arguments:  # of a subscription or schedule
            fields = {arguments["name"]: ("dry_run",) if arguments.get("dry_run") else ()}
        return await self._change_mailbox(change, name, fields, is_whole=arguments.get("replace", False))

    async def _change_mailbox(
        self,
        change: Callable[[], Awaitable[Any]],
        name: str,
        fields: Mapping[str, Sequence[str]] | None,
        *,
        is_whole: bool,
    ) -> Any:
        """Make a change of the mailbox, and record it with the settings or the subscription that it names.

        Arguments:
            fields: names of the changed settings by the topic or glob of their section, "" for the mailbox's
                own; for a subscription, its name with no fields, or with `dry_run`.
            is_whole: whether the change concerns the whole mailbox, whatever it names.
        """

        async def run() -> Any:
            await self._guard.check(Right.ADMIN)
            self._guard.check_all_topics()
            self._guard.charge()
            return await change()

        topics = [] if fields is None or is_whole or "" in fields else [*fields]
        names = [each for section in (fields or {}).values() for each in section]
        return await self._auditor.run(
            Right.ADMIN,
            run,
            lambda _: 0,
            topics=topics,
            target="" if topics else self.name,
            criteria=(name, *names[:MAX_TOPICS]),
        )

    async def _change_topic(
        self, right: Right, topic: str, change: Callable[[], Awaitable[Any]], name: str
    ) -> Any:
        """Make a change of one topic that the capability covers, and record it."""

        async def run() -> Any:
            await self._guard.check(right)
            self._check_topics(topic)
            self._guard.charge()
            try:
                return await change()
            except NotFound:
                if self._guard.covers_all_topics:
                    raise
                # The mailbox's error would suggest the names of other topics.
                summaries = await self._mailbox.list_topics()
                own = {each.topic for each in summaries if self._guard.covers(each.topic)}
                raise unknown_topic(topic, self.name, own) from None

        return await self._auditor.run(right, run, _count, topics=(topic,), criteria=(name,))

    def _begin_send(self, message: NewMessage) -> NewMessage:
        """Check and charge a send; return the message as the capability sends it."""
        self._check_topics([message.topic])
        access = self._guard.access
        if access.binds_principal and message.principal != access.principal:
            if message.principal:
                raise Forbidden(
                    f"The capability sends in the name of its principal {access.principal} only; leave the "
                    "principal of the message out.",
                    "principal",
                )
            message = msgspec.structs.replace(message, principal=access.principal)
        if self._guard.has_quotas:
            self._guard.charge(1, _size(message))
        return message

    def _check_topics(self, topic: object) -> list[str]:
        """Return topics that are covered; for a capability of all topics, the mailbox checks their names."""
        topics: list[object] = [topic] if isinstance(topic, str) else check_items("topic", topic)
        if not self._guard.covers_all_topics:
            # The exact type, as a subclass of str could match any glob.
            self._guard.check_topics([check_topic(each) for each in topics])
        return topics  # type: ignore[return-value] # the mailbox refuses others

    async def _receive_for_stream(
        self, topic: Sequence[str], *, is_stream: bool, **options: int | str | None
    ) -> list[ReceivedMessage]:
        return await self.receive_messages(topic, **options)  # type: ignore[arg-type] # options of StreamMessages


def _count(result: object) -> int:
    return result if type(result) is int else 0


def _fields_of(changes: SettingsChanges) -> dict[str, Sequence[str]]:
    """Return the names of the settings that are changed by the section's topic, "" for the mailbox itself."""
    own = [f"limits.{each}" for each in MailboxLimits.__struct_fields__ if each in changes.limits]
    own += [f"policy.{each}" for each in TopicPolicy.__struct_fields__ if each in changes.default_policy]
    sections: dict[str, Sequence[str]] = {"": own} if own else {}
    sections |= {each: (f"topics.{each}",) for each in (*changes.topics, *changes.labels)}
    return sections | {each: (f"erasure.topics.{each}",) for each in changes.subject_policies}


def _size(message: NewMessage) -> int:
    """Return the bytes of a message's payload, attributes and headers; the mailbox refuses other types."""
    values: list[object] = [getattr(message, name) for name in message.__struct_fields__]
    attrs: object = message.attrs
    if isinstance(attrs, Mapping):
        values += [*attrs, *attrs.values()]
    return sum(map(_bytes_of, values))


def _bytes_of(value: object) -> int:
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode(errors="surrogatepass"))
    return len(value) if isinstance(value, bytes) else 0
