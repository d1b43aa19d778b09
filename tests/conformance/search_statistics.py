"""What every read-model adapter promises of facets, timelines and suggestions."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postroom.application.messages import NewMessage
from postroom.application.ports.dead_letters import DeadLetterFilter
from postroom.application.ports.facets import FACET_VALUES, FacetField, SuggestionField, Timeline
from postroom.application.ports.read_models import ActivityFilter, ReadModels
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import Status
from postroom.domain.search import EventFilter, FoundMessage
from tests.conformance.read_models import BODIES, Build, SendOne, filters
from tests.projections.histories import START_US
from tests.support.examples import examples

HOUR_US = 3_600_000_000
Reasons = dict[tuple[str, str], str]
bounded = settings(
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)


class SearchStatisticsConformance:
    """Subclasses give fixture `models`, over a store with less than 1,000 messages and dead letters."""

    @pytest.fixture
    def messages(self, models: ReadModels) -> list[FoundMessage]:
        return list(models.search(EventFilter(limit=1_000)).items)

    @pytest.fixture
    def reasons(self, models: ReadModels) -> Reasons:
        letters = models.dead_letters(DeadLetterFilter(limit=1_000)).items
        return {(each.mailbox, each.message_id): each.reason for each in letters}

    @bounded
    @given(wanted=filters, cap=st.none() | st.integers(1, 40))
    def test_facets_count_what_the_filter_matches(
        self,
        models: ReadModels,
        messages: list[FoundMessage],
        reasons: Reasons,
        wanted: EventFilter,
        cap: int | None,
    ) -> None:
        matching = [item for item in messages if wanted.matches(item, BODIES)]
        facets = models.facets(wanted) if cap is None else models.facets(wanted, cap=cap)
        assert [each.field for each in facets.facets] == list(FacetField)
        assert facets.messages == len(matching) if facets.is_exact else facets.messages <= len(matching)
        assert facets.messages <= (cap or len(messages))
        assert facets.is_exact or cap is not None
        for facet in facets.facets:
            counts = Counter(filter(None, (value_of(item, facet.field, reasons) for item in matching)))
            for each in facet.values:
                assert 0 < each.count <= counts[each.value]
                assert not each.is_exact or each.count == counts[each.value]
            if facets.is_exact:
                order = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0].encode()))
                assert [(each.value, each.count) for each in facet.values] == order[:FACET_VALUES]
                assert facet.others == max(0, len(counts) - FACET_VALUES)

    @bounded
    @given(wanted=filters, bars=st.integers(2, 100), cap=st.none() | st.integers(1, 40))
    def test_a_timeline_counts_what_the_filter_matches(
        self,
        models: ReadModels,
        messages: list[FoundMessage],
        wanted: EventFilter,
        bars: int,
        cap: int | None,
    ) -> None:
        times = [item.timestamp for item in messages if wanted.matches(item, BODIES)]
        timeline = models.timeline(wanted, bars) if cap is None else models.timeline(wanted, bars, cap=cap)
        assert len(timeline.counts) <= bars
        assert timeline.start % timeline.width == 0
        counts = bars_of(times, timeline)
        if timeline.basis == "messages":
            assert {bar: count for bar, count in enumerate(timeline.counts) if count} == counts
        else:
            assert cap is not None
            assert timeline.basis == "sample"  # the messages of the store were sent within an hour
            assert timeline.sample <= len(messages)
            assert all(count <= counts[bar] for bar, count in enumerate(timeline.counts))

    def test_a_sample_of_all_places_has_all_messages(
        self, models: ReadModels, messages: list[FoundMessage]
    ) -> None:
        timeline = models.timeline(EventFilter(), 50, cap=1)
        assert (timeline.basis, timeline.sample) == ("sample", len(messages))
        assert sum(timeline.counts) == len(messages)

    def test_topics_over_hours_are_counted_from_the_recorded_sends(
        self, models: ReadModels, build: Build, send: SendOne
    ) -> None:
        for hours in (-30, 50):
            send(NewMessage(topic="shop", payload=b"", published_at_us=START_US + hours * HOUR_US))
        build()
        for topics, bars in (((), 10), (("shop", "admin.*"), 3), (("shop",), 100)):
            activity = models.activity(ActivityFilter(topics=topics, limit=1_000)).items
            sends = sum(each.events for each in activity if each.event == "MessageSent")
            timeline = models.timeline(EventFilter(topics=topics), bars, cap=1)
            assert (timeline.basis, sum(timeline.counts)) == ("events", sends)
        assert models.timeline(EventFilter(statuses=(Status.DEAD,)), 10, cap=1).basis == "sample"
        before = EventFilter(end_time=START_US // 1_000 - 29 * HOUR_US // 1_000)
        assert sum(models.timeline(before, 10).counts) == 1

    @pytest.mark.parametrize("field", SuggestionField)
    def test_suggestions_are_the_first_values_that_begin_with_a_text(
        self, models: ReadModels, messages: list[FoundMessage], field: SuggestionField
    ) -> None:
        def values_of(item: FoundMessage) -> set[str]:
            if field == SuggestionField.HEADER:
                return {*item.custom_headers}
            return {*filter(None, [getattr(item, field.value)])}

        for mailbox in (None, "box1@test"):
            own = [each for each in messages if mailbox in (None, each.mailbox)]
            values: set[str] = set().union(*map(values_of, own))
            if mailbox is not None and field == SuggestionField.HEADER:
                values = set()  # of a store with two mailboxes
            for start in ("", "a", "admin.", "Ü", "zzz", "\0", "\U0010ffff"):
                matching = sorted((each for each in values if each.startswith(start)), key=str.encode)
                for limit in (1, 3, 100):
                    assert models.suggest(field, start, limit, mailbox=mailbox) == tuple(matching[:limit])

    def test_topics_that_are_not_covered_leave_room_for_others(
        self, models: ReadModels, messages: list[FoundMessage]
    ) -> None:
        for mailbox in (None, "box1@test"):
            topics = sorted(
                {each.topic for each in messages if mailbox in (None, each.mailbox)}, key=str.encode
            )
            for name in topics:
                for limit in (1, 3, 100):
                    covered = [each for each in topics if each.encode() >= name.encode()]
                    actual = models.suggest(
                        SuggestionField.TOPIC, "", limit, mailbox=mailbox, covers=covered.__contains__
                    )
                    assert actual == tuple(covered[:limit])

    def test_bounds_are_checked(self, models: ReadModels) -> None:
        for ask in (
            lambda: models.facets(EventFilter(), cap=0),
            lambda: models.facets(EventFilter(), cap=100_001),
            lambda: models.timeline(EventFilter(), 1),
            lambda: models.timeline(EventFilter(), 1_001),
            lambda: models.timeline(EventFilter(), cap=0),
            lambda: models.suggest(SuggestionField.TOPIC, "", 0),
            lambda: models.suggest(SuggestionField.TOPIC, "\ud800"),
        ):
            with pytest.raises(InvalidRequest):
                ask()


def value_of(item: FoundMessage, field: FacetField, reasons: Reasons) -> str | None:
    """Return the value by which a message is counted."""
    match field:
        case FacetField.REASON:
            return reasons.get((item.mailbox, item.message_id))
        case FacetField.STATUS:
            return item.status.name.lower()
        case _:
            value: str | None = getattr(item, field.value)
            return value


def bars_of(times: list[int], timeline: Timeline) -> Counter[int]:
    """Return the number of times in each bar."""
    return Counter((time - timeline.start) // timeline.width for time in times)
