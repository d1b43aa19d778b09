"""What if: what another retry policy would have made of a message, as far as its history tells.

History says when a message was sent, how long consumers took to pick it up, and for each delivery how it
ended and how long the consumer worked. It can't say what would have come of a delivery that never was. So
there are two answers, and as far as the model holds the truth lies between them: `best` lets the first
delivery that nobody observed succeed, `worst` lets all of them fail as the last observed one did. Where both
are the same, history decides. What is taken as given (the ADR says why):

- The n-th delivery ends as it did, after as long a work, whenever it is made; consumers pick a message up as
  long after it is ready as they did then. Messages do not get into each other's way.
- A pause keeps its luck: it is scaled by what the policies allow for its attempt. One beyond what the policy
  in force allowed was the consumer's own wish, and stays. The luck of a pause that never was is a hash of
  message and attempt, so that every run, and every policy, draws the same.
- Operators did what they did when they did it: what is a dead letter by then is redriven or purged. What came
  after a redrive also tells how a delivery at that time or later would have ended.
- A shorter visibility ends a delivery that took longer. Its consumer's ack still counts if nobody received
  the message again, which is unknown where nobody could. A longer one may have let a delivery succeed that
  timed out, which is unknown too.
"""

from typing import Literal, NamedTuple

import msgspec
from blake3 import blake3

from postroom.domain.course import Course, Delivery, Round
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import MS
from postroom.domain.policy import MIN_VISIBILITY_MS, TopicPolicy, backoff_ms

Outcome = Literal["settled", "dead", "removed", "waiting"]
MAX_ATTEMPTS = 1_000
"""More than this is not simulated: each attempt costs a step."""


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """What would have been different; None for what stays as it was. Durations in ms.

    Raises: InvalidRequest when made with a value out of bounds.
    """

    max_attempts: int | None = None
    backoff_base_ms: int | None = None
    backoff_max_ms: int | None = None
    visibility_ms: int | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value, least = getattr(self, name), MIN_VISIBILITY_MS if name == "visibility_ms" else 1
            if value is not None and value < least:
                raise InvalidRequest(f"{name} must be at least {least}; it was {value}.")
        if self.max_attempts is not None and self.max_attempts > MAX_ATTEMPTS:
            raise InvalidRequest(f"max_attempts must be at most {MAX_ATTEMPTS}; it was {self.max_attempts}.")

    def made_to(self, policy: TopicPolicy) -> TopicPolicy:
        """Return a policy with these changes."""
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return msgspec.structs.replace(policy, **given)


class Fate(msgspec.Struct):
    """What became of a message, or would have.

    Arguments:
        outcome: how it stands at the end.
        deliveries: how often it was delivered.
        deaths: how often it became a dead letter.
        queued: µs that it spent ready, delayed or in flight; time as a dead letter does not count.
        assumed: deliveries, of those above, whose end history does not tell.
    """

    outcome: Outcome = "waiting"
    deliveries: int = 0
    deaths: int = 0
    queued: int = 0
    assumed: int = 0


def observe(course: Course, end: int) -> Fate:
    """Return what became of a message until `end` (µs)."""
    fate = Fate(deliveries=len(course.deliveries))
    for each in course.rounds:
        until = end
        if each.death is not None:
            fate.deaths += 1
            until = each.death.mark.at
        elif course.is_settled:
            latest = each.deliveries[-1] if each.deliveries else None
            if course.removal is not None:
                until = course.removal.mark.at
            elif latest is not None and latest.late_ack is not None:
                until = latest.late_ack.at
            elif latest is not None and latest.ending is not None:
                until = latest.ending.mark.at
        fate.queued += until - each.mark.at
    if course.removal is not None:
        fate.outcome = "removed"
    elif course.is_settled:
        fate.outcome = "settled"
    elif course.rounds[-1].death is not None:
        fate.outcome = "dead"
    return fate


def simulate(course: Course, changes: Changes, default_policy: TopicPolicy, end: int) -> tuple[Fate, Fate]:
    """Return the best and the worst that the changes would have made of a message until `end` (µs).

    Arguments:
        course: what happened to the message; no other message's is needed, so they may be simulated anywhere.
        default_policy: what its topic promised where the log does not say.
    """
    best, worst = (_Replay(course, changes, default_policy, end, hope).run() for hope in (True, False))
    return best, worst


