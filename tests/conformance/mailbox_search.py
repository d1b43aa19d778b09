"""What every mailbox promises that is searched: a test class inherits the suite and brings a `mailbox`."""

from typing import Any

import pytest

from postroom.application.operations.mailbox import Mailbox
from postroom.domain.errors import Forbidden, InvalidRequest
from postroom.domain.message import Status
from postroom.domain.search import EventFilter, FoundMessage, Order
from tests.support.stores import message

TIMES = [7, 3, 3, 9, 3, 5, 3, 1, 3, 8, 3, 2]
"""Of messages, in ms; several have the same."""


class MailboxSearchConformance:
    @pytest.mark.parametrize("limit", [1, 2, 5, 12, 100])
    @pytest.mark.parametrize("order", Order)
    async def test_a_search_finds_all_messages_by_time_page_by_page(
        self, mailbox: Mailbox, order: Order, limit: int
    ) -> None:
        for number, time in enumerate(TIMES):
            await mailbox.send_message(
                message(b"%d" % number, sticky_key=f"key {number}", published_at_us=time * 1_000)
            )
        found = await search(mailbox, order=order, limit=limit)
        assert [each.timestamp for each in found] == sorted(TIMES, reverse=order is Order.NEWEST_FIRST)
        assert len({each.message_id for each in found}) == len(TIMES)

    async def test_a_search_finds_what_all_criteria_match(self, mailbox: Mailbox) -> None:
        await mailbox.send_batch(
            [
                message(principal="shop", attrs={"region": "eu"}, published_at_us=1_000_000),
                message(principal="shop", attrs={"region": "us"}, published_at_us=2_000_000),
                message(topic="others", principal="shop", attrs={"region": "eu"}, published_at_us=3_000_000),
                message(principal="audit", attrs={"region": "eu"}, published_at_us=4_000_000),
            ]
        )
        criteria: list[tuple[dict[str, Any], list[int]]] = [
            ({"topics": ("ord*",)}, [4, 2, 1]),
            ({"topics": ("orders",), "principals": ("shop", "nobody")}, [2, 1]),
            ({"headers": {"region": "eu"}, "end_time": 3_000}, [3, 1]),
            ({"start_time": 2_000, "statuses": (Status.READY,)}, [4, 3, 2]),
            ({"statuses": (Status.IN_FLIGHT,)}, []),
            ({"text": "AUD"}, [4]),
            ({"match": "audit"}, [4]),
        ]
        for criterion, seconds in criteria:
            found = await search(mailbox, **criterion)
            assert [each.timestamp for each in found] == [second * 1_000 for second in seconds], criterion
        (audit,) = await search(mailbox, principals=("audit",))
        (one,) = await search(mailbox, message_id=audit.message_id)
        assert one == audit
        assert (one.topic, one.principal, one.custom_headers) == ("orders", "audit", {"region": "eu"})
        assert (one.status, one.attempts) == (Status.READY, 0)

    async def test_a_search_of_another_mailbox_and_what_is_no_filter_are_refused(
        self, mailbox: Mailbox
    ) -> None:
        anything: Any
        for anything in (None, "orders", {"topics": ("orders",)}, EventFilter):
            with pytest.raises(InvalidRequest):
                await mailbox.search_messages(anything)
        with pytest.raises((InvalidRequest, Forbidden)):
            await mailbox.search_messages(EventFilter(mailbox="acme@elsewhere"))


async def search(mailbox: Mailbox, **criteria: Any) -> list[FoundMessage]:
    """Return all messages that match, of as many pages as there are."""
    found: list[FoundMessage] = []
    filter_ = EventFilter(**criteria)
    while True:
        page = await mailbox.search_messages(filter_)
        assert len(page.items) <= filter_.limit
        found += page.items
        if page.next_cursor is None:
            return found
        filter_ = EventFilter(**criteria | {"cursor": page.next_cursor})
