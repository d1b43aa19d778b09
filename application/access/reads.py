"""`AuthorizedReads`: the queries of a mailbox as the bearer of one capability may use them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from postroom.application.access.audit import Auditor, audit_refusals, topics_of
from postroom.application.access.guard import Guard
from postroom.application.caller import Caller, call_as
from postroom.application.operations.mailbox import OPERATIONS, Mailbox
from postroom.application.operations.operation import Arguments, Operation
from postroom.application.page import Page
from postroom.application.query_results import (
    Backlog,
    DeadLetter,
    Explanation,
    MessageDetail,
    Moment,
    PeekedMessage,
)
from postroom.application.reports import ConsumerReport, ScheduleReport, SubscriptionReport, TopicReport
from postroom.application.service import Search
from postroom.application.worker_reports import WorkerReport
from postroom.domain.arguments import check_text
from postroom.domain.capability.access import uncovered_topic
from postroom.domain.capability.rights import Right
from postroom.domain.envelope.build import without_payload
from postroom.domain.errors import NotFound
from postroom.domain.mailbox.counts import TopicSummary
from postroom.domain.search import EventFilter, FoundMessage

READ_HEADERS, READ_PAYLOAD = Right.READ_HEADERS, Right.READ_PAYLOAD
PAGE = 1_000
"""Number of past dead letters that are read at a time to find the ones of covered topics."""


class AuthorizedReads(Mailbox):
    """The queries of `AuthorizedMailbox`; reads of messages, reads of errors, and refusals are audited.

    Answers about all topics contain only those that the capability covers.
    """

    caller: Caller

    def __init__(self, mailbox: Mailbox, guard: Guard, auditor: Auditor, search: Search) -> None:
        self._mailbox = mailbox
        self._guard = guard
        self._auditor = auditor
        self._search = search

    async def search_messages(self, filter_: EventFilter, /) -> Page[FoundMessage]:
        return await self._search(filter_)

    async def _get_message(self, operation: Operation, arguments: Arguments) -> Any:
        return await self._read_message(operation, arguments, READ_HEADERS, READ_PAYLOAD)

    async def _wait_for_result(self, operation: Operation, arguments: Arguments) -> Any:
        return await self._read_message(operation, arguments, READ_HEADERS, READ_PAYLOAD)

    async def _explain_message(self, operation: Operation, arguments: Arguments) -> Any:
        return await self._read_message(operation, arguments, READ_HEADERS)

    async def read_headers(self, id_: str, /) -> MessageDetail:
        """Return a message with its history, and its envelope without the payload.

        Raises: as `get_message`, but the right to read payloads is not needed.
        """
        operation = OPERATIONS["get_message"]
        detail: MessageDetail = await self._read_message(operation, operation.bind(id_), READ_HEADERS)
        return detail

    async def _read_message(self, operation: Operation, arguments: Arguments, *rights: Right) -> Any:
        """Return the answer about one message, without the payload unless the rights cover it."""

        async def read() -> Any:
            await self._guard.check(*rights)
            self._guard.charge()
            with self._hidden_absence(), call_as(self.caller):
                answer = await operation.ask(self._mailbox, arguments)
            self._guard.check_topics([answer.topic])
            if arguments.get("wait_ms") and not await self._guard.is_valid():
                self._guard.check_validity()  # it became invalid during the wait
            if isinstance(answer, Explanation):
                return answer
            sizes = [] if answer.result is None else [len(answer.result.payload)]
            if isinstance(answer, MessageDetail):
                sizes.append(len(answer.traceback or ""))
                item = answer.item
                if READ_PAYLOAD not in rights:
                    item = replace(item, envelope_blob=without_payload(item.envelope_blob))
                    answer, sizes = replace(answer, item=item, result=None, traceback=None), []
                sizes.append(len(item.envelope_blob))
            self._guard.count_bytes(sizes)
            return answer

        return await self._auditor.run(rights[-1], read, lambda _: 1, target=arguments["id_"])

    async def _peek_messages(self, operation: Operation, arguments: Arguments) -> list[PeekedMessage]:
        topic, most = arguments["topic"], self._guard.at_most(arguments["limit"])

        async def peek() -> list[PeekedMessage]:
            await self._guard.check(READ_HEADERS, READ_PAYLOAD)
            self._guard.check_topics([topic])
            self._guard.charge()
            messages = await self._mailbox.peek_messages(topic, limit=most)
            self._guard.count_bytes(len(each.payload or b"") for each in messages)
            return messages

        return await self._auditor.run(READ_PAYLOAD, peek, len, topics=(topic,))

    @audit_refusals(READ_HEADERS)
    async def get_backlog(self, topic: str | None = None, /, *, at: Moment | None = None) -> Backlog:
        await self._begin_read(topic)
        backlog = await self._mailbox.get_backlog(topic, at=at)
        if self._guard.covers_all_topics:
            return backlog
        return msgspec.structs.replace(
            backlog,
            archived=0,  # counted over all topics
            shards=[each for each in backlog.shards if self._guard.covers(each.topic)],
            paused_topics=[each for each in backlog.paused_topics if self._guard.covers(each)],
        )

    async def _list_dead_letters(self, operation: Operation, arguments: Arguments) -> Page[DeadLetter]:
        return await self._auditor.run(
            READ_HEADERS,
            partial(self._read_dead_letters, **arguments),
            lambda page: len(page.items),
            topics=topics_of(arguments["topic"]),
            criteria=("dead_letters",),
        )

    async def _read_dead_letters(
        self, *, topic: str | None, limit: int, cursor: str | None, at: Moment | None, **criteria: Any
    ) -> Page[DeadLetter]:
        await self._begin_read(topic)
        read = partial(self._mailbox.list_dead_letters, at=at, **criteria)
        if topic is not None or self._guard.covers_all_topics:
            return await read(topic, limit=limit, cursor=cursor)
        letters, is_cut = list[DeadLetter](), False
        if at is None:
            for each in await self._mailbox.list_topics():
                if each.dead and self._guard.covers(each.topic):
                    page = await read(each.topic, limit=limit, cursor=cursor)
                    letters += page.items
                    is_cut = is_cut or page.next_cursor is not None
            letters.sort(key=lambda letter: letter.position)
        else:  # the topics of the past are not listed
            is_last = False
            while len(letters) <= limit and not is_last:
                page = await read(limit=PAGE, cursor=cursor)
                letters += [each for each in page.items if self._guard.covers(each.topic)]
                cursor, is_last = page.next_cursor, page.next_cursor is None
        more = is_cut or len(letters) > limit
        return Page(tuple(letters[:limit]), str(letters[limit - 1].position) if more else None)

    @audit_refusals(READ_HEADERS)
    async def _read(self, topic: str | None, operation: Operation, arguments: Arguments) -> Any:
        """Return the answer of a query about one topic, or about the mailbox with all its topics."""
        await self._begin_read(topic, operation.right)
        if topic is None:
            self._guard.check_all_topics()
        return await operation.ask(self._mailbox, arguments)

    @audit_refusals(READ_HEADERS)
    async def list_topics(self) -> list[TopicSummary]:
        await self._begin_read(None)
        return [each for each in await self._mailbox.list_topics() if self._guard.covers(each.topic)]

    async def _describe_topic(self, operation: Operation, arguments: Arguments) -> TopicReport:
        topic = arguments["topic"]

        async def describe() -> TopicReport:
            await self._begin_read(topic)
            report: TopicReport = await operation.ask(self._mailbox, arguments)
            own = [each for each in report.subscriptions if self._guard.covers(each)]
            return replace(report, subscriptions=own)

        return await self._auditor.run(
            READ_HEADERS, describe, lambda _: 0, topics=(topic,), criteria=("describe_topic",)
        )

    async def _list_consumers(self, operation: Operation, arguments: Arguments) -> list[ConsumerReport]:
        async def read() -> list[ConsumerReport]:
            await self._begin_read(None)
            every = self._guard.covers_all_topics
            consumers = await self._mailbox.list_consumers()
            return [each for each in consumers if every or (each.topic and self._guard.covers(each.topic))]

        return await self._auditor.run(READ_HEADERS, read, lambda _: 0, criteria=("list_consumers",))

    @audit_refusals(READ_HEADERS)
    async def list_workers(self) -> list[WorkerReport]:
        """Return the workers with their handlers of covered topics; see `Mailbox.list_workers`."""
        await self._begin_read(None)
        workers = await self._mailbox.list_workers()
        if self._guard.covers_all_topics:
            return workers
        handlers = ([own for own in each.handlers if self._guard.covers(own.topic)] for each in workers)
        return [replace(each, handlers=own) for each, own in zip(workers, handlers, strict=True) if own]

    @audit_refusals(READ_HEADERS)
    async def list_subscriptions(self) -> list[SubscriptionReport]:
        await self._begin_read(None)
        return [each for each in await self._mailbox.list_subscriptions() if self._guard.covers(each.name)]

    @audit_refusals(READ_HEADERS)
    async def list_schedules(self) -> list[ScheduleReport]:
        await self._begin_read(None)
        return [each for each in await self._mailbox.list_schedules() if self._guard.covers(each.topic)]

    async def _begin_read(self, topic: str | None, right: Right = READ_HEADERS) -> None:
        await self._guard.check(right)
        if topic is not None:
            self._guard.check_topics(_check_topics([topic]))
        self._guard.charge()

    @contextmanager
    def _hidden_absence(self) -> Iterator[None]:
        """Answer for an unknown message as for one of another topic, so that ids can't be probed."""
        try:
            yield
        except NotFound:
            if self._guard.covers_all_topics:
                raise
            raise uncovered_topic() from None


def _check_topics(topics: Sequence[object]) -> list[str]:
    """Return topics whose type is checked, as a subclass of str could match any glob."""
    return [check_text("topic", each) for each in topics]
