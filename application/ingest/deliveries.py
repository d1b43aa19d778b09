"""Unsettled deliveries of a source whose broker can neither time out nor delay a delivery."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from postroom.application.ports.source import SourceMessage


class DeliveryToken(NamedTuple):
    """Identification of a delivery: the message, and which of its deliveries it is.

    Arguments:
        position: identifies the message among the unsettled ones.
        delivered: number of this delivery, counted from 1.
        generation: distinguishes the owners of a position, such as the assignments of a partition.
    """

    position: tuple[int, int]
    delivered: int
    generation: int


class _UnsettledMessage(msgspec.Struct):
    """A message that was delivered, and when it is delivered again."""

    message: SourceMessage
    due_at: float


class Deliveries:
    """Deliveries that were not settled, each of which is repeated after its ack wait or its delay.

    All times are of one monotonic clock, in seconds.

    Arguments:
        ack_wait_ms: how long a delivery may stay unsettled before the message is redelivered.
    """

    def __init__(self, ack_wait_ms: int) -> None:
        self._ack_wait = ack_wait_ms / 1_000
        self._unsettled: dict[tuple[int, int], _UnsettledMessage] = {}
        self._next_due = math.inf

    def __len__(self) -> int:
        return len(self._unsettled)

    @property
    def next_due(self) -> float:
        """Return a time before which no message is redelivered."""
        return self._next_due

    def add(self, message: SourceMessage, now: float) -> None:
        """Add a message that is delivered for the first time."""
        self._unsettled[message.token.position] = _UnsettledMessage(message, self._plan(now + self._ack_wait))

    def take_due(self, limit: int, now: float) -> list[SourceMessage]:
        """Return up to `limit` messages to deliver again, as deliveries of their own."""
        if now < self._next_due:
            return []
        due = [each for each in self._unsettled.values() if each.due_at <= now][:limit]
        for each in due:
            token = each.message.token
            delivered = token.delivered + 1
            each.message = msgspec.structs.replace(
                each.message, delivered=delivered, token=token._replace(delivered=delivered)
            )
            each.due_at = now + self._ack_wait
        self._next_due = min((each.due_at for each in self._unsettled.values()), default=math.inf)
        return [each.message for each in due]

    def settle(self, messages: Iterable[SourceMessage]) -> list[DeliveryToken]:
        """Forget acked messages, and return the tokens of those that were unsettled.

        An ack of an earlier delivery counts, because the message was stored.
        """
        tokens = []
        for message in messages:
            unsettled = self._unsettled.get(message.token.position)
            if unsettled is not None and unsettled.message.token.generation == message.token.generation:
                del self._unsettled[message.token.position]
                tokens.append(message.token)
        return tokens

    def delay(self, messages: Sequence[SourceMessage], delay_ms: int, now: float) -> None:
        """Redeliver messages after a delay; those of earlier deliveries are skipped."""
        self._set_due(messages, now + delay_ms / 1_000)

    def extend(self, messages: Sequence[SourceMessage], now: float) -> None:
        """Restart the ack wait of deliveries; those of earlier deliveries are skipped."""
        self._set_due(messages, now + self._ack_wait)

    def forget(self, generations: Iterable[int]) -> None:
        """Forget messages that somebody else delivers."""
        gone = set(generations)
        for position, unsettled in list(self._unsettled.items()):
            if unsettled.message.token.generation in gone:
                del self._unsettled[position]

    def _set_due(self, messages: Sequence[SourceMessage], due_at: float) -> None:
        for message in messages:
            unsettled = self._unsettled.get(message.token.position)
            if unsettled is not None and unsettled.message.token == message.token:
                unsettled.due_at = self._plan(due_at)

    def _plan(self, due_at: float) -> float:
        self._next_due = min(self._next_due, due_at)
        return due_at
