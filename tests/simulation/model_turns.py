"""Model of the turns of keys, and of the deliveries that limits allow."""

from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from math import inf
from typing import Any

from tests.simulation.model_state import DEAD, IN_FLIGHT, MS, READY, Message, Topic

Tokens = float | Fraction


class Turns:
    """Turns and tokens of topics with fair keys or limits; times are µs of log time."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, str | None], tuple[Tokens, int]] = {}
        """Tokens of topics, whose key is None, and of keys, at the time of their latest delivery."""
        self.overtaken: dict[str, dict[str | None, Counter[str | None]]] = {}
        """By topic: how often each other key was served while a key waited."""

    def allowed(self, topic: str, key: str | None, policy: Any, now: int) -> Tokens:
        """Return the tokens of a key, or of the whole topic."""
        rate = policy.rate if key is None else policy.rate_per_key
        if not rate:
            return inf
        burst = policy.rate_burst or rate
        tokens, at = self.tokens.get((topic, key), (Fraction(burst), now))
        return min(Fraction(burst), tokens + Fraction((now - at) * rate, policy.rate_period_ms * MS))

    def deliver(
        self,
        message: Message,
        waiting: Iterable[str | None],
        policy: Any,
        now: int,
        *,
        goes_on: bool,
        counted_as: str,
    ) -> None:
        """Take the tokens of a delivery, and check that no key waited for the second turn of another one.

        Arguments:
            waiting: the keys that could be served instead.
            goes_on: whether the message was delivered in the turn of the one before.
            counted_as: its topic, or the name of all topics that share the limit.
        """
        key, topic = message.sticky_key, message.topic
        for limited in {None, key}:
            name = counted_as if limited is None else topic
            tokens = self.allowed(name, limited, policy, now)
            assert tokens >= 1, f"{message.id} was delivered above the rate of {limited or topic}"
            if tokens != inf:
                self.tokens[name, limited] = (tokens - 1, now)
        overtaken = self.overtaken.setdefault(topic, {})
        overtaken.pop(key, None)
        if not policy.fair_keys or goes_on:
            return
        for other in set(waiting) - {key}:
            counts = overtaken.setdefault(other, Counter())
            counts[key] += 1
            turn = 1 if key is None else policy.key_weights.get(key, 1)
            assert counts[key] <= turn, f"{key} was served {counts[key]} times while {other} waited"

    def forget(self, topic: str, waiting: Iterable[str | None]) -> None:
        """Forget how long keys waited that no longer do."""
        overtaken = self.overtaken.get(topic, {})
        for key in set(overtaken) - set(waiting):
            del overtaken[key]

    def restart(self) -> None:
        """Begin the turns anew, as a mailbox does that was loaded again."""
        self.overtaken.clear()

    def change_policy(self, topic: str, before: Any, after: Any, now: int, counted_as: str) -> None:
        """Keep the tokens within the new bursts, those that were shared too; turns begin anew."""
        self.overtaken.pop(topic, None)
        if counted_as != topic and (counted_as, None) in self.tokens:
            self.tokens[topic, None] = self.tokens[counted_as, None]
        for (name, key), _ in list(self.tokens.items()):
            if name != topic:
                continue
            rate = after.rate if key is None else after.rate_per_key
            tokens = self.allowed(topic, key, before, now)
            if rate and tokens != inf:
                self.tokens[topic, key] = (min(tokens, Fraction(after.rate_burst or rate)), now)
            else:
                del self.tokens[topic, key]


class KeyRules:
    """Part of the model: which messages the keys and limits of a topic allow to deliver."""

    now: int
    topics: dict[str, Topic]
    policies: dict[str, Any]
    messages: dict[str, Message]
    turns: Turns

    def _is_deliverable(self, message: Message) -> bool:
        return self._may_be_delivered(message) and self._has_turn(message)

    def _may_be_delivered(self, message: Message) -> bool:
        raise NotImplementedError

    def _precedence(self, message: Message) -> tuple[Fraction, int]:
        raise NotImplementedError

    def _has_turn(self, message: Message) -> bool:
        """Return whether a message is the oldest of its ordered key, and none of the key blocks it."""
        policy = self.topics[message.topic].policy
        if not policy.ordered_keys or message.sticky_key is None:
            return True
        holding = (IN_FLIGHT, DEAD) if policy.dead_letters_hold_keys else (IN_FLIGHT,)
        return not any(
            other.state in holding or (other.state == READY and other.rank < message.rank)
            for other in self.messages.values()
            if other.sticky_key == message.sticky_key
            and other.topic == message.topic
            and other is not message
        )

    def _with_followers(self, heads: list[Message]) -> list[Message]:
        """Return each message with those of its ordered key that may be delivered together with it."""
        return [message for head in heads for message in (head, *self._followers(head))]

    def _followers(self, head: Message) -> list[Message]:
        policy = self.topics[head.topic].policy
        if not policy.ordered_keys or head.sticky_key is None:
            return []
        others = [m for m in self._in_topic(head.topic, head.sticky_key) if m.state in (READY, IN_FLIGHT)]
        followers: list[Message] = []
        for message in sorted((m for m in others if m.rank > head.rank), key=lambda m: m.rank):
            if not self._may_be_delivered(message) or len(followers) + 1 == policy.key_batch:
                break
            followers.append(message)
        return followers[: policy.key_batch - 1]

    def _ends_first(self, message: Message) -> Message | None:
        """Return an earlier message of its ordered key that must be acked before, if there is one."""
        policy = self.topics[message.topic].policy
        if not policy.ordered_keys or message.sticky_key is None:
            return None
        states = [IN_FLIGHT] if message.state == IN_FLIGHT else [IN_FLIGHT, READY]
        own = self._in_topic(message.topic, message.sticky_key)
        is_held = message.state == READY and policy.dead_letters_hold_keys
        return next(
            (
                other
                for other in own
                if (other.rank < message.rank and other.state in states) or (is_held and other.state == DEAD)
            ),
            None,
        )

    def _take_back(self, message: Message) -> None:
        """Return the later messages of an ordered key to the queue, as an earlier one in flight has ended."""
        policy = self.topics[message.topic].policy
        is_over = message.state == DEAD and not policy.dead_letters_hold_keys
        if not policy.ordered_keys or message.sticky_key is None or is_over:
            return
        for other in self._in_topic(message.topic, message.sticky_key):
            if other.state == IN_FLIGHT and other.rank > message.rank:
                other.state, other.delivery, other.due = READY, None, self.now
                other.attempt -= 1
                other.hidden_until_true = 0

    def _check_order_of_keys(self, topic: str, got: list[Message]) -> list[Message]:
        """Check that each key is served in its order; return the messages that could follow."""
        leftover = []
        for key in self._waiting_keys(topic):
            waiting = [m for m in self._in_topic(topic, key) if self._is_deliverable(m)]
            waiting = self._with_followers(sorted(waiting, key=self._precedence))
            taken = [m for m in got if m.sticky_key == key]
            assert taken == waiting[: len(taken)], f"key {key} was not served in order"
            if len(taken) < self._allowed_by_key(topic, key):
                leftover += waiting[len(taken) : len(taken) + 1]
        return leftover

    def _waiting_keys(self, topic: str) -> set[str | None]:
        """Return the keys of which a message can be delivered; the limits of the topic apply, too."""
        keys = {m.sticky_key for m in self.messages.values() if m.topic == topic and self._is_deliverable(m)}
        return {key for key in keys if self._allowed_by_key(topic, key) >= 1}

    def forget_turns(self) -> None:
        """Let keys that do not wait any more begin anew."""
        for name, topic in self.topics.items():
            if topic.policy.fair_keys:
                self.turns.forget(name, self._waiting_keys(name))

    def _allowed_by_key(self, topic: str, key: str | None) -> float | Fraction:
        if key is None:
            return inf
        policy = self.topics[topic].policy
        room: float = inf
        if policy.max_in_flight_per_key:
            in_flight = sum(m.state == IN_FLIGHT for m in self._in_topic(topic, key))
            room = policy.max_in_flight_per_key - in_flight
        return min(room, self.turns.allowed(topic, key, policy, self.now))

    def counted_as(self, topic: str) -> str:
        """Return what a topic counts as: those without a policy of their own may share the limits."""
        is_shared = topic in self.topics and self.topics[topic].policy.shared_limits
        return "shared" if is_shared and topic not in self.policies else topic

    def _allowed_by_topic(self, topic: str, policy: Any) -> float | Fraction:
        room: float = inf
        if policy.max_in_flight:
            counted_as = self.counted_as(topic)
            in_flight = sum(
                m.state == IN_FLIGHT and self.counted_as(m.topic) == counted_as
                for m in self.messages.values()
            )
            room = max(0, policy.max_in_flight - in_flight)
        tokens = self.turns.allowed(self.counted_as(topic), None, policy, self.now)
        return min(room, tokens if tokens == inf else int(tokens))

    def _in_topic(self, topic: str, key: str | None) -> list[Message]:
        return [m for m in self.messages.values() if (m.topic, m.sticky_key) == (topic, key)]
