"""Policy simulation: the outcome of a message under another retry policy, bounded by its history.

The history has the send time of a message, the delay of each receive, and the duration and outcome of each
delivery. Deliveries that did not take place have no known outcome, so the simulation returns two: in the best
case, the first such delivery succeeds; in the worst case, all of them fail as the last actual one did. The
model's assumptions (ADR 0019):

- The n-th delivery has the outcome and duration of the n-th actual one, and is received after the same
  delay. Messages do not affect each other.
- Jitter is preserved and rescaled to the new policy. A delay above the maximum of the policy was chosen by
  the consumer and is unchanged. The jitter of a delay that did not occur is a hash of message and attempt.
- Operators redrive and purge dead letters, reschedule waiting messages and remove messages when they actually
  did. Deliveries after a redrive also determine the outcomes of deliveries at that time or later.
- A delivery that was rejected is rejected after the same duration, even if it has timed out by then.
- A shorter visibility times out a delivery that took longer. Its late ack still counts unless the message was
  received again. With a longer visibility, a delivery that timed out may have succeeded.
"""

from typing import Literal, NamedTuple

import msgspec
from blake3 import blake3

from postroom.domain.message import MS, ExpiryReason
from postroom.domain.message_history import LogPosition, MessageHistory, PastDelivery, Round
from postroom.domain.policy import Changes, TopicPolicy, backoff_ms

FinalStatus = Literal["settled", "dead", "removed", "waiting"]
_FROM_QUEUE: tuple[ExpiryReason, ...] = ("cancelled", "superseded")
"""Reasons for removing messages that are ready or in flight, but not dead letters."""
_FROM_ANYWHERE: tuple[ExpiryReason, ...] = ("erased", "rewound")
"""Reasons for removing messages in any status."""


class Outcome(msgspec.Struct):
    """Actual or simulated outcome of a message.

    Arguments:
        status: final status.
        deliveries: number of deliveries.
        dead_letterings: number of times it was dead-lettered.
        queued: µs spent ready, delayed or in flight, without time as a dead letter.
        assumed: number of deliveries with an assumed outcome.
    """

    status: FinalStatus = "waiting"
    deliveries: int = 0
    dead_letterings: int = 0
    queued: int = 0
    assumed: int = 0


def observe(history: MessageHistory, end: int) -> Outcome:
    """Return the actual outcome of a message at `end` (µs)."""
    outcome = Outcome(deliveries=len(history.deliveries))
    for each in history.rounds:
        until = end
        if each.dead_lettering is not None:
            outcome.dead_letterings += 1
            until = each.dead_lettering.entry.at
        elif history.is_settled:
            latest = each.deliveries[-1] if each.deliveries else None
            if history.removal is not None:
                until = history.removal.entry.at
            elif latest is not None and latest.late_ack is not None:
                until = latest.late_ack.at
            elif latest is not None and latest.outcome is not None:
                until = latest.outcome.entry.at
        outcome.queued += until - each.entry.at
    if history.removal is not None:
        outcome.status = "removed"
    elif history.is_settled:
        outcome.status = "settled"
    elif history.rounds[-1].dead_lettering is not None:
        outcome.status = "dead"
    return outcome


def simulate(history: MessageHistory, changes: Changes, end: int) -> tuple[Outcome, Outcome]:
    """Return the best and the worst outcome of a message under the changes at `end` (µs).

    Arguments:
        history: of the message; messages are simulated independently.
    """
    if is_unaffected(history, changes):
        return observe(history, end), observe(history, end)
    best, worst = (_Replay(history, changes, end, optimistic).run() for optimistic in (True, False))
    return best, worst


