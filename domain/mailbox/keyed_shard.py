"""Shards of topics with ordered keys, and with fair keys."""

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from itertools import islice, takewhile

from postroom.domain.mailbox.key_ring import KeyRing
from postroom.domain.mailbox.queues import MAX_STALE, SHORT, Queue, by_position
from postroom.domain.message import READY, Message


class KeyedShard:
    """Queue of a topic with ordered keys: of each key, only its oldest message may be delivered (ADR 0115).

    The oldest message of each key waits in the queue that the topic would have without ordered keys, unless a
    message of the key is in flight or, if dead letters hold their keys, dead. The others wait behind it; some
    may be delivered together with it. So messages in flight come before all others of their key, unless a
    redrive or another policy puts earlier ones before them.

    Arguments:
        heads: the queue of the oldest messages, and of those without a key.
    """

    __slots__ = ("_behind", "_behind_size", "_gone", "_heads", "_held", "_in_flight", "_queue", "in_flight")

    def __init__(self, heads: Queue) -> None:
        self.in_flight = 0
        self._queue = heads
        self._heads: dict[str, Message] = {}
        self._behind: dict[str, list[Message] | deque[Message]] = {}
        self._behind_size = 0
        # Positions of the entries of deques whose messages were removed; the first entry is none of them.
        self._gone: set[int] = set()
        self._in_flight: dict[str, list[Message]] = {}
        self._held: Counter[str] = Counter()

    @property
    def size(self) -> int:
        """Count the messages that `shard_capacity` bounds: ready, delayed and in flight (svc-mailbox I-5)."""
        return self.in_flight + self._queue.size + self._behind_size

    @property
    def held_keys(self) -> Collection[str]:
        """Return the keys whose messages wait for a dead letter to be redriven or removed."""
        return self._held.keys()

    def count_behind(self, key: str) -> int:
        """Count the messages that wait behind one of their key that is in flight or holds it."""
        return sum(1 for _ in self._live(key))

    def count_keys(self) -> Iterator[tuple[str, int]]:
        """Yield the keys with the number of their messages that wait; a key may be yielded twice."""
        for key in self._heads:
            yield key, 1
        for key, waiting in self._behind.items():
            yield key, self.count_behind(key) if self._gone else len(waiting)

    def enqueue(self, message: Message, now: int) -> None:
        """Add a message to the queue, delayed if its `due` is after `now` (µs)."""
        key = message.sticky_key
        if key is None:
            self._queue.enqueue(message, now)
            return
        head = self._heads.get(key)
        if self._is_blocked(key) or (head is not None and head.position < message.position):
            self._wait(message, key)
            return
        if head is not None:
            self._queue.dequeue(head)
            self._wait(head, key)
        self._heads[key] = message
        self._queue.enqueue(message, now)

    def enqueue_new(self, messages: Sequence[Message], now: int) -> None:
        """Add messages that were just sent without delay, in the order of their positions."""
        self._queue.enqueue_new(list(filter(self._is_first, messages)), now)

    def restore(self, messages: Sequence[Message], now: int) -> None:
        """Add messages, in the order of their positions, to an empty queue as `enqueue` does one by one."""
        self._queue.restore(list(filter(self._is_first, messages)), now)

    def dequeue(self, message: Message, now: int) -> None:
        """Remove a waiting message at `now` (µs)."""
        self._remove(message)
        if message.sticky_key is not None:
            self._advance(message.sticky_key, now)

    def deliver(self, message: Message) -> None:
        """Remove a waiting message, which is in flight from now on."""
        self._remove(message)
        self.restore_in_flight(message)

    def restore_in_flight(self, message: Message) -> None:
        """Count a message in flight that does not wait."""
        self.in_flight += 1
        if message.sticky_key is not None:
            insort(self._in_flight.setdefault(message.sticky_key, []), message, key=by_position)

    def end_delivery(self, message: Message, now: int) -> None:
        """End a delivery at `now` (µs)."""
        self.in_flight -= 1
        key = message.sticky_key
        if key is not None:
            some = self._in_flight[key]
            del some[bisect_left(some, message.position, key=by_position)]
            if not some:
                del self._in_flight[key]
                self._advance(key, now)

    def end_deliveries(self, messages: Sequence[Message], now: int) -> None:
        """End deliveries at `now` (µs)."""
        for message in messages:
            self.end_delivery(message, now)

    def hold(self, message: Message) -> None:
        """Hold the messages of a dead letter's key."""
        key = message.sticky_key
        if key is None:
            return
        self._held[key] += 1
        head = self._heads.pop(key, None)
        if head is not None:
            self._queue.dequeue(head)
            self._wait(head, key)

    def unhold(self, message: Message, now: int) -> None:
        """Stop holding the messages of a key for a message that is no dead letter any more, at `now` (µs)."""
        key = message.sticky_key
        if key is not None:
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]
                self._advance(key, now)

    def followers(self, key: str, count: int, now: int) -> list[Message]:
        """Return up to `count` messages that may be delivered together with the oldest one of a key.

        Arguments:
            now: log time (µs).
        """
        waiting = islice(self._live(key), count)
        return list(takewhile(lambda each: each.due <= now < each.expires_at, waiting))

    def in_flight_of(self, message: Message) -> Sequence[Message]:
        """Return the messages of its ordered key that are in flight, in their order."""
        return () if message.sticky_key is None else self._in_flight.get(message.sticky_key, ())

    def may_settle(self, message: Message) -> bool:
        """Return whether a delivered message may be settled before the earlier messages of its ordered key.

        While it is in flight, earlier ones that are also in flight must be settled first; one that was
        redriven since is delivered after it. After its time-out, all earlier ones must be settled first.
        """
        key = message.sticky_key
        if key is None:
            return True
        others = [next(iter(self._in_flight.get(key, ())), message)]
        if message.status == READY:
            if key in self._held:
                return False
            others += [self._heads.get(key, message), next(iter(self._behind.get(key, ())), message)]
        return all(message.position <= other.position for other in others)

    def is_head(self, message: Message) -> bool:
        """Return whether a waiting message is the oldest of its key, and nothing blocks the key."""
        return message.sticky_key is None or self._heads.get(message.sticky_key) is message

    def ready(self, now: int) -> Iterator[Message]:
        """Yield the messages that may be delivered at `now` (µs), in their order; remove none."""
        return self._queue.ready(now)

    def next_due(self) -> int | None:
        """Return the µs at which the first delayed message becomes ready, or None."""
        return self._queue.next_due()

    def _remove(self, message: Message) -> None:
        key = message.sticky_key
        if key is None:
            self._queue.dequeue(message)
        elif self._heads.get(key) is message:
            del self._heads[key]
            self._queue.dequeue(message)
        else:
            waiting = self._behind[key]
            self._behind_size -= 1
            if isinstance(waiting, list):
                del waiting[bisect_left(waiting, message.position, key=by_position)]
            else:  # a removal from its middle would move half of it
                self._gone.add(message.position)
            self._drop_gone(key, waiting)

    def _live(self, key: str) -> Iterator[Message]:
        """Return the messages of a key that wait behind another."""
        waiting, gone = self._behind.get(key, ()), self._gone
        return (each for each in waiting if each.position not in gone) if gone else iter(waiting)

    def _drop_gone(self, key: str, waiting: list[Message] | deque[Message]) -> None:
        """Drop the entries before the first message, and all others if they outnumber the messages."""
        gone = self._gone
        while waiting and waiting[0].position in gone:
            gone.remove(waiting[0].position)
            del waiting[0]
        if not waiting:
            del self._behind[key]
        if len(gone) > 2 * self._behind_size + MAX_STALE:
            for each, some in self._behind.items():
                if not isinstance(some, list):
                    self._behind[each] = deque(self._live(each))
            gone.clear()

    def _is_blocked(self, key: str) -> bool:
        return key in self._in_flight or key in self._held

    def _is_first(self, message: Message) -> bool:
        """Add a new message as the oldest of its key, or behind others; return whether it is the oldest."""
        key = message.sticky_key
        if key is None:
            return True
        if key in self._heads or self._is_blocked(key):
            self._wait(message, key)
            return False
        self._heads[key] = message
        return True

    def _wait(self, message: Message, key: str) -> None:
        self._behind_size += 1
        if message.position in self._gone:
            self._gone.remove(message.position)
            return
        waiting = self._behind.get(key)
        if waiting is None:
            self._behind[key] = [message]
            return
        if len(waiting) == SHORT:
            waiting = self._behind[key] = deque(waiting)
        if waiting[-1].position < message.position:
            waiting.append(message)
        elif message.position < waiting[0].position:
            waiting.insert(0, message)
        else:
            waiting.insert(bisect_left(waiting, message.position, key=by_position), message)

    def _advance(self, key: str, now: int) -> None:
        """Put the next message of a key into the queue of deliverable ones, unless the key is blocked."""
        if key not in self._behind or key in self._heads or self._is_blocked(key):
            return
        waiting = self._behind[key]
        head = self._heads[key] = waiting[0]
        del waiting[0]
        self._behind_size -= 1
        self._drop_gone(key, waiting)
        self._queue.enqueue(head, now)


