"""Reports of topics and consumers, subscriptions, schedules, searches and redrive jobs."""

from typing import Literal

import msgspec

from postroom.application.messages import rfc3339
from postroom.application.query_results import Outcome
from postroom.domain.mailbox.counts import KeyCount, TopicSummary
from postroom.domain.names import message_id
from postroom.domain.policy import TopicPolicy
from postroom.domain.redrive.job import RedriveJob
from postroom.domain.redrive.spec import RedriveSpec
from postroom.domain.saved_search import SavedSearch, Searches
from postroom.domain.schedule import Missed, ScheduleSpec
from postroom.domain.subscription import SubscriptionFilter, SubscriptionStatus


class ConsumerReport(msgspec.Struct, frozen=True):
    """A consumer of a topic: its deliveries in flight and its recent activity.

    The counts and times are those of deliveries within the latest events of the log.

    Arguments:
        consumer: the name that it gives itself; empty for those without a name.
        topic: empty for messages that were sent before those events.
        receivers: number of its receives that wait for messages now; 0 unless the owner answers.
        in_flight: number of its deliveries that are not settled.
        in_flight_since: log time of the oldest of them.
        received, acked, failed: number of deliveries, those that were acked, and those that failed or timed
            out.
        work_p50_ms, work_p95_ms: time from a delivery to its ack, by nearest rank; None without acks.
        last_error: of its latest delivery that failed.
        first_received, last_received: log time.
        principal: of its capability; None for a process of the mailbox's own user.
    """

    consumer: str
    topic: str
    receivers: int = 0
    in_flight: int = 0
    in_flight_since: str | None = None
    received: int = 0
    acked: int = 0
    failed: int = 0
    work_p50_ms: float | None = None
    work_p95_ms: float | None = None
    last_error: str | None = None
    first_received: str | None = None
    last_received: str | None = None
    principal: str | None = None


class TopicStep(msgspec.Struct, frozen=True):
    """The messages of a topic that were sent in one of the equal parts of a period.

    Arguments:
        at: log time of its beginning, a multiple of its length since 1970 UTC.
        sent, acked: messages that were sent, and those of them that were acked.
        failed, dead: failed deliveries and dead-letterings of these messages.
        total_p50_ms, total_p95_ms, total_p99_ms: from sending to the ack; see `TopicPeriod`.
    """

    at: str
    sent: int = 0
    acked: int = 0
    failed: int = 0
    dead: int = 0
    total_p50_ms: float | None = None
    total_p95_ms: float | None = None
    total_p99_ms: float | None = None


class TopicPeriod(msgspec.Struct, frozen=True):
    """The messages of a topic that were sent in a period up to now, followed to the end of the log.

    Percentiles are by nearest rank, in ms, and None without a value. In a namespace, they are the largest of
    its mailboxes.

    Arguments:
        period_ms: length of the period.
        since: log time of its beginning, or of the first event that was read in it.
        is_whole: whether all of its events were read.
        seconds: from `since` to now.
        sent, received, acked: messages that were sent, those received at least once, and those acked.
        failed: deliveries of these messages that failed or timed out.
        dead: dead-letterings of these messages.
        queue_p50_ms, queue_p95_ms, queue_p99_ms: from sending to the first receive.
        work_p50_ms, work_p95_ms, work_p99_ms: from the last receive to the ack.
        total_p50_ms, total_p95_ms, total_p99_ms: from sending to the ack.
        step_ms: length of a step.
        steps: the steps in which messages were sent, oldest first.
    """

    period_ms: int
    since: str
    is_whole: bool
    seconds: float
    sent: int = 0
    received: int = 0
    acked: int = 0
    failed: int = 0
    dead: int = 0
    queue_p50_ms: float | None = None
    queue_p95_ms: float | None = None
    queue_p99_ms: float | None = None
    work_p50_ms: float | None = None
    work_p95_ms: float | None = None
    work_p99_ms: float | None = None
    total_p50_ms: float | None = None
    total_p95_ms: float | None = None
    total_p99_ms: float | None = None
    step_ms: int = 0
    steps: list[TopicStep] = []


