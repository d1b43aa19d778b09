"""Handlers of queries, operators' calls, and the state of the service."""

import msgspec

from postroom.adapters.http_server.routes import CLOSE, Call, Reply, json_reply
from postroom.adapters.prometheus.text import write_metrics
from postroom.application import query_results
from postroom.application.access.search import read_dead_letters
from postroom.application.error_reference import find_error_entry, write_error_entry
from postroom.application.operations import contract, query_contract
from postroom.application.operations.mailbox import OPERATIONS
from postroom.application.outbox.events import RecordedMessages
from postroom.application.page import read_position
from postroom.application.ports.dead_letters import (
    DeadLetterGroupFilter,
    DeadLetterGroupPage,
)
from postroom.application.queries.query_answers import to_filter, to_group_filter, to_groups, to_item
from postroom.application.service import Service
from postroom.domain.capability.rights import Right
from postroom.domain.envelope.build import without_auth_token
from postroom.domain.errors import NotFound, PostroomError

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
        page = await call.session.search(to_filter(query, call.mailbox.name))
        return json_reply(query_contract.Items([to_item(each) for each in page.items], page.next_cursor))

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
        page = await read_dead_letters(
            call.session,
            to_group_filter(query),
            self._read_groups,
            DeadLetterGroupPage(()),
            lambda page: page.letters,
            "dead_letter_groups",
        )
        return json_reply(to_groups(page))

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
        """Report that the process answers."""
        return json_reply(contract.Ok(), headers=(CLOSE,))

    async def readyz(self, call: Call) -> Reply:
        """Report whether the mailbox can be used, and whether it takes messages (svc-mailbox P-2)."""
        missing = ["service"] if self._service.stopping.is_set() else []
        try:
            await self._service.mailbox.get_topic_policy("any")  # reads only memory
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

    async def error(self, call: Call) -> Reply:
        """Explain an error code."""
        text = write_error_entry(*find_error_entry(call.path["code"]))
        return Reply(text.encode(), content_type=b"text/plain; charset=utf-8")

    async def info(self, call: Call) -> Reply:
        """Return the name of the mailbox."""
        return json_reply(query_contract.Info(self._service.mailbox.name, self._service.dlq_profile))