class FairShard:
    """Shard of a topic with fair keys: it counts its messages, which wait in the ring of the topic."""

    __slots__ = ("_ring", "_waiting", "in_flight")

    def __init__(self, ring: KeyRing) -> None:
        self._ring = ring
        self._waiting = 0
        self.in_flight = 0

    @property
    def size(self) -> int:
        """Count the messages that `shard_capacity` bounds: ready, delayed and in flight (svc-mailbox I-5)."""
        return self._waiting + self.in_flight

    def enqueue(self, message: Message, now: int) -> None:
        """Add a message, delayed if its `due` is after `now` (µs)."""
        self._waiting += 1
        self._ring.add(message, now)

    def enqueue_new(self, messages: Sequence[Message], now: int) -> None:
        """Add messages that were just sent without delay, in the order of their positions."""
        for message in messages:
            self.enqueue(message, now)

    def restore(self, messages: Sequence[Message], now: int) -> None:
        """Add messages, in the order of their positions, to an empty shard."""
        self.enqueue_new(messages, now)

    def dequeue(self, message: Message, now: int = 0) -> None:
        """Remove a waiting message."""
        self._waiting -= 1
        self._ring.remove(message)

    def deliver(self, message: Message) -> None:
        """Remove a waiting message, which is in flight from now on."""
        self.dequeue(message)
        self.in_flight += 1

    def restore_in_flight(self, message: Message) -> None:
        """Count a message in flight that does not wait."""
        self.in_flight += 1
        self._ring.restore_in_flight(message.sticky_key)

    def end_delivery(self, message: Message, now: int) -> None:
        """End a delivery at `now` (µs)."""
        self.in_flight -= 1
        self._ring.end_delivery(message.sticky_key, now)

    def end_deliveries(self, messages: Sequence[Message], now: int) -> None:
        """End deliveries at `now` (µs)."""
        for message in messages:
            self.end_delivery(message, now)

    def ready(self, now: int) -> Iterator[Message]:
        """Yield the messages of the topic that may be delivered at `now` (µs), in turns; remove none."""
        return self._ring.ready(now)

    def next_due(self) -> int | None:
        """Return when a delay of the topic ends, or a limit allows another delivery (µs); None for never."""
        return self._ring.next_due()
