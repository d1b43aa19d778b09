"""`SimulatePolicy`: replay history under another policy; compare dead letters, attempts and time in queue."""

from array import array
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import islice, tee
from math import ceil

import msgspec

from postroom.application.codec import to_event, to_events
from postroom.application.fold import fold
from postroom.application.ports.event_log import EventLog
from postroom.application.queries.at import Moment, to_us
from postroom.domain.course import Course, begin, follow, take_over
from postroom.domain.event import Event
from postroom.domain.mailbox.events import OwnershipTaken, TopicPolicySet
from postroom.domain.message import MessageSent
from postroom.domain.names import mailbox_stream
from postroom.domain.policy import TopicPolicy
from postroom.domain.search import topic_matches
from postroom.domain.what_if import Changes, Fate, observe, simulate

PROGRESS_RECORDS = 10_000

ASSUMPTIONS = """\
Each delivery ends as it did, after as long a work, and is made as long after the message is ready.
Messages do not get into each other's way.
Pauses keep their luck, scaled to the other policy; those that never were draw theirs from a hash.
Of a delivery that history knows nothing of, the better figure says that it succeeds, the worse that it and
all that follow fail as the last one did.
Operators redrive and purge what is there when they did; what came after tells of deliveries then and later.
"""


class Figures(msgspec.Struct, frozen=True):
    """What became of the messages together; times in ms, by nearest rank.

    Arguments:
        settled, dead, removed, waiting: how many stand so in the end; together all messages.
        died: how many were dead letters at least once.
        queued_ms: time ready, delayed or in flight, summed over redrives: median, 95th percentile, longest.
    """

    settled: int
    dead: int
    removed: int
    waiting: int
    died: int
    deliveries: int
    queued_p50_ms: float
    queued_p95_ms: float
    queued_max_ms: float


class Comparison(msgspec.Struct, frozen=True):
    """History as it was, and at best and at worst under the changes.

    Arguments:
        unchanged: messages to which exactly the same would have happened.
        spared: messages that died and surely would have been settled.
        pending: messages that died and surely would not have yet, but be waiting when the log ends.
        doomed: messages that did not die and surely would have.
        undecided: messages of which history does not tell all; `more_deliveries` is the most that they
            would have had beyond what it tells.
    """

    messages: int
    unchanged: int
    spared: int
    pending: int
    doomed: int
    undecided: int
    more_deliveries: int
    observed: Figures
    best: Figures
    worst: Figures
    assumptions: str


class _Totals:
    """Add fates up."""

    def __init__(self) -> None:
        self._outcomes = {"settled": 0, "dead": 0, "removed": 0, "waiting": 0}
        self._died = 0
        self._deliveries = 0
        self._queued = array("q")

    def add(self, fate: Fate) -> None:
        """Count one message."""
        self._outcomes[fate.outcome] += 1
        self._died += fate.deaths > 0
        self._deliveries += fate.deliveries
        self._queued.append(fate.queued)

    def figures(self) -> Figures:
        """Return the totals."""
        queued = sorted(self._queued) or [0]
        median, most, longest = (queued[ceil(rank * len(queued)) - 1] / 1_000 for rank in (0.5, 0.95, 1.0))
        return Figures(
            died=self._died,
            deliveries=self._deliveries,
            queued_p50_ms=median,
            queued_p95_ms=most,
            queued_max_ms=longest,
            **self._outcomes,
        )


class Simulation:
    """Compare messages one by one, of one mailbox or of many."""

    def __init__(self, changes: Changes, default_policy: TopicPolicy | None = None) -> None:
        """Take the changes, and what topics promised where the log does not say."""
        self._changes = changes
        self._default_policy = default_policy or TopicPolicy()
        self._totals = _Totals(), _Totals(), _Totals()
        self._counts = dict.fromkeys(("messages", "unchanged", "spared", "pending", "doomed", "undecided"), 0)
        self._more_deliveries = 0

    def add(self, course: Course, end: int) -> None:
        """Simulate one message until `end` (µs)."""
        observed = observe(course, end)
        best, worst = simulate(course, self._changes, self._default_policy, end)
        for totals, fate in zip(self._totals, (observed, best, worst), strict=True):
            totals.add(fate)
        counts = self._counts
        counts["messages"] += 1
        counts["unchanged"] += best == observed == worst
        counts["undecided"] += worst.assumed > 0
        if observed.deaths and not worst.deaths:
            counts["spared"] += worst.outcome == "settled"
            counts["pending"] += best.outcome == worst.outcome == "waiting"
        counts["doomed"] += not observed.deaths and best.deaths > 0
        self._more_deliveries += worst.assumed

    def comparison(self) -> Comparison:
        """Return what all messages amount to."""
        observed, best, worst = (totals.figures() for totals in self._totals)
        return Comparison(
            more_deliveries=self._more_deliveries,
            observed=observed,
            best=best,
            worst=worst,
            assumptions=ASSUMPTIONS,
            **self._counts,
        )


