"""Handlers of queries, operators' calls, and the state of the service."""

from datetime import datetime

import msgspec

from postroom.adapters.http_server.routes import CLOSE, Call, Reply, json_reply
from postroom.adapters.prometheus.text import write_metrics
from postroom.application import query_results
from postroom.application.access.search import read_dead_letters
from postroom.application.messages import rfc3339
from postroom.application.operations import contract, query_contract
from postroom.application.operations.mailbox import OPERATIONS
from postroom.application.outbox.events import RecordedMessages
from postroom.application.page import read_position
from postroom.application.ports.dead_letters import (
    DEFAULT_GROUP,
    DeadLetter,
    DeadLetterGroupFilter,
    DeadLetterGroupPage,
)
from postroom.application.queries.mailbox_past import to_us
from postroom.application.service import Service
from postroom.domain.capability.rights import Right
from postroom.domain.envelope.build import without_auth_token
from postroom.domain.errors import NotFound, PostroomError
from postroom.domain.search import EventFilter, FoundMessage, Order, parse_status

MS = 1_000


class Backlog(query_results.Backlog, frozen=True):
    """Unsettled messages by topic and shard, and messages that transactions recorded but no owner has sent.

    Arguments:
        outboxes: for callers of all topics who ask for all topics and for now; otherwise empty.
    """

    outboxes: list[RecordedMessages] = msgspec.field(default_factory=list)


class QueryHandlers:
    """Handlers of searches, of the read models and of messages' details."""

    def __init__(self, service: Service) -> None:
        self._dlq_profile = service.dlq_profile
        self._groups = service.groups
        self._outboxes = service.outboxes

    async def search(self, call: Call) -> Reply:
        """Return a page of the messages of this mailbox that match (RFC-037 `QueryEvents`)."""
        query: query_contract.MessagesQuery = call.query
        fields = msgspec.structs.asdict(query)
        for name in ("start_time", "end_time"):
            if fields[name] is not None and not isinstance(fields[name], int):
                fields[name] = to_us(fields[name]) // MS
        page = await call.session.search(
            EventFilter(
                **fields
                | {
                    "topics": tuple(query.topics),
                    "principals": tuple(query.principals),
                    "statuses": tuple(parse_status(each) for each in query.statuses),
                    "order": Order(query.order),
                    "mailbox": call.mailbox.name,
                    "envelopes": False,
                }
            )
        )
        return json_reply(query_contract.Items([_item(each) for each in page.items], page.next_cursor))

    async def get_message(self, call: Call) -> Reply:
        """Return a message with its history."""
        detail = await call.mailbox.get_message(call.path["msg_id"])
        facts = {name: getattr(detail, name) for name in detail.__struct_fields__}
        facts["item"] = {
            name: getattr(detail.item, name)
            for name in detail.item.__struct_fields__
            if name != "envelope_blob"
        }
        return json_reply(
            query_contract.Detail(**facts, envelope_b64=without_auth_token(detail.item.envelope_blob))
        )

    async def backlog(self, call: Call) -> Reply:
        """Count unsettled messages, and for callers of all topics those that transactions recorded."""
        topic, at = call.query.topic, call.query.at
        backlog = await call.mailbox.get_backlog(topic, at=at)
        fields = {name: getattr(backlog, name) for name in backlog.__struct_fields__}
        if self._outboxes is not None and topic is at is None and call.session.grant.covers_all_topics:
            counted = await self._outboxes.count_messages()
            fields["outboxes"] = [each for each in counted if each.mailbox or each.problem]
        return json_reply(Backlog(**fields))

    async def dead_letters(self, call: Call) -> Reply:
        """Return a page of dead letters."""
        query = msgspec.structs.asdict(call.query)
        if query["cursor"] is not None:  # cursors are numbers in this contract
            query["cursor"] = str(query["cursor"])
        page = await OPERATIONS["list_dead_letters"].ask(call.mailbox, query)
        return json_reply(
            query_contract.DeadLetters([*page.items], read_position(page.next_cursor), self._dlq_profile)
        )

    async def dead_letter_groups(self, call: Call) -> Reply:
        """Return a page of groups of dead letters."""
        query: query_contract.DeadLetterGroupsQuery = call.query
        fields = msgspec.structs.asdict(query)
        filter_ = DeadLetterGroupFilter(
            **fields
            | {
                "topics": tuple(query.topics),
                "by": tuple(query.by) or DEFAULT_GROUP,
                "since": _to_us(query.since),
                "until": _to_us(query.until),
            }
        )
        page = await read_dead_letters(
            call.session,
            filter_,
            self._read_groups,
            DeadLetterGroupPage(()),
            lambda page: page.letters,
            "dead_letter_groups",
        )
        return json_reply(_groups(page))

    async def _read_groups(self, filter_: DeadLetterGroupFilter) -> DeadLetterGroupPage:
        if self._groups is None:
            raise NotFound("The mailbox is in memory, without the read models that groups are read from.")
        return await self._groups(filter_)

    async def topics(self, call: Call) -> Reply:
        """List the topics."""
        return json_reply(query_contract.Topics(await call.mailbox.list_topics(), self._dlq_profile))