class _Replay:
    """One run of one message under the changes."""

    def __init__(
        self, course: Course, changes: Changes, default_policy: TopicPolicy, end: int, hope: bool
    ) -> None:
        self.course = course
        self.changes = changes
        self.policy = default_policy
        self.end = end
        self.hope = hope
        self.fate = Fate()
        # What is played back: a round of history, and how many of its deliveries were.
        self.round = 0
        self.played = 0

    @property
    def history(self) -> Round:
        return self.course.rounds[self.round]

    def run(self) -> Fate:
        died = self._stay()
        while died is not None:
            self.fate.deaths += 1
            rounds = self.course.rounds
            later = (n for n in range(self.round + 1, len(rounds)) if rounds[n].mark.at >= died)
            redriven = next(later, None)
            if redriven is None:
                removal = self.course.removal
                if removal is not None and removal.mark.at >= died:
                    self.fate.outcome = "removed"
                return self.fate
            self.round, self.played = redriven, 0
            died = self._stay()
        return self.fate

    def _stay(self) -> int | None:
        """Let the message live through one stay in the queue; return when (µs) it died of it, or None."""
        entered = self.history
        began = ready_since = entered.mark.at
        available, attempt = entered.due, 0
        last: Delivery | None = None
        late_ack: int | None = None
        while True:
            known, picked_up = self._pick_up(available, last)
            left = self._leave(known, picked_up, ready_since, entered.expires_at, late_ack, last)
            if left is not None:
                return self._finish(*left, began)
            attempt += 1
            self.fate.deliveries += 1
            if known is not None:
                self.played += 1
                last = known
                if known.ending is not None and known.ending.policy is not None:
                    self.policy = known.ending.policy
            assert last is not None  # without evidence, only what was delivered before is delivered
            end = self._deliver(last, picked_up) if known is not None else self._assume(last, picked_up)
            if end.how == "open" or end.at > self.end:
                return self._finish("waiting", self.end, began)
            if end.how == "acked":
                return self._finish("settled", end.at, began)
            if self._is_last(attempt, known, end.how):
                return self._finish("dead", end.at, began)
            ready_since, late_ack = end.at, end.late_ack
            available = end.at + (self._pause(attempt, known) if end.how == "nacked" else 0)

    def _finish(self, outcome: Outcome, at: int, began: int) -> int | None:
        if at > self.end:
            outcome, at = "waiting", self.end
        self.fate.queued += at - began
        self.fate.outcome = outcome
        return at if outcome == "dead" else None

    # -- waiting ---

    def _pick_up(self, available: int, last: Delivery | None) -> tuple[Delivery | None, int]:
        """Return the observed delivery that comes next, if any, and when it would be made."""
        if self.played == len(self.history.deliveries):
            when = available + (last.mark.at - last.available if last is not None else 0)
            later = self.course.rounds[self.round + 1] if self.round + 1 < len(self.course.rounds) else None
            if later is None or not later.deliveries or when < later.mark.at or self._is_idle(when, last):
                return None, when
            self.round, self.played = self.round + 1, 0
        known = self.history.deliveries[self.played]
        return known, available + known.mark.at - known.available

    def _leave(
        self,
        known: Delivery | None,
        picked_up: int,
        ready_since: int,
        expires_at: int,
        late_ack: int | None,
        last: Delivery | None,
    ) -> tuple[Outcome, int] | None:
        """Return how and when a waiting message leaves before it is picked up, or None where it does not."""
        removal, death = self.course.removal, self.history.death
        expiry = max(ready_since, expires_at)
        idle = known is None and self._is_idle(picked_up, last)
        if idle:
            is_too_late = death is not None and death.reason in ("ttl_expired", "retention_expired")
            expiry = death.mark.at if death is not None and is_too_late else self.end + 1
        elif known is None and late_ack is not None and self.hope and late_ack < expiry:
            idle = True  # nobody receives it again before that
        ends: list[tuple[int, Outcome]] = [(expiry, "dead")]
        if late_ack is not None:
            ends.append((late_ack, "settled"))
        if idle and death is not None and death.reason == "integrity":
            ends.append((max(ready_since, death.mark.at), "dead"))
        if removal is not None and self.course.rounds[-1].death is None and removal.mark.at >= ready_since:
            # What happened in one group bears one time: the deliveries came before.
            ends.append((removal.mark.at + (not idle), "removed"))
        at, outcome = min(ends)
        if idle or at <= picked_up:
            return outcome, at
        return ("waiting", self.end) if picked_up > self.end else None

    def _is_idle(self, picked_up: int, last: Delivery | None) -> bool:
        """Tell whether history says that nobody received the message from then on, though it was ready."""
        if last is None:
            return True
        if last is not self.history.deliveries[-1] or last.ending is None or last.ending.due is None:
            return False
        return picked_up >= last.ending.due

    # -- being delivered ---

    def _deliver(self, known: Delivery, at: int) -> "_End":
        """Return how an observed delivery ends when it is made at `at`."""
        usual, deadline = known.deadline - known.mark.at, self._deadline(known)
        ending = known.ending
        if ending is None:
            return self._leave_open(known, at, deadline)
        if ending.how != "timed_out":
            worked = ending.mark.at - known.mark.at
            if deadline >= usual or worked < deadline:
                return _End(ending.how, at + worked)
            return _End("timed_out", at + deadline, at + worked if ending.how == "acked" else None)
        noticed = at + deadline + ending.mark.at - known.deadline
        if known.late_ack is not None:
            worked = known.late_ack.at - known.mark.at
            return (
                _End("acked", at + worked) if worked < deadline else _End("timed_out", noticed, at + worked)
            )
        if deadline > usual:
            self.fate.assumed += 1
            if self.hope:
                return _End("acked", at + usual)
        return _End("timed_out", noticed)

    def _leave_open(self, known: Delivery, at: int, deadline: int) -> "_End":
        """Return the end of a delivery of which history knows only that nothing had ended it so far."""
        silent = self.end - known.mark.at
        if known.deadline <= self.end:  # overdue, but nobody was there to notice
            return _End("open", self.end)
        if deadline <= silent:
            return _End("timed_out", at + deadline)
        if at >= known.mark.at:
            return _End("open", self.end)
        self.fate.assumed += 1
        return _End("acked", at + silent) if self.hope else _End("timed_out", at + deadline)

    def _assume(self, last: Delivery, at: int) -> "_End":
        """Return the end of a delivery that never was: well after as long a work, or as badly as the last."""
        self.fate.assumed += 1
        deadline = self._deadline(last)
        how = last.ending.how if last.ending is not None else "timed_out"
        worked = (last.ending.mark.at if last.ending is not None else self.end) - last.mark.at
        if self.hope:
            return _End("acked", at + min(worked, deadline))
        if how == "nacked" and worked < deadline:
            return _End("nacked", at + worked)
        return _End("timed_out", at + deadline, at + worked if how == "acked" else None)

    def _deadline(self, delivery: Delivery) -> int:
        """Return for how many µs the delivery is hidden under the changes."""
        usual = delivery.deadline - delivery.mark.at
        if self.changes.visibility_ms is None:
            return usual
        visibility = self.changes.visibility_ms * MS
        if not delivery.extensions:
            return usual + visibility - delivery.visibility
        if visibility >= delivery.visibility:
            return usual
        if delivery.extensions[0].mark.at - delivery.mark.at >= visibility:  # too late to extend it
            return visibility
        return min(usual, visibility * self.policy.in_flight_retention_visibilities)

    def _is_last(self, attempt: int, known: Delivery | None, how: str) -> bool:
        death = self.history.death
        if death is not None and death.reason == "rejected" and known is self.history.deliveries[-1]:
            return True
        if self.changes.max_attempts is not None:
            return attempt >= self.changes.max_attempts
        ending = known.ending if known is not None and known.attempt == attempt else None
        if ending is not None and ending.how == how:
            return ending.due is None
        return attempt >= self.policy.max_attempts

    def _pause(self, attempt: int, known: Delivery | None) -> int:
        """Return for how many µs a nacked delivery hides the message."""
        after = self.changes.made_to(self.policy)
        ending = known.ending if known is not None else None
        if known is None or ending is None or ending.due is None:
            return backoff_ms(after, attempt, _luck(self.course.stream, attempt)) * MS
        pause = ending.due - ending.mark.at
        ceiling = backoff_ms(self.policy, known.attempt, 1.0) * MS
        if pause > ceiling:
            return pause
        return pause * backoff_ms(after, attempt, 1.0) * MS // ceiling


class _End(NamedTuple):
    """How a delivery ends and when (µs); one that is `open` does not. `late_ack`: when that would come."""

    how: Literal["acked", "nacked", "timed_out", "open"]
    at: int
    late_ack: int | None = None


def _luck(stream: bytes, attempt: int) -> float:
    """Return a number in [0, 1) that is always the same for a message's attempt."""
    return int.from_bytes(blake3(stream + attempt.to_bytes(4, "big")).digest(6), "big") / (1 << 48)
