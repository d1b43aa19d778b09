"""Whose turn it is, and how many deliveries the limits of a topic and its keys allow."""

from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from math import inf
from typing import Any

from tests.simulation.model_state import MS, Message

Tokens = float | Fraction


class Turns:
    """What a mailbox may deliver of topics with fair keys or limits; times are µs of log time."""

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

    def deliver(self, message: Message, waiting: Iterable[str | None], policy: Any, now: int) -> None:
        """Take the tokens of a delivery, and check that no key waited for its second one.

        Arguments:
            waiting: the keys that could be served instead.
        """
        key, topic = message.sticky_key, message.topic
        for limited in {None, key}:
            tokens = self.allowed(topic, limited, policy, now)
            assert tokens >= 1, f"{message.id} was delivered above the rate of {limited or topic}"
            if tokens != inf:
                self.tokens[topic, limited] = (tokens - 1, now)
        overtaken = self.overtaken.setdefault(topic, {})
        overtaken.pop(key, None)
        if not policy.fair_keys:
            return
        for other in set(waiting) - {key}:
            counts = overtaken.setdefault(other, Counter())
            counts[key] += 1
            assert counts[key] <= 1, f"{key} was served {counts[key]} times while {other} waited"

    def forget(self, topic: str, waiting: Iterable[str | None]) -> None:
        """Forget how long keys waited that no longer do."""
        overtaken = self.overtaken.get(topic, {})
        for key in set(overtaken) - set(waiting):
            del overtaken[key]

    def restart(self) -> None:
        """Begin the turns anew, as a mailbox does that was loaded again."""
        self.overtaken.clear()

    def change_policy(self, topic: str, before: Any, after: Any, now: int) -> None:
        """Keep the tokens within the new bursts; turns begin anew."""
        self.overtaken.pop(topic, None)
        for (name, key), _ in list(self.tokens.items()):
            if name != topic:
                continue
            rate = after.rate if key is None else after.rate_per_key
            tokens = self.allowed(topic, key, before, now)
            if rate and tokens != inf:
                self.tokens[topic, key] = (min(tokens, Fraction(after.rate_burst or rate)), now)
            else:
                del self.tokens[topic, key]