class SimulatePolicy:
    """Replay a mailbox's history under another policy; needs no ownership and no read model.

    Messages whose beginning retention removed are left out.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def __call__(
        self,
        simulation: Simulation,
        *,
        start: Moment | None = None,
        end: Moment | None = None,
        topics: Sequence[str] = (),
        progress: Callable[[int], None] = lambda position: None,
    ) -> None:
        """Add this mailbox's messages to a simulation; each is followed to the end of the log.

        Arguments:
            start, end: only messages sent from `start` on and before `end`.
            topics: only these, names or globs; none means all.
            progress: is told the position reached, now and then.

        Raises: BrokenLog when the log holds what this version can't read.
        """
        log = self._log
        head = log.head()
        if head is None:
            return
        first = self._position_from(start, 1)
        before = self._position_from(end, head.position + 1)
        chosen = _Chosen(first, before, tuple(topics), self._policies_before(first))
        after = first - 1
        rows, again = tee(islice(log.replay(after), max(0, head.position - after)))
        for row, event in zip(rows, to_events(again), strict=True):
            course = chosen.take(row[0], row[3], event)
            if course is not None:
                simulation.add(course, head.at)
            if row[0] % PROGRESS_RECORDS == 0:
                progress(row[0])
        for course in chosen.unsettled.values():
            simulation.add(course, head.at)

    def _position_from(self, moment: Moment | None, default: int) -> int:
        """Return the first position at or after a moment."""
        if moment is None:
            return default
        if isinstance(moment, datetime):
            return self._log.position_before(to_us(moment)) + 1
        return max(1, moment)

    def _policies_before(self, position: int) -> dict[str, TopicPolicy]:
        """Return what topics promised before a position, as far as the log still tells."""
        known = [
            (record.position, event)
            for record in self._log.history(mailbox_stream(self._log.mailbox))
            if isinstance(event := to_event(record), TopicPolicySet)
        ]
        told = {event.topic for _, event in known}
        # Set before all that retention left, and never since.
        policies = {topic: policy for topic, policy in fold(self._log).policies.items() if topic not in told}
        return policies | {event.topic: event.policy for at, event in known if at < position}


class _Chosen:
    """Follow the messages that a simulation is about, from record to record."""

    def __init__(
        self, first: int, before: int, topics: tuple[str, ...], policies: dict[str, TopicPolicy]
    ) -> None:
        self.unsettled: dict[bytes, Course] = {}
        self._first = first
        self._before = before
        self._topics = topics
        self._policies = policies

    def take(self, position: int, epoch: int, event: Event) -> Course | None:
        """Note what happened; return the course of a message that is settled by it."""
        if isinstance(event, MessageSent):
            self._begin(event, position, epoch)
        elif isinstance(event, OwnershipTaken):
            for course in self.unsettled.values():
                take_over(course, event, position)
        elif isinstance(event, TopicPolicySet):
            self._policies[event.topic] = event.policy
        elif event.stream in self.unsettled:
            course = self.unsettled[event.stream]
            follow(course, event, position, epoch, self._policies.get(course.topic))  # type: ignore[arg-type]
            if course.is_settled:
                return self.unsettled.pop(event.stream)
        return None

    def _begin(self, event: MessageSent, position: int, epoch: int) -> None:
        is_chosen = not self._topics or any(topic_matches(topic, event.topic) for topic in self._topics)
        if self._first <= position < self._before and is_chosen and event.due is not None:
            self.unsettled[event.stream] = begin(event, position, epoch)
