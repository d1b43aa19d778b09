"""Tools of the read models and of the log: groups of dead letters, simulated policies, reports."""

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from postroom.adapters.mcp.answers import Answer, answer_page, answer_rows, answer_value
from postroom.adapters.mcp.settings import ReportQuery
from postroom.adapters.mcp.tools import Call, Tool, paged
from postroom.application.access.search import read_dead_letters
from postroom.application.operations import query_contract
from postroom.application.page import Page
from postroom.application.ports.dead_letters import DeadLetterGroupFilter, DeadLetterGroupPage
from postroom.application.queries.query_answers import to_group_filter, to_groups
from postroom.application.queries.simulate_policy import Replay, SimulatePolicy
from postroom.application.threads import in_query_thread
from postroom.domain.capability.access import uncovered_topic
from postroom.domain.capability.rights import Right
from postroom.domain.errors import InvalidRequest, NotFound, Saturated
from postroom.domain.policy import Changes

RETRY_MS: Final = 2_000
_GROUPS: Final = """\
Group the dead letters in the read models by error, topic or reason, with trends.

Arguments:
    topics: names or globs such as `orders.*`.
    since, until: RFC 3339, or ms since 1970 UTC; dead-lettered at or after `since`, and before `until`.
    text: part of the last error.
    by: what the dead letters of a group have in common: some of `fingerprint`, `topic` and `reason`.
    order: `latest`: the group with the last dead-lettering first; `largest`: the one with the most.
    bars: number of bars of the trends; 0 for none."""
_SIMULATION: Final = """\
Replay the latest events of the log under another retry policy, and compare the outcomes.

Fields of the policy that are left out stay as they were. Nothing is changed."""


def analysis_tools() -> list[Tool]:
    """Return the tools."""
    busy = _Busy()
    groups, reports = paged(query_contract.DeadLetterGroupsQuery, bars=0), paged(ReportQuery)
    simulate, report = partial(_simulate, busy), partial(_report, busy)
    return [
        Tool("group_dead_letters", Right.READ_HEADERS, _GROUPS, groups, _group),
        Tool("simulate_policy", Right.READ_HEADERS, _SIMULATION, _SimulationRequest, simulate),
        Tool("report", Right.READ_HEADERS, inspect.getdoc(ReportQuery) or "", reports, report),
    ]


async def _group(call: Call, asked: Any) -> Answer:
    query = query_contract.DeadLetterGroupsQuery(
        **{each: getattr(asked, each) for each in asked.__struct_fields__}
    )

    async def read(filter_: DeadLetterGroupFilter) -> DeadLetterGroupPage:
        if call.service.groups is None:
            raise NotFound("The mailbox is in memory, without the read models that groups are read from.")
        return await call.service.groups(filter_)

    async def ask(limit: int) -> Page[Any]:
        page = await read_dead_letters(
            call.session,
            msgspec.structs.replace(to_group_filter(query), limit=limit),
            read,
            DeadLetterGroupPage(()),
            lambda page: page.letters,
            "dead_letter_groups",
        )
        return Page(tuple(to_groups(page).items), page.next_cursor)

    return await answer_page("groups", ask, call.sources.mask, asked.limit)


class _SimulationRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    topic: Annotated[str, Meta(max_length=255)] | None = None
    max_attempts: int | None = None
    backoff_base_ms: int | None = None
    backoff_max_ms: int | None = None
    visibility_ms: int | None = None
    events: Annotated[int, Meta(ge=1, le=100_000, description="Number of the latest events.")] = 5_000


class _Busy:
    """Guard that runs one expensive query at a time in a server."""

    def __init__(self) -> None:
        self.is_set = False

    async def run(self, query: Callable[[], Any]) -> Any:
        """Return the result of a query that blocks; raise Saturated while another one runs."""
        if self.is_set:
            raise Saturated("Another report or simulation is running; try again in a few seconds.", RETRY_MS)
        self.is_set = True
        try:
            return await in_query_thread(query)
        finally:
            self.is_set = False


async def _simulate(busy: _Busy, call: Call, asked: _SimulationRequest) -> Answer:
    changes = Changes(**{each: getattr(asked, each) for each in Changes.__struct_fields__})
    if changes == Changes():
        raise InvalidRequest(f"Change the policy by some of {', '.join(Changes.__struct_fields__)}.")
    log = call.sources.log
    if log is None:
        raise NotFound("The log of this mailbox is not readable from this process, so it can't be replayed.")
    topics = (asked.topic,) if asked.topic else ()
    read = partial(SimulatePolicy(log).replay_latest, changes, asked.events, topics)
    replay: Replay = await _audited(call, asked.topic, "simulation", lambda: busy.run(read))
    return answer_value(replay._asdict(), call.sources.mask)


async def _report(busy: _Busy, call: Call, asked: Any) -> Answer:
    report = call.sources.report
    if report is None:
        raise NotFound("The mailbox is in memory, without the store that reports are made from.")
    query = ReportQuery(**{each: getattr(asked, each) for each in ReportQuery.__struct_fields__})
    rows = await _audited(
        call, query.topic, f"report.{query.report}", lambda: busy.run(partial(report, query))
    )
    return answer_rows("rows", list(rows), call.sources.mask, asked.limit, asked.cursor)


async def _audited(call: Call, topic: str | None, criterion: str, read: Callable[[], Awaitable[Any]]) -> Any:
    """Return the result of a query on a topic, or on all; refuse topics that the caller may not see."""
    grant = call.session.grant

    async def run() -> Any:
        await grant.check(Right.READ_HEADERS)
        if not grant.covers_all_topics and not (topic and grant.covers(topic)):
            if topic:
                raise uncovered_topic()
            raise InvalidRequest("Name a topic: the capability is limited to topics.")
        return await read()

    return await call.session.audit(
        Right.READ_HEADERS, run, lambda _: 0, topics=(topic,) if topic else (), criteria=(criterion,)
    )
