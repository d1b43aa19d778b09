"""Saved searches; a part of `MailboxConformance`."""

import pytest

from postroom.application.operations.mailbox import Mailbox
from postroom.domain.errors import IdempotencyConflict, InvalidRequest, NotFound
from postroom.domain.settings import SettingsChanges

QUERY = "topics=orders.*&statuses=dead&match=refund%2A"
UNKNOWN = "01890a5d-ac96-774b-bcce-b302099a8057"


class MailboxSearchConformance:
    async def test_a_search_is_saved_listed_replaced_and_deleted(self, mailbox: Mailbox) -> None:
        saved = await mailbox.save_search("Failed refunds, ü/€", QUERY)
        assert (saved.name, saved.query, saved.topics) == ("Failed refunds, ü/€", QUERY, ["orders.*"])
        assert await mailbox.save_search(saved.name, QUERY) == saved
        other = "topics=orders.*&statuses=ready"
        with pytest.raises(IdempotencyConflict, match="replace it"):
            await mailbox.save_search(saved.name, other)
        replaced = await mailbox.save_search(saved.name, other, replace=True)
        assert (replaced.search_id, replaced.query) == (saved.search_id, other)
        everywhere = await mailbox.save_search("all", "")
        assert everywhere.topics == []
        assert await mailbox.list_searches() == [everywhere, replaced]
        await mailbox.delete_search(saved.search_id)
        assert await mailbox.list_searches() == [everywhere]
        with pytest.raises(NotFound):
            await mailbox.delete_search(UNKNOWN)

    async def test_searches_of_the_same_name_on_other_topics_are_others(self, mailbox: Mailbox) -> None:
        one = await mailbox.save_search("dead", "topics=a&topics=b")
        same = await mailbox.save_search("dead", "topics=b&topics=a", replace=True)
        other = await mailbox.save_search("dead", "topics=a")
        assert one.search_id == same.search_id != other.search_id
        assert [each.topics for each in await mailbox.list_searches()] == [["a"], ["a", "b"]]

    async def test_saved_searches_outlast_a_replacement_of_the_settings(self, mailbox: Mailbox) -> None:
        saved = await mailbox.save_search("mine", QUERY)
        await mailbox.set_settings(SettingsChanges(topics={"orders": {"max_attempts": 3}}))
        assert await mailbox.set_settings(SettingsChanges(), replace=True)
        assert await mailbox.list_searches() == [saved]

    @pytest.mark.parametrize("name", ["", " a", "a\n", "\u202eevil", "a" * 81, "\0", 1])
    async def test_a_name_that_can_not_be_seen_is_refused(self, mailbox: Mailbox, name: str) -> None:
        with pytest.raises(InvalidRequest):
            await mailbox.save_search(name, "")

    @pytest.mark.parametrize("query", ["a b", "é", "a\r\n", "topics=a#b", "x" * 2_001, "\x7f"])
    async def test_a_query_that_is_no_part_of_a_link_is_refused(self, mailbox: Mailbox, query: str) -> None:
        with pytest.raises(InvalidRequest):
            await mailbox.save_search("name", query)
        assert await mailbox.list_searches() == []