def is_unaffected(history: MessageHistory, changes: Changes) -> bool:
    """Return whether a message has its actual outcome under any changes with this visibility or a longer one.

    That is known without a simulation where it was delivered at most once, and acked in time.
    """
    if len(history.rounds) != 1 or history.removal is not None or len(history.rounds[0].deliveries) > 1:
        return False
    for delivery in history.rounds[0].deliveries:
        outcome = delivery.outcome
        if outcome is None or outcome.kind != "acked" or delivery.extensions or delivery.takeovers:
            return False
        visibility = delivery.visibility if changes.visibility_ms is None else changes.visibility_ms * MS
        if visibility < delivery.visibility and outcome.entry.at - delivery.entry.at >= visibility:
            return False
    return True


class _Replay:
    """Simulation of one message under the changes."""

    def __init__(self, history: MessageHistory, changes: Changes, end: int, optimistic: bool) -> None:
        self.history = history
        self.changes = changes
        self.policy = history.policy or TopicPolicy()
        self.end = end
        self.optimistic = optimistic
        self.outcome = Outcome()
        # Time (µs) up to which a delivery may be in flight, and the status of the message then.
        self.in_flight_until: tuple[int, FinalStatus] = (end, "waiting")
        removal = history.removal
        if removal is not None and removal.reason in _FROM_QUEUE + _FROM_ANYWHERE:
            self.in_flight_until = removal.entry.at, "removed"
        # Index of the current round, and the number of its deliveries replayed so far.
        self.round = 0
        self.replayed = 0

    @property
    def recorded_round(self) -> Round:
        return self.history.rounds[self.round]

    def run(self) -> Outcome:
        dead_at = self._simulate_round()
        while dead_at is not None:
            self.outcome.dead_letterings += 1
            rounds = self.history.rounds
            later = (n for n in range(self.round + 1, len(rounds)) if rounds[n].entry.at >= dead_at)
            redriven = next(later, None)
            if redriven is None:
                removal = self.history.removal
                if removal is not None and removal.entry.at >= dead_at and removal.reason not in _FROM_QUEUE:
                    self.outcome.status = "removed"
                return self.outcome
            self.round, self.replayed = redriven, 0
            dead_at = self._simulate_round()
        return self.outcome

    def _simulate_round(self) -> int | None:
        """Simulate one round in the queue; return when (µs) the message was dead-lettered, or None."""
        recorded = self.recorded_round
        began = ready_since = recorded.entry.at
        first = recorded.deliveries[0] if recorded.deliveries else recorded
        available, attempt = first.available, 0
        last: PastDelivery | None = None
        late_ack: int | None = None
        while True:
            actual, received_at = self._next_delivery(available, ready_since, last)
            undelivered = self._leave_queue(actual, received_at, ready_since, recorded.expiry, late_ack, last)
            if undelivered is not None:
                return self._finish(*undelivered, began)
            attempt += 1
            self.outcome.deliveries += 1
            if actual is not None:
                self.replayed += 1
                last = actual
                if actual.outcome is not None and actual.outcome.policy is not None:
                    self.policy = actual.outcome.policy
            assert last is not None  # the first delivery is always an actual one
            end = self._deliver(last, received_at) if actual is not None else self._assume(last, received_at)
            until, status = self.in_flight_until
            if end.kind == "open" or end.at > until:
                return self._finish(status, until, began)
            if end.kind == "acked":
                return self._finish("settled", end.at, began)
            if end.kind == "released":
                attempt -= 1
            elif self._is_last(attempt, actual, end.kind):
                return self._finish("dead", end.at, began)
            elif actual is not None and (rejected := self._rejection(actual)) is not None:
                return self._finish("dead", max(end.at, received_at + rejected.at - actual.entry.at), began)
            ready_since, late_ack = end.at, end.late_ack
            available = end.at + (0 if end.kind == "timed_out" else self._pause(attempt, actual))

    def _finish(self, status: FinalStatus, at: int, began: int) -> int | None:
        if at > self.end:
            status, at = "waiting", self.end
        self.outcome.queued += at - began
        self.outcome.status = status
        return at if status == "dead" else None

    # -- waiting ---

    def _next_delivery(
        self, available: int, ready_since: int, last: PastDelivery | None
    ) -> tuple[PastDelivery | None, int]:
        """Return the next actual delivery, if any, and the time (µs) of the next simulated one."""
        if self.replayed == len(self.recorded_round.deliveries):
            when = available + (last.entry.at - last.available if last is not None else 0)
            later = self.history.rounds[self.round + 1] if self.round + 1 < len(self.history.rounds) else None
            if later is None or not later.deliveries or when < later.entry.at or self._is_idle(when, last):
                return None, when
            self.round, self.replayed = self.round + 1, 0
        actual = self.recorded_round.deliveries[self.replayed]
        delay = actual.entry.at - actual.available
        received_at = available + delay
        if last is not None:
            due = last.outcome.due if last.outcome is not None else None
            # No consumer received it from `due` on, until it was rescheduled.
            idle_until = actual.entry.at if due is not None and available >= due else 0
            for each in self.recorded_round.reschedulings:
                if ready_since <= each.entry.at < max(idle_until, received_at):
                    received_at = each.due + delay
        return actual, received_at

    def _leave_queue(
        self,
        actual: PastDelivery | None,
        received_at: int,
        ready_since: int,
        expires_at: int,
        late_ack: int | None,
        last: PastDelivery | None,
    ) -> tuple[FinalStatus, int] | None:
        """Return the status and time (µs) at which the message leaves the queue undelivered, or None."""
        removal, recorded = self.history.removal, self.recorded_round.dead_lettering
        expiry = max(ready_since, expires_at)
        idle = actual is None and self._is_idle(received_at, last)
        if idle:
            expiry = self.end + 1 if recorded is None else max(ready_since, recorded.entry.at)
        elif actual is None and late_ack is not None and self.optimistic and late_ack < expiry:
            idle = True  # the ack comes before the next receive
        ends: list[tuple[int, FinalStatus]] = [(expiry, "dead")]
        if late_ack is not None:
            ends.append((late_ack, "settled"))
        if removal is not None and removal.entry.at >= ready_since:
            was_dead = self.history.rounds[-1].dead_lettering is not None
            was_dead = was_dead and removal.reason not in _FROM_ANYWHERE
            # Events of one group have the same time; the deliveries came first.
            if not was_dead and (idle or removal.entry.at < received_at):
                ends.append((removal.entry.at, "removed"))
        at, status = min(ends)
        if idle or at <= received_at:
            return status, at
        return ("waiting", self.end) if received_at > self.end else None

    def _is_idle(self, received_at: int, last: PastDelivery | None) -> bool:
        """Return whether the message was not received after `received_at` (µs) although it was ready."""
        if last is None:
            return True
        if last is not self.recorded_round.deliveries[-1] or last.outcome is None or last.outcome.due is None:
            return False
        return received_at >= last.outcome.due

    # -- being delivered ---

    def _deliver(self, actual: PastDelivery, at: int) -> "_End":
        """Return the outcome of an actual delivery that takes place at `at` (µs)."""
        actual_timeout, deadline = actual.deadline - actual.entry.at, self._deadline(actual)
        outcome = actual.outcome
        if outcome is None:
            return self._deliver_open(actual, at, deadline)
        if outcome.kind != "timed_out":
            duration = outcome.entry.at - actual.entry.at
            if deadline >= actual_timeout or duration < deadline:
                return _End(outcome.kind, at + duration)
            return _End("timed_out", at + deadline, at + duration if outcome.kind == "acked" else None)
        timeout_at = at + deadline + outcome.entry.at - actual.deadline
        late_ack = actual.late_ack
        late = late_ack if late_ack is not None else self._rejection(actual)
        if late is not None:
            duration = late.at - actual.entry.at
            if duration < deadline:
                return _End("nacked" if late_ack is None else "acked", at + duration)
            return _End("timed_out", timeout_at, None if late_ack is None else at + duration)
        if deadline > actual_timeout:
            self.outcome.assumed += 1
            if self.optimistic:
                return _End("acked", at + actual_timeout)
        return _End("timed_out", timeout_at)

    def _deliver_open(self, actual: PastDelivery, at: int, deadline: int) -> "_End":
        """Return the outcome of a delivery that is in flight at the end of the history or when removed."""
        until, _ = self.in_flight_until
        elapsed = until - actual.entry.at
        if actual.deadline <= until:  # overdue, but no owner was running
            return _End("open", until)
        if deadline <= elapsed:
            return _End("timed_out", at + deadline)
        if at >= actual.entry.at:
            return _End("open", until)
        self.outcome.assumed += 1
        return _End("acked", at + elapsed) if self.optimistic else _End("timed_out", at + deadline)

    def _assume(self, last: PastDelivery, at: int) -> "_End":
        """Return the assumed outcome of a delivery that did not take place."""
        self.outcome.assumed += 1
        deadline = self._deadline(last)
        kind = last.outcome.kind if last.outcome is not None else "timed_out"
        until, _ = self.in_flight_until
        duration = (last.outcome.entry.at if last.outcome is not None else until) - last.entry.at
        if self.optimistic:
            return _End("acked", at + min(duration, deadline))
        if kind in ("nacked", "released") and duration < deadline:  # releases without end would never count
            return _End("nacked", at + duration)
        return _End("timed_out", at + deadline, at + duration if kind == "acked" else None)

    def _deadline(self, delivery: PastDelivery) -> int:
        """Return the visibility (µs) of a delivery under the changes."""
        actual_timeout = delivery.deadline - delivery.entry.at
        if self.changes.visibility_ms is None:
            return actual_timeout
        visibility = self.changes.visibility_ms * MS
        if not delivery.extensions:
            return actual_timeout + visibility - delivery.visibility
        if visibility >= delivery.visibility:
            return actual_timeout
        if delivery.extensions[0].entry.at - delivery.entry.at >= visibility:  # too late to extend
            return visibility
        return min(actual_timeout, visibility * self.policy.in_flight_retention_visibilities)

    def _rejection(self, actual: PastDelivery) -> LogPosition | None:
        """Return when the consumer of an actual delivery rejected it, perhaps after its time-out, or None."""
        dead = self.recorded_round.dead_lettering
        if dead is None or dead.reason != "rejected" or actual is not self.recorded_round.deliveries[-1]:
            return None
        return dead.entry

    def _is_last(self, attempt: int, actual: PastDelivery | None, kind: str) -> bool:
        if self.changes.max_attempts is not None:
            return attempt >= self.changes.max_attempts
        outcome = actual.outcome if actual is not None and actual.attempt == attempt else None
        if outcome is not None and outcome.kind == kind:
            return outcome.due is None
        return attempt >= self.policy.max_attempts

    def _pause(self, attempt: int, actual: PastDelivery | None) -> int:
        """Return the delay (µs) after a delivery that was nacked or released."""
        after = self.changes.apply(self.policy)
        outcome = actual.outcome if actual is not None else None
        if actual is None or outcome is None or outcome.due is None:
            return backoff_ms(after, attempt, _deterministic_jitter(self.history.stream, attempt)) * MS
        pause = outcome.due - outcome.entry.at
        if outcome.kind == "released":
            return pause
        ceiling = backoff_ms(self.policy, actual.attempt, 1.0) * MS
        if pause > ceiling:
            return pause
        return pause * backoff_ms(after, attempt, 1.0) * MS // ceiling


class _End(NamedTuple):
    """Outcome of a simulated delivery, and its time (µs); `open` means in flight."""

    kind: Literal["acked", "nacked", "released", "timed_out", "open"]
    at: int
    late_ack: int | None = None


def _deterministic_jitter(stream: bytes, attempt: int) -> float:
    """Return a pseudo-random number in [0, 1), derived from message and attempt."""
    return int.from_bytes(blake3(stream + attempt.to_bytes(4, "big")).digest(6), "big") / (1 << 48)
