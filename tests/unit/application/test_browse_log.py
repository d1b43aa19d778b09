"""Pages of a log: events and commits newest first, read in bounded steps, and the links of commits."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.queries import browse_log
from postroom.application.queries.browse_log import BrowseLog, CommitLink, EventPage
from postroom.application.queries.read_events import EventFilter, ReadEvents
from postroom.domain.errors import BrokenLog, InvalidRequest, NotFound
from postroom.domain.message import MessageAcked
from postroom.domain.names import message_id
from tests.conformance.records import append, append_each, life, mixed, received, sent, stream
from tests.support.altered_log import AlteredLog

MAILBOX = "acme@one"
SENDS = frozenset({"MessageSent"})


def fill(log: MemoryEventLog) -> MemoryEventLog:
    """Write a commit of 40 events, seven of one, and one of one."""
    append(log, mixed(40, MAILBOX))
    append_each(log, [sent(77, at=2_000), *life(78, at=2_001), received(77, at=2_002)])
    append(log, [MessageAcked(stream(77), 3, 2_003, 1)])
    return log


LOG = fill(MemoryEventLog(MAILBOX))
FILTERS = [
    EventFilter(),
    EventFilter(events=SENDS),
    EventFilter(topic="ord*"),
    EventFilter(topic="other"),
    EventFilter(message_id=message_id(stream(77))),
    EventFilter(message_id="nobody", events=SENDS),
]


def walk(read: Callable[[str | None], EventPage]) -> list[int]:
    """Return the positions of all pages, in the order in which they are shown."""
    positions: list[int] = []
    cursor: str | None = None
    for _ in range(100):
        page = read(cursor)
        positions += [each.record.position for each in page.items]
        if page.next_cursor is None:
            return positions
        assert cursor is None or int(page.next_cursor) < int(cursor)
        cursor = page.next_cursor
    raise AssertionError("the pages have no end")


@given(
    st.sampled_from(FILTERS), st.integers(1, 50), st.integers(1, 60), st.integers(1, 40), st.integers(0, 50)
)
def test_the_pages_together_are_all_events_that_match_newest_first(
    criteria: EventFilter, limit: int, positions: int, lookups: int, since: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(browse_log, "POSITIONS_PER_PAGE", positions)
        patch.setattr(browse_log, "LOOKUPS_PER_PAGE", lookups)
        patch.setattr(browse_log, "POSITIONS_PER_STEP", lookups)
        shown = walk(lambda cursor: BrowseLog(LOG).events(criteria, since=since, cursor=cursor, limit=limit))
    every = [each.record.position for each in ReadEvents(LOG)(criteria)]
    assert shown == [each for each in reversed(every) if each >= since]


def test_a_page_reads_a_bounded_part_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browse_log, "POSITIONS_PER_PAGE", 5)
    page = BrowseLog(LOG).events(EventFilter(topic="other"))
    assert page == EventPage((), "44", 44, 48)


def test_a_page_looks_up_a_bounded_number_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    log = MemoryEventLog(MAILBOX)
    append_each(log, [sent(number, at=number) for number in range(1, 41)])
    append_each(log, [received(number, at=100 + number) for number in range(1, 41)])
    monkeypatch.setattr(browse_log, "POSITIONS_PER_STEP", 5)
    monkeypatch.setattr(browse_log, "LOOKUPS_PER_PAGE", 12)
    page = BrowseLog(log).events(EventFilter(topic="other"))
    assert page == EventPage((), "66", 66, 80)


def test_an_event_is_shown_by_its_position() -> None:
    event = BrowseLog(LOG).event(48)
    assert (event.record.type, event.topic, event.message_id) == (
        "MessageAcked",
        "orders",
        message_id(stream(77)),
    )


@pytest.mark.parametrize("limit", [1, 3, 50])
def test_commits_are_paged_newest_first_each_with_its_link(limit: int) -> None:
    shown: list[CommitLink] = []
    cursor = None
    while True:
        page = BrowseLog(LOG).commits(cursor=cursor, limit=limit)
        shown += page.items
        if page.next_cursor is None:
            break
        cursor = page.next_cursor
    assert [(each.commit.first, each.commit.last) for each in reversed(shown)] == [
        (each.first, each.last) for each in LOG.commits()
    ]
    assert all(each.is_linked for each in shown)
    assert [each.previous for each in shown[:-1]] == [each.commit.chain for each in shown[1:]]


def test_a_commit_is_shown_by_any_of_its_positions() -> None:
    link = BrowseLog(LOG).commit(17)
    assert (link.commit.first, link.commit.last, link.is_linked) == (1, 40, True)
    assert link.commit.envelopes


def test_the_link_of_a_commit_that_was_altered_does_not_hold() -> None:
    log = AlteredLog(MAILBOX)
    fill(log)
    log.alter(43, at=7)
    links = {each.commit.first: each.is_linked for each in BrowseLog(log).commits().items}
    assert [first for first, is_linked in links.items() if not is_linked] == [43]


def test_the_link_to_a_commit_that_retention_removed_is_unknown() -> None:
    log = fill(MemoryEventLog(MAILBOX))
    log.truncate(41, 100)
    page = BrowseLog(log).commits()
    assert (page.items[-1].commit.first, page.items[-1].is_linked, page.next_cursor) == (42, None, None)
    with pytest.raises(NotFound, match="no position 41; it has positions 42 to 48"):
        BrowseLog(log).commit(41)


@pytest.mark.parametrize("position", [49, 10**12])
def test_a_position_that_the_log_does_not_have_is_named_with_those_that_it_has(position: int) -> None:
    for query in (BrowseLog(LOG).event, BrowseLog(LOG).commit):
        with pytest.raises(NotFound, match=f"no position {position}; it has positions 1 to 48"):
            query(position)


@pytest.mark.parametrize("position", [0, -1, 1 << 40, 10**30])
def test_a_number_that_no_position_can_have_is_refused(position: int) -> None:
    with pytest.raises(InvalidRequest, match="position must be"):
        BrowseLog(LOG).event(position)


def test_an_empty_log_has_empty_pages() -> None:
    browse = BrowseLog(MemoryEventLog(MAILBOX))
    assert (browse.events().items, browse.commits().items, browse.bounds()) == ((), (), None)
    with pytest.raises(NotFound, match="is empty"):
        browse.event(1)


def test_times_lead_to_positions() -> None:
    browse = BrowseLog(LOG)
    assert [browse.position_after(at) for at in (0, 2_000, 2_003, 9_999)] == [1, 41, 48, 49]


def test_a_commit_that_can_not_be_decoded_is_named() -> None:
    log = AlteredLog(MAILBOX)
    fill(log)
    log.alter(43, events=b"\xc1")
    with pytest.raises(BrokenLog, match="commit of positions 43 to 43 can't be decoded"):
        BrowseLog(log).events()
    assert len(BrowseLog(log).commits().items) == 9