class TopicReport(msgspec.Struct, frozen=True):
    """A topic with its policy, keys, consumers and recent activity.

    Arguments:
        summary: its counts.
        policy: the policy in force.
        sections: the section of the settings that sets each field of the policy: `policy`, a glob, or the
            name of the topic.
        subscriptions: names of the subscriptions that get its messages.
        consumers: consumers that received its messages lately, or wait for some.
        keys: of a topic with ordered or fair keys: up to 100, those that are held first, then those with the
            most messages.
        periods: the last hour, 24 hours and 7 days.
        events: number of the latest events of the log that were read for `consumers` and `periods`.
    """

    summary: TopicSummary
    policy: TopicPolicy
    sections: dict[str, str]
    subscriptions: list[str] = []
    consumers: list[ConsumerReport] = []
    keys: list[KeyCount] = []
    periods: list[TopicPeriod] = []
    events: int = 0


class SubscriptionReport(msgspec.Struct, frozen=True):
    """A subscription with its progress.

    Arguments:
        name: also the topic from which its messages are received.
        topics, headers: its filter; see `SubscriptionFilter`.
        status: `live`, each send adds its copy; `copying`, the owner copies earlier messages from the log;
            `clearing`, the owner empties its topic first.
        position: through which its messages were copied; the end of the log for one that is live.
        behind: number of positions of the log that it has yet to read.
        skipped: number of messages that could not be copied, as their bytes were altered on disk.
        ready, in_flight, dead: number of messages in its topic; `ready` includes delayed messages.
        paused: whether its topic is paused.
        created_at: log time.
        missing_in, differs_in: mailboxes of a namespace that lack it, or have another filter, after a change
            that failed in them; the same change mends it.
        problem: why it can't copy what follows `position`: the error of a commit that can't be read.
    """

    name: str
    topics: tuple[str, ...]
    headers: dict[str, str]
    status: SubscriptionStatus
    position: int
    behind: int
    skipped: int
    ready: int
    in_flight: int
    dead: int
    paused: bool
    created_at: str
    missing_in: tuple[str, ...] = ()
    differs_in: tuple[str, ...] = ()
    problem: str = ""

    @property
    def filter(self) -> SubscriptionFilter:
        """Return its filter."""
        return SubscriptionFilter(self.topics, self.headers)


class RewindReport(msgspec.Struct, frozen=True):
    """The effects of a rewind of a subscription.

    Arguments:
        name: of the subscription.
        position: of the log after which messages are copied again.
        removed: number of messages in its topic that are removed: waiting, in flight and dead.
        copied: number of messages of the log that match.
    """

    name: str
    position: int
    removed: int
    copied: int


class DeletionReport(msgspec.Struct, frozen=True):
    """The effects of the deletion of a subscription.

    Arguments:
        name: of the subscription.
        left: number of messages in its topic, which stay: the sum of `ready`, `in_flight` and `dead`.
        ready, in_flight, dead, behind: numbers of messages. Messages that it has yet to copy (`behind`) will
            not be copied.
    """

    name: str
    left: int
    ready: int
    in_flight: int
    dead: int
    behind: int


LastResult = Literal["waiting", "in_flight", "dead", "settled"]


