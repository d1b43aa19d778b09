"""Shard of a topic with priorities."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from operator import attrgetter

from postroom.domain.mailbox.keyed_shard import Queue
from postroom.domain.message import Message

by_ready_time = attrgetter("ready_at", "position")
"""Order in which messages of one priority are delivered."""


class PriorityShard:
    """Queue of a topic with priorities: a FIFO queue for each priority in use, at most eleven.

    A message counts one priority higher for each `aging` that it has been ready. As all messages age alike,
    their order does not change while they wait: a message is ordered as if it had been ready `aging` earlier
    for each of its priorities, and nothing that becomes ready later than that passes it (ADR 0048).
    """

    __slots__ = ("_aging", "_new_queue", "_queues", "in_flight")

    def __init__(self, aging: int, new_queue: Callable[[], Queue]) -> None:
        """Initialise with the time (µs) that counts as one priority, and a factory of FIFO queues."""
        self._aging = aging
        self._new_queue = new_queue
        self._queues: dict[int, Queue] = {}
        self.in_flight = 0

    @property
    def size(self) -> int:
        """Count the messages that `shard_capacity` bounds: ready, delayed and in flight (svc-mailbox I-5)."""
        return self.in_flight + sum(queue.size for queue in self._queues.values())

    def enqueue(self, message: Message, now: int) -> None:
        """Add a message to the queue, delayed if its `due` is after `now` (µs)."""
        self._queue(message.priority).enqueue(message, now)

    def enqueue_new(self, messages: Sequence[Message], now: int) -> None:
        """Add messages that were just sent without delay, in the order of their positions."""
        for message in messages:
            self.enqueue(message, now)

    def restore(self, messages: Sequence[Message], now: int) -> None:
        """Add messages, in the order of their positions, to an empty queue as `enqueue` does one by one."""
        by_priority: defaultdict[int, list[Message]] = defaultdict(list)
        for message in messages:
            by_priority[message.priority].append(message)
        for priority, some in by_priority.items():
            self._queue(priority).restore(some, now)

    def dequeue(self, message: Message) -> None:
        """Remove a waiting message."""
        self._queues[message.priority].dequeue(message)

    def dequeue_all(self, messages: Sequence[Message]) -> None:
        """Remove waiting messages."""
        for message in messages:
            self.dequeue(message)

    def ready(self, now: int) -> Iterator[Message]:
        """Yield the messages that may be delivered at `now` (µs), most urgent first; remove none."""
        return merge(*(queue.ready(now) for queue in self._queues.values()), key=self.rank)

    def next_due(self) -> int | None:
        """Return the µs at which the first delayed message becomes ready, or None."""
        times = (queue.next_due() for queue in self._queues.values())
        return min((time for time in times if time is not None), default=None)

    def _queue(self, priority: int) -> Queue:
        queue = self._queues.get(priority)
        if queue is None:
            queue = self._queues[priority] = self._new_queue()
        return queue

    def rank(self, message: Message) -> tuple[int, int]:
        """Return the sort key of a message that may be delivered."""
        return message.ready_at - message.priority * self._aging, message.position
