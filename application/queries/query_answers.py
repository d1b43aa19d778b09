"""Filters for the queries that surfaces are asked, and answers of surfaces from their results."""

from datetime import datetime

import msgspec

from postroom.application.messages import rfc3339
from postroom.application.operations.query_contract import (
    DeadLetterGroup,
    DeadLetterGroups,
    DeadLetterGroupsQuery,
    DeadLetterSample,
    Item,
    MessagesQuery,
)
from postroom.application.ports.dead_letters import (
    DEFAULT_GROUP,
    DeadLetter,
    DeadLetterGroupFilter,
    DeadLetterGroupPage,
)
from postroom.application.queries.mailbox_past import to_us
from postroom.domain.message import MS
from postroom.domain.search import EventFilter, FoundMessage, Order, parse_status


def to_filter(query: MessagesQuery, mailbox: str) -> EventFilter:
    """Return the filter of a search without envelopes; raises InvalidRequest."""
    fields = msgspec.structs.asdict(query)
    for name in ("start_time", "end_time"):
        if fields[name] is not None and not isinstance(fields[name], int):
            fields[name] = to_us(fields[name]) // MS
    return EventFilter(
        **fields
        | {
            "topics": tuple(query.topics),
            "principals": tuple(query.principals),
            "statuses": tuple(parse_status(each) for each in query.statuses),
            "order": Order(query.order),
            "mailbox": mailbox,
            "envelopes": False,
        }
    )


def to_item(message: FoundMessage) -> Item:
    """Return a message that a search found."""
    facts = {name: getattr(message, name) for name in Item.__struct_fields__}
    return Item(**facts | {"status": message.status.name.lower()})


def to_group_filter(query: DeadLetterGroupsQuery) -> DeadLetterGroupFilter:
    """Return the filter of groups of dead letters; raises InvalidRequest."""
    return DeadLetterGroupFilter(
        **msgspec.structs.asdict(query)
        | {
            "topics": tuple(query.topics),
            "by": tuple(query.by) or DEFAULT_GROUP,
            "since": moment_us(query.since),
            "until": moment_us(query.until),
        }
    )


def to_groups(page: DeadLetterGroupPage) -> DeadLetterGroups:
    """Return a page of groups of dead letters."""
    return DeadLetterGroups(
        [
            DeadLetterGroup(
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


def moment_us(moment: int | datetime | None) -> int | None:
    """Return a time in µs since 1970 UTC; numbers are in ms."""
    return None if moment is None else moment * MS if isinstance(moment, int) else to_us(moment)


def _sample(letter: DeadLetter) -> DeadLetterSample:
    facts = {name: getattr(letter, name) for name in DeadLetterSample.__struct_fields__}
    times = {name: rfc3339(facts[name]) or "" for name in ("first_seen", "last_seen")}
    return DeadLetterSample(**facts | times)
