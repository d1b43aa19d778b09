"""A queue that serves its keys in turns: deficit round robin (Shreedhar and Varghese, 1995)."""

from collections import OrderedDict, deque
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")


class _Flow(Generic[T]):
    """The items of one key in order of arrival."""

    __slots__ = ("cost", "deficit", "items")

    def __init__(self, deficit: int) -> None:
        self.items: deque[tuple[int, int, T]] = deque()  # arrival, cost, item
        self.cost = 0
        self.deficit = deficit


class FairQueue(Generic[T]):
    """Queue of items by key, in which a key with many items can't starve the others.

    Items of a key keep their order. Keys that have items get the same share of the cost that is served,
    however much each has queued and whatever its items cost (svc-mailbox I-5).

    Arguments:
        capacity: maximum cost of all items.
        quantum: cost that a key may use before it is the next one's turn.
    """

    def __init__(self, capacity: int, quantum: int) -> None:
        self._capacity = capacity
        self._quantum = quantum
        self._flows: OrderedDict[str, _Flow[T]] = OrderedDict()
        self._cost = 0
        self._arrivals = count()

    def __bool__(self) -> bool:
        return bool(self._flows)

    @property
    def cost(self) -> int:
        """Return the cost of all items."""
        return self._cost

    def has_room(self, key: str, cost: int) -> bool:
        """Return whether an item may be pushed.

        A key may use as much as the others leave free, so one alone gets half of the capacity, and a key
        without items finds room. An empty queue takes an item of any cost.
        """
        flow = self._flows.get(key)
        pending = flow.cost if flow is not None else 0
        return not self._flows or pending + cost <= self._capacity - self._cost

    def push(self, key: str, item: T, cost: int) -> None:
        """Append an item.

        Arguments:
            cost: at least 1.
        """
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = _Flow(self._quantum)
        flow.items.append((next(self._arrivals), cost, item))
        flow.cost += cost
        self._cost += cost

    def take(self, limit: float) -> list[T]:
        """Remove items until their cost reaches `limit`, or all; return them in order of arrival."""
        taken: list[tuple[int, int, T]] = []
        while self._flows and limit > 0:
            entry = self._pop()
            taken.append(entry)
            limit -= entry[1]
        taken.sort(key=lambda entry: entry[0])
        return [item for _, _, item in taken]

    def _pop(self) -> tuple[int, int, T]:
        key, flow = next(iter(self._flows.items()))
        while flow.items[0][1] > flow.deficit and len(self._flows) > 1:
            flow.deficit += self._quantum
            self._flows.move_to_end(key)
            key, flow = next(iter(self._flows.items()))
        entry = flow.items.popleft()
        cost = entry[1]
        flow.deficit = max(0, flow.deficit - cost)
        flow.cost -= cost
        self._cost -= cost
        if not flow.items:
            del self._flows[key]
        return entry
