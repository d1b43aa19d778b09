"""The answers of the mailboxes of a namespace, merged (ADR 0063)."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, TypeVar

import msgspec

from postroom.application.query_results import Backlog, MessageChange
from postroom.application.reports import (
    ConsumerReport,
    DeletionReport,
    RewindReport,
    ScheduleReport,
    SearchReport,
    SubscriptionReport,
    TopicPeriod,
    TopicReport,
    TopicStep,
)
from postroom.application.worker_reports import WorkerReport, sort_workers
from postroom.domain.mailbox.counts import TopicCount, TopicSummary
from postroom.domain.mailbox.topic_decisions import Effect, SettingsEffect, SettingsPreview
from postroom.domain.namespace import RESERVED_TOPIC

_Counted = TypeVar("_Counted", TopicPeriod, TopicStep)
R = TypeVar("R", SubscriptionReport, RewindReport, DeletionReport)

_STATUSES = ("live", "copying", "clearing")
MAX_KEYS = 100


def merge_changes(answers: Sequence[Sequence[MessageChange]]) -> list[MessageChange]:
    """Return for each message the answer of the mailbox that knows it."""
    return [
        next((each for each in same if each.outcome != "unknown"), same[0])
        for same in zip(*answers, strict=True)
    ]


def merge_consumers(answers: Sequence[Sequence[ConsumerReport]]) -> list[ConsumerReport]:
    """Return the consumers of all mailboxes, except those of the namespace's own topic."""
    return [each for each in chain.from_iterable(answers) if each.topic != RESERVED_TOPIC]


def merge_workers(answers: Sequence[Sequence[WorkerReport]]) -> list[WorkerReport]:
    """Return the workers of all mailboxes, each as in its latest report."""
    every = sorted(chain.from_iterable(answers), key=lambda each: -each.silent_ms)
    return sort_workers({(each.principal, each.id): each for each in every}.values())


def merge_schedules(answers: Sequence[Sequence[ScheduleReport]]) -> list[ScheduleReport]:
    """Return the schedules of all mailboxes, by name; each is in one of them."""
    return sorted(chain.from_iterable(answers), key=lambda each: each.name)


def merge_searches(answers: Sequence[Sequence[SearchReport]]) -> list[SearchReport]:
    """Return the saved searches of all members; a member has the searches that were saved since it joined."""
    searches = {each.search_id: each for each in chain.from_iterable(reversed(answers))}
    return sorted(searches.values(), key=lambda each: (each.name.casefold(), each.topics))


def merge_backlogs(namespace: str, backlogs: Sequence[Backlog]) -> Backlog:
    """Return the backlog of a namespace from its mailboxes' backlogs."""
    if len(backlogs) == 1:
        (only,) = backlogs
        return msgspec.structs.replace(only, mailbox=namespace, shards=_merge_counts(only.shards))
    latest = max(backlogs, key=lambda backlog: backlog.at)
    return Backlog(
        namespace,
        sum(backlog.position for backlog in backlogs),
        max(backlog.epoch for backlog in backlogs),
        ", ".join(dict.fromkeys(backlog.owner for backlog in backlogs)),
        latest.at,
        sum(backlog.archived for backlog in backlogs),
        max(backlog.as_of for backlog in backlogs),
        _merge_counts(row for backlog in backlogs for row in backlog.shards),
        sorted({topic for backlog in backlogs for topic in backlog.paused_topics}),
        "durable" if all(backlog.dlq_profile == "durable" for backlog in backlogs) else "ephemeral",
    )


def merge_settings(previews: Sequence[SettingsPreview]) -> SettingsPreview:
    """Return the effects of a change of settings on all mailboxes."""
    counts: Counter[tuple[str | None, Effect]] = Counter()
    for each in chain.from_iterable(preview.effects for preview in previews):
        counts[each.topic, each.effect] += each.count
    effects = [SettingsEffect(topic, effect, count) for (topic, effect), count in counts.items()]
    return msgspec.structs.replace(previews[0], effects=effects)


def _merge_counts(rows: Iterable[TopicCount]) -> list[TopicCount]:
    merged: dict[tuple[str, int], TopicCount] = {}
    for row in rows:
        if row.topic == RESERVED_TOPIC:
            continue
        current = merged.get((row.topic, row.shard))
        merged[row.topic, row.shard] = row if current is None else _add_counts(current, row)
    return [merged[key] for key in sorted(merged)]


def _add_counts(one: TopicCount, other: TopicCount) -> TopicCount:
    return TopicCount(
        one.topic,
        one.shard,
        one.ready + other.ready,
        one.in_flight + other.in_flight,
        one.delayed + other.delayed,
        one.dead + other.dead,
        _earliest(one.oldest_at, other.oldest_at),
    )


def merge_topics(pages: Iterable[Iterable[TopicSummary]]) -> list[TopicSummary]:
    """Return the topics of a namespace from its mailboxes' topics, by name."""
    merged: dict[str, TopicSummary] = {}
    for topic in (topic for page in pages for topic in page if topic.topic != RESERVED_TOPIC):
        current = merged.get(topic.topic)
        merged[topic.topic] = topic if current is None else _add_topics(current, topic)
    return [merged[name] for name in sorted(merged)]


