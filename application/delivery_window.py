"""Flow control of streams: how many of their deliveries may be unsettled at a time."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import time_ns

from postroom.application.messages import ReceivedMessage
from postroom.domain.errors import NotFound, Rejected, StaleReceipt
from postroom.domain.message import Receipt

MIN_WAIT_SECONDS = 0.05
_NEVER = 1 << 63


class DeliveryWindow:
    """The unsettled deliveries of one stream.

    A delivery whose visibility timeout has ended takes no room, as its message is redelivered.

    Arguments:
        capacity: maximum number of them.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._due: dict[Receipt, int] = {}
        """Visibility deadline (µs) by receipt."""
        self._next_due = _NEVER
        """Time (µs) before which no deadline passes."""
        self.settled = asyncio.Event()
        """Set when a delivery is settled."""

    @property
    def room(self) -> int:
        """Return how many messages may be delivered now."""
        now = _now_us()
        if now >= self._next_due:
            self._due = {receipt: due for receipt, due in self._due.items() if due > now}
            self._next_due = min(self._due.values(), default=_NEVER)
        return self._capacity - len(self._due)

    @property
    def unsettled(self) -> list[Receipt]:
        """Return the receipts of the unsettled deliveries."""
        return list(self._due)

    def add(self, messages: Iterable[ReceivedMessage]) -> None:
        """Count the messages about to be delivered."""
        for message in messages:
            self._set_due(message.receipt, message.visible_at_us)

    def settle(self, receipt: Receipt) -> None:
        """Count a delivery no longer."""
        if self._due.pop(receipt, None) is not None:
            self.settled.set()

    def extend(self, receipt: Receipt, visibility_ms: int) -> None:
        """Count a delivery for longer."""
        if receipt in self._due:
            self._set_due(receipt, _now_us() + visibility_ms * 1_000)

    def seconds_until_room(self, most: float) -> float:
        """Return how long to wait for `settled` before looking again, while there is no room.

        Arguments:
            most: maximum.
        """
        next_due = (min(self._due.values(), default=0) - _now_us()) / 1e6
        return min(most, max(next_due, MIN_WAIT_SECONDS))

    def _set_due(self, receipt: Receipt, due: int) -> None:
        self._due[receipt] = due
        self._next_due = min(self._next_due, due)


class DeliveryWindows:
    """The windows of all open streams of a service; each learns of the settlements of its surfaces."""

    def __init__(self) -> None:
        self._windows: set[DeliveryWindow] = set()

    @contextmanager
    def open(self, capacity: int) -> Iterator[DeliveryWindow]:
        """Open a window for the duration of a stream."""
        window = DeliveryWindow(capacity)
        self._windows.add(window)
        try:
            yield window
        finally:
            self._windows.discard(window)

    def settle(self, receipts: Sequence[Receipt]) -> None:
        """Count deliveries no longer."""
        for window in self._windows:  # mostly there are none
            for receipt in receipts:
                window.settle(receipt)

    def extend(self, receipts: Sequence[Receipt], visibility_ms: int) -> None:
        """Count deliveries for longer."""
        for window in self._windows:
            for receipt in receipts:
                window.extend(receipt, visibility_ms)


def finished_receipts(receipts: Sequence[Receipt], answers: Sequence[Rejected | None]) -> list[Receipt]:
    """Return the receipts of the deliveries that are over, now or before, by the answers to acks or nacks."""
    over = (StaleReceipt, NotFound)
    return [
        receipt
        for receipt, answer in zip(receipts, answers, strict=True)
        if answer is None or isinstance(answer, over)
    ]


def extended_receipts(receipts: Sequence[Receipt], answers: Sequence[Rejected | None]) -> list[Receipt]:
    """Return the receipts of the deliveries that were extended."""
    return [receipt for receipt, answer in zip(receipts, answers, strict=True) if answer is None]


def _now_us() -> int:
    return time_ns() // 1_000
