"""What every read-model adapter promises of groups of dead letters: they agree with the dead letters."""

from collections import defaultdict

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postroom.application.ports import dead_letters as port
from postroom.application.ports.dead_letters import (
    GROUP_FIELDS,
    GROUP_ORDERS,
    DeadLetter,
    DeadLetterFilter,
    DeadLetterGroup,
    DeadLetterGroupFilter,
)
from postroom.application.ports.read_models import ReadModels
from postroom.domain.errors import InvalidRequest
from postroom.domain.integrity import fingerprint
from postroom.domain.search import topic_matches
from tests.projections.histories import START_US
from tests.support.dead_letters import MAILBOX
from tests.support.examples import examples

HOUR_US = 3_600_000_000
times = st.none() | st.integers(START_US - HOUR_US, START_US + 5 * HOUR_US)
filters = st.builds(
    DeadLetterGroupFilter,
    mailbox=st.sampled_from([None, None, MAILBOX, "other@local"]),
    topics=st.lists(st.sampled_from(["orders.eu", "orders.*", "payments", "*", "none"]), max_size=2).map(
        tuple
    ),
    reason=st.sampled_from([None, None, "max_attempts", "rejected"]),
    fingerprint=st.sampled_from([None, None, fingerprint("max_attempts", "card 1 refused"), "none"]),
    since=times,
    until=times,
    text=st.sampled_from(
        [None, None, "card", "CARD 1", "timeout", "%", "_", "\x00IT", "\u202e", "Ä", "<script>"]
    ),
    by=st.lists(st.sampled_from(GROUP_FIELDS), min_size=1, max_size=3, unique=True).map(tuple),
    order=st.sampled_from(GROUP_ORDERS),
    bars=st.integers(0, 30),
    limit=st.integers(1, 5),
)


class DeadLetterGroupsConformance:
    """Subclasses give the fixture `models` over a store that `dead_letters.fill` filled."""

    @settings(
        max_examples=examples(100),
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(filter_=filters)
    def test_groups_have_the_dead_letters_that_match_and_are_alike(
        self, models: ReadModels, filter_: DeadLetterGroupFilter
    ) -> None:
        letters = [each for each in models.dead_letters(DeadLetterFilter()).items if _matches(filter_, each)]
        plain = {name: getattr(filter_, name) for name in DeadLetterFilter.__struct_fields__}
        assert _all_letters(models, DeadLetterFilter(**plain)) == letters
        expected = defaultdict(list)
        for each in letters:
            expected[tuple(getattr(each, name) for name in filter_.by)].append(each)
        pages = []
        cursor = None
        while True:
            page = models.dead_letter_groups(msgspec.structs.replace(filter_, cursor=cursor))
            pages.append(page)
            cursor = page.next_cursor
            if cursor is None:
                break
        groups = [each for page in pages for each in page.items]
        assert pages[0].letters == len(letters)
        assert pages[0].groups == len(groups) == len(expected)
        for group in groups:
            alike = expected[tuple(getattr(group.sample, name) for name in filter_.by)]
            _assert_describes(group, alike)
            assert list(group.trend) == _trend(alike, pages[0].start, pages[0].width, filter_.bars)
        ranks = [each.last_seen if filter_.order == "latest" else each.count for each in groups]
        assert ranks == sorted(ranks, reverse=True)
        assert {page.since for page in pages} == {None}

    def test_only_the_latest_dead_letters_are_counted_and_the_page_says_since_when(
        self, models: ReadModels, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        letters = models.dead_letters(DeadLetterFilter()).items
        monkeypatch.setattr(port, "MAX_GROUPED", 5)
        page = models.dead_letter_groups(DeadLetterGroupFilter(bars=3))
        assert (page.letters, page.since, page.start) == (5, letters[4].last_seen, letters[4].last_seen)
        assert sum(sum(each.trend) for each in page.items) == 5
        monkeypatch.setattr(port, "MAX_GROUPED", len(letters))
        assert models.dead_letter_groups(DeadLetterGroupFilter()).since is None

    @pytest.mark.parametrize("cursor", ["", "nonsense", "k6FhoWKhYw", "ks__________8_"])
    def test_a_cursor_of_another_list_is_refused(self, models: ReadModels, cursor: str) -> None:
        with pytest.raises(InvalidRequest, match="next_cursor"):
            models.dead_letter_groups(DeadLetterGroupFilter(cursor=cursor))


def _all_letters(models: ReadModels, filter_: DeadLetterFilter) -> list[DeadLetter]:
    page = models.dead_letters(filter_)
    letters = list(page.items)
    while page.next_cursor is not None:
        page = models.dead_letters(msgspec.structs.replace(filter_, cursor=page.next_cursor))
        letters += page.items
    return letters


def _matches(filter_: DeadLetterFilter, letter: DeadLetter) -> bool:
    text, error = filter_.text, letter.last_error
    return (
        filter_.mailbox in (None, letter.mailbox)
        and (not filter_.topics or any(topic_matches(each, letter.topic) for each in filter_.topics))
        and filter_.reason in (None, letter.reason)
        and filter_.fingerprint in (None, letter.fingerprint)
        and (filter_.since is None or letter.last_seen >= filter_.since)
        and (filter_.until is None or letter.last_seen < filter_.until)
        and (text is None or (error is not None and text.lower() in error.lower()))
    )


def _assert_describes(group: DeadLetterGroup, alike: list[DeadLetter]) -> None:
    seen = [each.last_seen for each in alike]
    assert (group.count, group.first_seen, group.last_seen) == (len(alike), min(seen), max(seen))
    assert group.sample == max(alike, key=lambda each: each.id)
    for name in GROUP_FIELDS:
        values = {getattr(each, name) for each in alike}
        assert getattr(group, name) == (values.pop() if len(values) == 1 else None)


def _trend(alike: list[DeadLetter], start: int, width: int, bars: int) -> list[int]:
    counts = [0] * bars
    for each in alike if bars else ():
        counts[(each.last_seen - start) // width] += 1
    return counts