class StateHandlers:
    """Handlers of health, readiness, metrics and the contract."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.contract = b""

    async def healthz(self, call: Call) -> Reply:
        """Tell that the process answers."""
        return json_reply(contract.Ok(), headers=(CLOSE,))

    async def readyz(self, call: Call) -> Reply:
        """Tell whether the mailbox can be used, and whether it takes messages (svc-mailbox P-2)."""
        missing = ["service"] if self._service.stopping.is_set() else []
        try:
            await self._service.mailbox.get_topic_policy("any")  # reads the state in memory
        except PostroomError:
            missing.append("mailbox")
        writes = self._service.writes.takes_writes and not missing
        ready = query_contract.Ready(not writes, missing, writes)
        return json_reply(ready, 503 if missing else 200, (CLOSE,))

    async def metrics(self, call: Call) -> Reply:
        """Return the metrics."""
        if call.caller is not None:
            call.caller.require(Right.READ_HEADERS)
        accept = call.headers.get(b"accept", b"").decode("latin-1")
        text, content_type = write_metrics(await self._service.metrics.collect(), accept)
        return Reply(text, content_type=content_type.encode())

    async def openapi(self, call: Call) -> Reply:
        """Return the contract."""
        return Reply(self.contract)

    async def info(self, call: Call) -> Reply:
        """Return the name of the mailbox."""
        return json_reply(query_contract.Info(self._service.mailbox.name, self._service.dlq_profile))


def _to_us(moment: int | datetime | None) -> int | None:
    """Return a time in µs; numbers are in ms."""
    return None if moment is None else moment * MS if isinstance(moment, int) else to_us(moment)


def _groups(page: DeadLetterGroupPage) -> query_contract.DeadLetterGroups:
    return query_contract.DeadLetterGroups(
        [
            query_contract.DeadLetterGroup(
                each.topic,
                each.reason,
                each.fingerprint,
                each.count,
                rfc3339(each.first_seen) or "",
                rfc3339(each.last_seen) or "",
                list(each.trend),
                _sample(each.sample),
            )
            for each in page.items
        ],
        page.letters,
        page.groups,
        rfc3339(page.since),
        rfc3339(page.start) if page.items and page.items[0].trend else None,
        page.width,
        page.next_cursor,
    )


def _sample(letter: DeadLetter) -> query_contract.DeadLetterSample:
    facts = {name: getattr(letter, name) for name in query_contract.DeadLetterSample.__struct_fields__}
    times = {name: rfc3339(facts[name]) or "" for name in ("first_seen", "last_seen")}
    return query_contract.DeadLetterSample(**facts | times)


def _item(message: FoundMessage) -> query_contract.Item:
    facts = {name: getattr(message, name) for name in query_contract.Item.__struct_fields__}
    return query_contract.Item(**facts | {"status": message.status.name.lower()})