class ScheduleReport(msgspec.Struct, frozen=True):
    """A schedule with its last and its next run.

    Arguments:
        name: unique in the mailbox.
        paused: whether its ticks are left out.
        topic, cron, timezone, every_ms, missed, headers, content_type, sticky_key, priority: see
            `ScheduleSpec`.
        payload_bytes: size of its payload.
        runs: number of messages that it sent.
        last_run, next_run: log time. There is no next run while it is paused, if no time matches, or if the
            process that reads the mailbox can't compute it: it lacks the extra `schedule`.
        last_message_id: id of the last message that it sent.
        from_code: whether a worker registered it.
        overridden: whether an operator changed it since; a worker changes it again when its code changes.
        created_at, changed_at: log time.
        last_result: what became of the last message: it is `waiting`, `in_flight`, a `dead` letter, or
            `settled`: acked, removed or archived. None if it sent none.
    """

    name: str
    topic: str
    cron: str | None
    timezone: str
    every_ms: int | None
    missed: Missed
    payload_bytes: int
    headers: dict[str, str]
    content_type: str | None
    sticky_key: str | None
    priority: int
    paused: bool
    runs: int
    last_run: str | None
    last_message_id: str | None
    next_run: str | None
    from_code: bool
    overridden: bool
    created_at: str
    changed_at: str
    last_result: LastResult | None = None

    def describe(self) -> str:
        """Return when it sends; see `ScheduleSpec.describe`."""
        return ScheduleSpec(self.topic, self.cron, self.timezone, self.every_ms).describe()


class SearchReport(msgspec.Struct, frozen=True):
    """A saved search.

    Arguments:
        search_id: made of its name and topics.
        query: what the link of the console's search page has after the `?`.
        topics: names and globs that the query names; none if it searches all.
        principal: who saved it; None for a caller without a capability.
        saved_at: log time.
    """

    search_id: str
    name: str
    query: str
    topics: list[str]
    principal: str | None
    saved_at: str


def report_search(id_: str, search: SavedSearch) -> SearchReport:
    """Return a saved search of a mailbox."""
    topics = [*search.topics]
    return SearchReport(
        id_, search.name, search.query, topics, search.principal, rfc3339(search.saved_at) or ""
    )


def report_searches(searches: Searches) -> list[SearchReport]:
    """Return the saved searches of a mailbox, sorted by name."""
    reports = [report_search(*each) for each in searches.items()]
    return sorted(reports, key=lambda each: (each.name.casefold(), each.topics))


class RedriveMessage(msgspec.Struct, frozen=True):
    """The outcome of a message that a redrive job selected.

    Arguments:
        topic: None if retention removed the message from the log.
        outcome: `undone` if the job was undone and the message is a dead letter again.
        reason: why it was skipped; see `SkipReason`.
        copy_id: id of the copy that was sent in its place, if the job sends copies.
        at: log time.
        status: what became of it, or of its copy, until now; None if retention removed it from the log.
    """

    message_id: str
    topic: str | None
    outcome: Outcome
    reason: str | None
    copy_id: str | None
    at: str
    status: str | None = None


class RedriveReport(msgspec.Struct, frozen=True):
    """A redrive job with its progress.

    Arguments:
        job_id: UUID of the job.
        spec: what it selects and does.
        status: running, paused, completed, cancelled, undoing or undone.
        cutoff: position of the log up to which messages must have been dead-lettered to be selected; messages
            that wait must have been sent by then.
        matched: number of messages that matched when it was started.
        moved: number of messages that it redrove, archived, purged, cancelled or rescheduled.
        skipped: number of messages that matched, but had changed when the job reached them.
        restored: number of messages that are dead letters again after undo.
        retained: number of messages that undo left alone, as they had been received or removed.
        principal: who started the job; None for a caller without a capability.
        started_at, changed_at: log time.
    """

    mailbox: str
    job_id: str
    status: str
    spec: RedriveSpec
    cutoff: int
    matched: int
    moved: int
    skipped: int
    restored: int
    retained: int
    principal: str | None
    started_at: str
    changed_at: str

    @property
    def is_active(self) -> bool:
        """Return whether the job is running or being undone."""
        return self.status in ("running", "undoing")


def report_of(mailbox: str, job: RedriveJob) -> RedriveReport:
    """Return the report of a job."""
    return RedriveReport(
        mailbox,
        message_id(job.job),
        str(job.status),
        job.spec,
        job.cutoff,
        job.matched,
        job.moved,
        job.skipped,
        job.restored,
        job.retained,
        job.principal,
        rfc3339(job.started_at) or "",
        rfc3339(job.changed_at) or "",
    )
