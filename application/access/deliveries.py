"""Deliveries made to the bearers of capabilities, until they are settled."""

from collections.abc import Iterable
from typing import NamedTuple

from postroom.application.messages import ReceivedMessage
from postroom.domain.message import Receipt

CAPACITY = 65_536


class Delivery(NamedTuple):
    """A delivery: to which capability, of which topic, and until when (µs since 1970 UTC)."""

    nonce: bytes
    topic: str
    due: int


class Deliveries:
    """The newest deliveries in flight.

    They give the topic of a receipt, and tell whose deliveries may be settled although the capability has
    expired or was revoked meanwhile (svc-mailbox I-15).

    Arguments:
        capacity: maximum number of them; the oldest are forgotten first.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._deliveries: dict[Receipt, Delivery] = {}
        self._counts: dict[bytes, int] = {}

    def add(self, nonce: bytes, messages: Iterable[ReceivedMessage], now: int) -> None:
        """Add deliveries at `now`, µs since 1970 UTC."""
        for message in messages:
            self.settle(message.receipt)
            self._deliveries[message.receipt] = Delivery(nonce, message.topic, message.visible_at_us)
            self._counts[nonce] = self._counts.get(nonce, 0) + 1
        while self._deliveries:
            oldest = next(iter(self._deliveries))
            if len(self._deliveries) <= self._capacity and self._deliveries[oldest].due > now:
                return
            self.settle(oldest)

    def get(self, receipt: Receipt) -> Delivery | None:
        """Return a delivery; None if it is unknown or settled."""
        return self._deliveries.get(receipt)

    def has_any(self, nonce: bytes) -> bool:
        """Return whether a capability may have deliveries in flight."""
        return nonce in self._counts

    def settle(self, receipt: Receipt) -> None:
        """Forget a delivery."""
        delivery = self._deliveries.pop(receipt, None)
        if delivery is not None:
            self._counts[delivery.nonce] -= 1
            if not self._counts[delivery.nonce]:
                del self._counts[delivery.nonce]

    def extend(self, receipt: Receipt, due: int) -> None:
        """Note that a delivery lasts until `due`, µs since 1970 UTC."""
        delivery = self._deliveries.get(receipt)
        if delivery is not None:
            self._deliveries[receipt] = delivery._replace(due=due)
