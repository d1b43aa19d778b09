"""Searches as the bearer of one capability may make them."""

import msgspec

from postroom.application.access.auditor import Auditor
from postroom.application.access.guard import Guard
from postroom.application.service import Search
from postroom.domain.arguments import check_type
from postroom.domain.capability.rights import Right
from postroom.domain.errors import Forbidden
from postroom.domain.search import EventFilter, SearchPage

PAGING = ("limit", "offset", "cursor", "order", "mailbox")
"""Fields of a filter that are not criteria."""


class AuthorizedSearch:
    """Search of the messages of one mailbox (RFC-037 `QueryEvents`); each is audited.

    A capability that is limited to topics must name topics, or globs, that it covers. Words are searched in
    payloads, too, so `match` needs the right to read them. Without that right, answers have no envelopes.
    """

    def __init__(self, search: Search, guard: Guard, auditor: Auditor) -> None:
        self._search = search
        self._guard = guard
        self._auditor = auditor

    async def __call__(self, filter_: EventFilter) -> SearchPage:
        """Return a page of the messages that match.

        Raises: Unauthenticated, Forbidden, Saturated; what the search raises.
        """
        check_type("The filter", filter_, EventFilter)
        return await self._auditor.run(
            Right.READ_HEADERS,
            lambda: self._run(filter_),
            lambda page: len(page.items),
            topics=filter_.topics,
            target=filter_.message_id or "",
            criteria=criteria_of(filter_),
        )

    async def _run(self, filter_: EventFilter) -> SearchPage:
        guard = self._guard
        own = await check_filter(guard, filter_)
        page = await self._search(msgspec.structs.replace(own, limit=guard.at_most(filter_.limit)))
        if not guard.permits(Right.READ_PAYLOAD):
            items = tuple(msgspec.structs.replace(each, envelope_blob=b"") for each in page.items)
            return msgspec.structs.replace(page, items=items)
        guard.count_bytes(len(each.envelope_blob) for each in page.items)
        return page


async def check_filter(guard: Guard, filter_: EventFilter) -> EventFilter:
    """Return a filter of the messages of the mailbox that a capability may search; count the call.

    Raises: Unauthenticated, Forbidden, Saturated.
    """
    await guard.check(Right.READ_HEADERS)
    if filter_.mailbox not in (None, guard.mailbox):
        raise Forbidden(f"Searches here are of the mailbox {guard.mailbox}; ask another server.", "mailbox")
    if filter_.match is not None:
        guard.check_operation(Right.READ_PAYLOAD)
    if not filter_.topics:
        guard.check_all_topics()
    # The text of a glob is covered only if everything that it matches is.
    guard.check_topics(filter_.topics)
    guard.charge()
    return msgspec.structs.replace(filter_, mailbox=guard.mailbox)


def criteria_of(filter_: EventFilter) -> list[str]:
    """Return the names of the fields that are criteria, for the audit log."""
    return [
        name
        for name, value in msgspec.structs.asdict(filter_).items()
        if name not in PAGING and value not in (None, (), {})
    ]
