"""`SimulatePolicy`: replay history under another policy; compare dead letters, deliveries and queueing."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from math import ceil
from typing import NamedTuple

import msgspec

from postroom.application.mailbox.codec import decode_events
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.mailbox_past import read_mailbox_past, to_us
from postroom.application.query_results import Moment
from postroom.domain.mailbox.events import MailboxEvent, OwnershipTaken, StoredSettings
from postroom.domain.message import MessageSent
from postroom.domain.message_history import MessageHistory, begin, follow, take_over
from postroom.domain.policy import Changes, TopicPolicy
from postroom.domain.policy_grid import effect_of
from postroom.domain.policy_simulation import Outcome, observe, simulate
from postroom.domain.record import Event
from postroom.domain.search import topic_matches
from postroom.domain.settings import resolve_policy

PROGRESS_EVENTS = 10_000

ASSUMPTIONS = """\
The n-th delivery of a message has its recorded outcome, duration and pick-up delay.
Messages do not affect each other.
Jitter is preserved and rescaled to the new policy; delays that were not recorded get theirs from a hash.
A delivery that was not recorded has an unknown outcome: the best case assumes that it succeeds, the worst
case that it and all later ones fail as the last recorded one did.
Redrives and purges happen at the recorded times. Deliveries recorded after a redrive determine the outcomes
of deliveries at that time or later.
"""


class Figures(msgspec.Struct, frozen=True):
    """Totals over all messages; times in ms, percentiles by nearest rank.

    Arguments:
        settled, dead, removed, waiting: number of messages by final status; their sum is all messages.
        dead_lettered: number of messages that were dead-lettered at least once.
        queued_p50_ms, queued_p95_ms, queued_max_ms: time ready, delayed or in flight, summed over redrives.
    """

    settled: int
    dead: int
    removed: int
    waiting: int
    dead_lettered: int
    deliveries: int
    queued_p50_ms: float
    queued_p95_ms: float
    queued_max_ms: float


class Comparison(msgspec.Struct, frozen=True):
    """The recorded history, compared with the best and the worst case under the changes.

    Arguments:
        unchanged: number of messages with the recorded outcome in both cases.
        avoided: dead-lettered messages that are settled in both cases.
        pending: dead-lettered messages that are still waiting at the end of the log in both cases.
        caused: messages that were not dead-lettered, and are in both cases.
        undecided: messages with deliveries that were not recorded in the worst case.
        more_deliveries: the number of these deliveries.
    """

    messages: int
    unchanged: int
    avoided: int
    pending: int
    caused: int
    undecided: int
    more_deliveries: int
    observed: Figures
    best: Figures
    worst: Figures
    assumptions: str


class Replay(NamedTuple):
    """A comparison, and the part of the log that was replayed for it.

    Arguments:
        events: number of the latest events of the log that were replayed.
        log_events: number of all of them.
    """

    comparison: Comparison
    events: int
    log_events: int


class _Totals:
    """Sums over the outcomes of messages."""

    def __init__(self) -> None:
        self._outcomes = {"settled": 0, "dead": 0, "removed": 0, "waiting": 0}
        self._dead_lettered = 0
        self._deliveries = 0
        self._queued = array("q")

    def add(self, outcome: Outcome) -> None:
        """Add the outcome of one message."""
        self._outcomes[outcome.status] += 1
        self._dead_lettered += outcome.dead_letterings > 0
        self._deliveries += outcome.deliveries
        self._queued.append(outcome.queued)

    def figures(self) -> Figures:
        """Return the totals."""
        queued = sorted(self._queued) or [0]
        median, most, longest = (queued[ceil(rank * len(queued)) - 1] / 1_000 for rank in (0.5, 0.95, 1.0))
        return Figures(
            dead_lettered=self._dead_lettered,
            deliveries=self._deliveries,
            queued_p50_ms=median,
            queued_p95_ms=most,
            queued_max_ms=longest,
            **self._outcomes,
        )


class Simulation:
    """Accumulated comparison of the messages of one or more mailboxes."""

    def __init__(self, changes: Changes) -> None:
        """Take the changes."""
        self._changes = changes
        self._totals = _Totals(), _Totals(), _Totals()
        self._counts = dict.fromkeys(
            ("messages", "unchanged", "avoided", "pending", "caused", "undecided"), 0
        )
        self._more_deliveries = 0

    def add(self, history: MessageHistory, end: int) -> None:
        """Simulate one message until `end` (µs), and add its outcomes.

        Arguments:
            history: of a message.
            end: log time of the end of the log, µs since 1970 UTC.
        """
        observed = observe(history, end)
        best, worst = simulate(history, self._changes, end)
        for totals, outcome in zip(self._totals, (observed, best, worst), strict=True):
            totals.add(outcome)
        counts = self._counts
        counts["messages"] += 1
        counts["undecided"] += worst.assumed > 0
        effect = effect_of(observed, best, worst)
        if effect != "other":
            counts[effect] += 1
        self._more_deliveries += worst.assumed

    def comparison(self) -> Comparison:
        """Return the comparison of all messages added so far."""
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
    """A replay of a mailbox's history under another policy; needs no ownership and no read model.

    Messages whose `MessageSent` retention removed are left out.
    """

    def __init__(self, log: EventLogReader) -> None:
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
            start, end: include messages sent from `start` on and before `end`.
            topics: include topics that match one of these names or globs; all when empty.
            progress: called with the position, every 10,000 events.

        Raises: BrokenLog when the log contains a commit that this version can't read.
        """
        log = self._log
        head = log.head()
        if head is None:
            return
        first = self._position_from(start, 1)
        before = self._position_from(end, head.position + 1)
        settings = read_mailbox_past(log, head.position, head.at).settings_before(first)
        histories = _Histories(first, before, tuple(topics), settings)
        after = first - 1
        for position, epoch, event in _events(log, after, head.position):
            history = histories.add(position, epoch, event)
            if history is not None:
                simulation.add(history, head.at)
            if position % PROGRESS_EVENTS == 0:
                progress(position)
        for history in histories.unsettled.values():
            simulation.add(history, head.at)

    def replay_latest(self, changes: Changes, events: int, topics: Sequence[str] = ()) -> Replay:
        """Compare the messages that were sent within the latest events of the log.

        Arguments:
            topics: names or globs; all when empty.
        """
        simulation = Simulation(changes)
        head = self._log.head()
        last = 0 if head is None else head.position
        first = max(1, last - events + 1, self._log.first_position() or 1)
        self(simulation, start=first, topics=topics)
        return Replay(simulation.comparison(), max(0, last - first + 1), last)

    def _position_from(self, moment: Moment | None, default: int) -> int:
        """Return the first position at or after a moment."""
        if moment is None:
            return default
        if isinstance(moment, datetime):
            return self._log.position_before(to_us(moment)) + 1
        return max(1, moment)


