"""What every read-model adapter promises of activity: it counts what the log holds, by hour and by day."""

from collections import Counter

import pytest

from postroom.application.ports.read_models import ActivityCount, ActivityFilter, ReadModels
from postroom.domain.errors import InvalidRequest
from postroom.domain.search import topic_matches
from postroom.projections.models.activity import PERIODS
from postroom.projections.projection import Row

Key = tuple[int, str, str]


class ActivityConformance:
    """Subclass it with fixtures `models` and `rows`: those that the reference fold makes of `activity`."""

    @pytest.mark.parametrize("period", PERIODS)
    def test_events_are_counted_by_period_topic_and_type_over_all_mailboxes(
        self, models: ReadModels, rows: list[Row], period: str
    ) -> None:
        found = every(models, ActivityFilter(period=period))
        assert found
        assert counted(found) == summed([row for row in rows if row["period"] == period])
        order = [(-each.starts_at, each.topic, each.event) for each in found]
        assert order == sorted(order)
        assert all(each.starts_at <= each.first_at <= each.last_at for each in found)
        assert all(each.last_at < each.starts_at + PERIODS[period] for each in found)

    def test_hours_add_up_to_days(self, models: ReadModels) -> None:
        hours = every(models, ActivityFilter(period="hour"))
        days: Counter[Key] = Counter()
        for each in hours:
            start = each.starts_at // PERIODS["day"] * PERIODS["day"]
            days[start, each.topic, each.event] += each.events
        assert days == counted(every(models, ActivityFilter(period="day")))

    @pytest.mark.parametrize("pattern", ["shop", "admin.*", "*", "nobody"])
    def test_topics_are_named_or_globs(self, models: ReadModels, rows: list[Row], pattern: str) -> None:
        found = every(models, ActivityFilter(topics=(pattern,)))
        wanted = [row for row in rows if row["topic"] and topic_matches(pattern, row["topic"])]
        assert counted(found) == summed([row for row in wanted if row["period"] == "day"])

    def test_one_mailbox_and_a_stretch_of_time_may_be_asked_for(
        self, models: ReadModels, rows: list[Row]
    ) -> None:
        name = rows[0]["mailbox"]
        since = max(row["starts_at"] for row in rows if row["period"] == "hour")
        of_it = [row for row in rows if row["mailbox"] == name and row["period"] == "hour"]
        recent = every(models, ActivityFilter(period="hour", mailbox=name, since=since))
        before = every(models, ActivityFilter(period="hour", mailbox=name, until=since))
        assert counted(recent) == summed([row for row in of_it if row["starts_at"] >= since])
        assert counted(before) == summed([row for row in of_it if row["starts_at"] < since])
        assert every(models, ActivityFilter(mailbox="nobody@nowhere")) == []

    @pytest.mark.parametrize("limit", [1, 2, 1_000])
    def test_pages_of_any_size_tell_the_same(self, models: ReadModels, limit: int) -> None:
        whole = every(models, ActivityFilter(period="hour"))
        assert every(models, ActivityFilter(period="hour", limit=limit)) == whole

    def test_a_period_or_a_cursor_that_is_none_is_refused(self, models: ReadModels) -> None:
        with pytest.raises(InvalidRequest, match="expected hour or day"):
            ActivityFilter(period="week")
        with pytest.raises(InvalidRequest, match="next_cursor"):
            models.activity(ActivityFilter(cursor="x"))


def every(models: ReadModels, wanted: ActivityFilter) -> list[ActivityCount]:
    """Return what all pages hold."""
    found: list[ActivityCount] = []
    cursor: str | None = None
    while True:
        page = models.activity(
            ActivityFilter(
                period=wanted.period,
                mailbox=wanted.mailbox,
                topics=wanted.topics,
                since=wanted.since,
                until=wanted.until,
                limit=wanted.limit,
                cursor=cursor,
            )
        )
        assert len(page.items) <= wanted.limit
        found += page.items
        cursor = page.next_cursor
        if cursor is None:
            return found


def counted(found: list[ActivityCount]) -> Counter[Key]:
    """Return counts by what they are of."""
    return Counter({(each.starts_at, each.topic, each.event): each.events for each in found})


def summed(rows: list[Row]) -> Counter[Key]:
    """Return what rows of all mailboxes amount to."""
    sums: Counter[Key] = Counter()
    for row in rows:
        sums[row["starts_at"], row["topic"], row["event"]] += row["events"]
    return sums