def _add_topics(one: TopicSummary, other: TopicSummary) -> TopicSummary:
    reasons = {*one.dead_letterings, *other.dead_letterings}
    return TopicSummary(
        one.topic,
        one.paused or other.paused,
        one.policy or other.policy,
        one.ready + other.ready,
        one.in_flight + other.in_flight,
        one.delayed + other.delayed,
        one.dead + other.dead,
        _earliest(one.oldest_at, other.oldest_at),
        {r: one.dead_letterings.get(r, 0) + other.dead_letterings.get(r, 0) for r in sorted(reasons)},
        one.shards_in_use or other.shards_in_use,
        one.held_keys + other.held_keys,
        one.receivers + other.receivers,
    )


def merge_topic_reports(reports: Sequence[TopicReport]) -> TopicReport:
    """Return the report of a topic of a namespace from its mailboxes' reports."""
    first = reports[0]
    keys = sorted(
        chain.from_iterable(each.keys for each in reports),
        key=lambda each: (not each.is_held, -each.waiting - each.in_flight, each.key),
    )
    return msgspec.structs.replace(
        first,
        summary=merge_topics([[each.summary] for each in reports])[0],
        subscriptions=sorted({name for each in reports for name in each.subscriptions}),
        consumers=[*chain.from_iterable(each.consumers for each in reports)],
        keys=keys[:MAX_KEYS],
        periods=[_merge_periods(some) for some in zip(*(each.periods for each in reports), strict=True)],
        events=sum(each.events for each in reports),
    )


def _merge_periods(periods: Sequence[TopicPeriod]) -> TopicPeriod:
    """Return the sums of the counts, and the largest of the percentiles."""
    steps: dict[str, list[TopicStep]] = {}
    for each in chain.from_iterable(period.steps for period in periods):
        steps.setdefault(each.at, []).append(each)
    return msgspec.structs.replace(
        _add_up(periods),
        since=min(each.since for each in periods),
        is_whole=all(each.is_whole for each in periods),
        seconds=max(each.seconds for each in periods),
        steps=[_add_up(steps[at]) for at in sorted(steps)],
    )


def _add_up(reports: Sequence[_Counted]) -> _Counted:
    """Return the first report with the sums of the counts, and the largest of the percentiles."""
    changes: dict[str, Any] = {}
    for name in reports[0].__struct_fields__:
        values = [getattr(each, name) for each in reports]
        if name in ("sent", "received", "acked", "failed", "dead"):
            changes[name] = sum(values)
        elif name[-7:] in ("_p50_ms", "_p95_ms", "_p99_ms"):
            changes[name] = max((each for each in values if each is not None), default=None)
    return msgspec.structs.replace(reports[0], **changes)


def merge_subscriptions(
    mailboxes: Sequence[str], pages: Iterable[Iterable[SubscriptionReport]]
) -> list[SubscriptionReport]:
    """Return the subscriptions of a namespace from its mailboxes' subscriptions, by name."""
    merged: dict[str, dict[str, SubscriptionReport]] = {}
    for mailbox, page in zip(mailboxes, pages, strict=True):
        for each in page:
            merged.setdefault(each.name, {})[mailbox] = each
    return [
        msgspec.structs.replace(
            first := merge_subscription([*own.values()]),
            missing_in=tuple(each for each in mailboxes if each not in own),
            differs_in=tuple(each for each, report in own.items() if report.filter != first.filter),
        )
        for _, own in sorted(merged.items())
    ]


def merge_subscription(reports: Sequence[R]) -> R:
    """Return the report on a subscription of a namespace: sums, and the status that is furthest from live."""
    values = {name: [getattr(each, name) for each in reports] for name in reports[0].__struct_fields__}
    changes: dict[str, object] = {name: sum(each) for name, each in values.items() if type(each[0]) is int}
    if "status" in values:
        changes |= {"status": max(values["status"], key=_STATUSES.index), "paused": any(values["paused"])}
        changes["created_at"] = min(values["created_at"])
        changes["problem"] = " ".join(filter(None, values["problem"]))
    return msgspec.structs.replace(reports[0], **changes)


def _earliest(one: int | None, other: int | None) -> int | None:
    return min((each for each in (one, other) if each is not None), default=None)


MERGES: dict[str, Callable[[list[Any]], Any]] = {
    "list_topics": merge_topics,
    "describe_topic": merge_topic_reports,
    "list_consumers": merge_consumers,
    "list_workers": merge_workers,
    "preview_settings": merge_settings,
    "set_settings": any,
    "list_schedules": merge_schedules,
    "list_searches": merge_searches,
    "cancel_messages": merge_changes,
    "reschedule_messages": merge_changes,
}
"""How the answers of the mailboxes become one, by operation; `merge_answers` is for others."""


def merge_answers(answers: Sequence[Any]) -> Any:
    """Return the sum of numbers, lists in one, or else the answer of the oldest mailbox."""
    first, *others = answers
    if type(first) is int or isinstance(first, list):
        for each in others:
            first = first + each
    return first