def _events(log: EventLogReader, after: int, through: int) -> Iterator[tuple[int, int, Event]]:
    """Yield position, epoch and event of the log after one position and through another."""
    for commit in log.commits(after, envelopes=False):
        for position, event in enumerate(decode_events(commit), commit.first):
            if position > through:
                return
            if position > after:
                yield position, commit.epoch, event


class _Histories:
    """Histories of the selected messages, built event by event."""

    def __init__(self, first: int, before: int, topics: tuple[str, ...], settings: StoredSettings) -> None:
        self.unsettled: dict[bytes, MessageHistory] = {}
        self._first = first
        self._before = before
        self._topics = topics
        self._settings = settings
        self._policies: dict[str, TopicPolicy] = {}

    def add(self, position: int, epoch: int, event: Event) -> MessageHistory | None:
        """Add an event; return the history of the message that it settles, if any."""
        if isinstance(event, MessageSent):
            self._begin(event, position, epoch)
        elif event.stream in self.unsettled:
            history = self.unsettled[event.stream]
            follow(history, event, position, epoch, self._policy(history.topic))  # type: ignore[arg-type]
            if history.is_settled:
                return self.unsettled.pop(event.stream)
        elif isinstance(event, MailboxEvent):
            if isinstance(event, OwnershipTaken):
                for history in self.unsettled.values():
                    take_over(history, event, position)
            self._settings = self._settings.after(event)
            self._policies.clear()
        return None

    def _policy(self, topic: str) -> TopicPolicy:
        if topic not in self._policies:
            self._policies[topic] = resolve_policy(self._settings.settings, topic)
        return self._policies[topic]

    def _begin(self, event: MessageSent, position: int, epoch: int) -> None:
        is_selected = not self._topics or any(topic_matches(topic, event.topic) for topic in self._topics)
        if self._first <= position < self._before and is_selected and event.due is not None:
            self.unsettled[event.stream] = begin(event, position, epoch, self._policy(event.topic))
