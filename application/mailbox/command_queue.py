"""The queue of a mailbox's commands, fair between topics; receivers that wait (svc-mailbox I-5)."""

import asyncio
import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Generic, TypeVar

from postroom.application.mailbox.groups import (
    GroupEvents,
    LoadedMailbox,
    Request,
    copies_of,
    cost_of,
    topic_of,
)
from postroom.application.metrics import DrainRate
from postroom.application.threads import wait_at_most
from postroom.domain.commit import each_event
from postroom.domain.errors import PostroomError, Saturated
from postroom.domain.mailbox.commands import Ack, Command, Receive, Send
from postroom.domain.mailbox.queues import MAX_STALE
from postroom.domain.mailbox.state import ALL_TOPICS, Mailbox
from postroom.domain.message import MessageAcked, MessageDeadLettered, MessageEvent, MessageExpired

T = TypeVar("T")


class _Flow(Generic[T]):
    """The items of one key in order of arrival."""

    __slots__ = ("cost", "deficit", "items")

    def __init__(self, deficit: int) -> None:
        self.items: deque[tuple[int, int, int, T]] = deque()  # arrival, cost, cost with its extra, item
        self.cost = 0
        self.deficit = deficit


class FairQueue(Generic[T]):
    """Queue of items by key, in which a key with many items can't starve the others.

    Items of a key keep their order. Keys that have items get the same share of the cost that is served,
    however much each has queued and whatever its items cost (svc-mailbox I-5).

    Arguments:
        capacity: maximum cost of all items.
        quantum: cost that a key may use before it is the next one's turn.

    `cost` is the total cost of all items.
    """

    def __init__(self, capacity: int, quantum: int) -> None:
        self._capacity = capacity
        self._quantum = quantum
        self._flows: OrderedDict[str, _Flow[T]] = OrderedDict()
        self.cost = 0
        self._arrivals = count()

    def __bool__(self) -> bool:
        return bool(self._flows)

    def has_room(self, key: str, cost: int) -> bool:
        """Return whether an item may be pushed.

        A key may use as much as the others leave free, so one alone gets half of the capacity, and a key
        without items finds room. An empty queue takes an item of any cost.
        """
        pending = flow.cost if (flow := self._flows.get(key)) is not None else 0
        return not self._flows or pending + cost <= self._capacity - self.cost

    def push(self, key: str, item: T, cost: int, extra: int = 0) -> None:
        """Append an item.

        Arguments:
            cost: at least 1.
            extra: cost of serving the item in addition, which takes no room.
        """
        if (flow := self._flows.get(key)) is None:
            flow = self._flows[key] = _Flow(self._quantum)
        flow.items.append((next(self._arrivals), cost, cost + extra, item))
        flow.cost += cost
        self.cost += cost

    def take(self, limit: float) -> list[T]:
        """Remove items until their cost reaches `limit`, or all; return them in order of arrival."""
        taken: list[tuple[int, int, int, T]] = []
        while self._flows and limit > 0:
            entry = self._pop()
            taken.append(entry)
            limit -= entry[2]
        taken.sort(key=lambda entry: entry[0])
        return [entry[3] for entry in taken]

    def _pop(self) -> tuple[int, int, int, T]:
        key, flow = next(iter(self._flows.items()))
        while flow.items[0][2] > flow.deficit and len(self._flows) > 1:
            flow.deficit += self._quantum
            self._flows.move_to_end(key)
            key, flow = next(iter(self._flows.items()))
        _, cost, whole, _ = entry = flow.items.popleft()
        flow.deficit = max(0, flow.deficit - whole)
        flow.cost -= cost
        self.cost -= cost
        if not flow.items:
            del self._flows[key]
        return entry


GROUP_COST = 400
"""Cost per append: enough to amortise a sync, little enough to decide during the previous append."""
PENDING_COST = 50_000
COPIES_COST = 10 * GROUP_COST
"""Maximum cost of the copies of a request, as it waits for so much of each other topic that is busy."""
TOPIC_QUANTUM = 32
"""Cost of the commands of one topic that are decided before it is the next topic's turn."""


class PendingRequests:
    """Bounded queue of requests, in which topics take turns (svc-mailbox I-5)."""

    def __init__(self, mailbox: str, now: Callable[[], int]) -> None:
        """Initialise with the name of the mailbox, and a function that returns its log time (µs)."""
        self._mailbox = mailbox
        self._now = now
        self._queue: FairQueue[Request] = FairQueue(PENDING_COST, TOPIC_QUANTUM)
        self._drain_rate = DrainRate()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, request: Request, state: LoadedMailbox | None) -> None:
        """Add a request.

        Arguments:
            state: of the mailbox, to find topics of settled messages and subscriptions of topics.

        Raises: Saturated when there is no room.
        """
        topic, cost = topic_of(request.commands, state), cost_of(request.commands)
        if not self._queue.has_room(topic, cost):
            raise Saturated(
                f"Mailbox {self._mailbox} has too many commands pending; retry shortly.",
                self._drain_rate.retry_ms(cost, self._now()),
            )
        mailbox = None if state is None else state.mailbox
        copies = copies_of(request.commands, mailbox) if mailbox and mailbox.subscriptions else 0
        self._queue.push(topic, request, cost, min(copies, COPIES_COST))

    def repeat(self, request: Request) -> None:
        """Add a request that was decided before, to be decided again."""
        self._queue.push(topic_of(request.commands, None), request.for_retry(), cost_of(request.commands))

    def take(self, limit: float = GROUP_COST) -> list[Request]:
        """Remove the requests of the next group, in order of arrival."""
        before = self._queue.cost
        requests = self._queue.take(limit)
        self._drain_rate.record_drain(before - self._queue.cost, self._now())
        return requests

    def take_all(self) -> list[Request]:
        """Remove all requests, in order of arrival."""
        return self.take(math.inf)


_MERGED = (Ack, Send, Receive)
"""Kinds of commands that are decided together, in the order in which those of a group are decided."""


def arrange(requests: Sequence[Request]) -> Iterator[list[int]]:
    """Yield the places of the requests of a group in the order in which they are decided.

    Requests of one kind, of one topic if they send or receive, form a run, in order of arrival: acks make
    room for sends, and receives get what was sent. A request of another kind is decided after those that came
    before it, and before those that came after it.
    """
    runs: dict[tuple[type, str], list[int]] = {}
    for place, request in enumerate(requests):
        run = _run_of(request.commands)
        if run is not None:
            runs.setdefault(run, []).append(place)
            continue
        yield from _in_order(runs)
        yield [place]
        runs = {}
    yield from _in_order(runs)


def _run_of(commands: Sequence[Command]) -> tuple[type, str] | None:
    """Return the kind and the topic of commands that may be decided with others; None for other commands."""
    first = commands[0]
    if type(first) is Receive:
        is_usual = len(commands) == 1 and type(first.topics) is tuple and len(first.topics) == 1
        return (Receive, first.topics[0]) if is_usual else None
    if type(first) is Send:
        topics = [each.topic for each in commands if type(each) is Send]
        return (Send, first.topic) if topics.count(first.topic) == len(commands) else None
    return (Ack, "") if list(map(type, commands)).count(Ack) == len(commands) else None


def _in_order(runs: Mapping[tuple[type, str], list[int]]) -> Iterator[list[int]]:
    return (places for kind in _MERGED for (each, _), places in runs.items() if each is kind)


_ENDS = (MessageAcked, MessageDeadLettered, MessageExpired)
PREFIX_BYTES = 8
"""Bytes that the streams of all messages with one id have in common; see `topic_streams`."""


class EndWatch:
    """Events that ended messages since the watch began, by stream.

    Arguments:
        failure: the reason why no more events will come.
    """

    def __init__(self, failure: PostroomError | None) -> None:
        self.ends: dict[bytes, MessageEvent] = {}
        self.failure = failure
        self.changed = asyncio.Event()

    async def wait(self, seconds: float) -> None:
        """Return at the next event, or after this time; raises the failure if no more events will come."""
        if self.failure is not None:
            raise self.failure
        self.changed.clear()
        await wait_at_most(seconds, self.changed.wait())


def _end(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class LongPolls:
    """Waiting receivers by topic, in order of arrival; a receiver may wait for several topics.

    Only topics that changed or whose time has come are checked, as other topics have no message to deliver.
    `_unchecked` has the topics with a new receiver since the last check, or with messages at that time.
    `_due` has, by topic, the time (µs) at which a delay or a limit ends; `_dues` has the same as a heap,
    whose entries with another time are stale.
    """

    def __init__(self) -> None:
        self._by_topic: dict[str, dict[asyncio.Future[None], Sequence[str]]] = {}
        self._consumers: dict[asyncio.Future[None], tuple[str | None, Sequence[str]]] = {}
        self._unchecked: set[str] = set()
        self._due: dict[str, int] = {}
        self._dues: list[tuple[int, str]] = []
        self.watches: dict[bytes, list[EndWatch]] = {}
        """Watches for the end of a message, by the first bytes of its stream."""
        self._failure: PostroomError | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._by_topic))

    def count(self, topic: str) -> int:
        """Return the number of waiting receivers of a topic."""
        return len(self._by_topic.get(topic, ()))

    def list_receivers(self) -> Iterable[tuple[str | None, Sequence[str]]]:
        """Return the name of the consumer and the topics of each waiting receiver."""
        return self._consumers.values()

    async def wait(self, topics: Sequence[str], wait_ms: int, consumer: str | None = None) -> None:
        """Return when woken, or after `wait_ms`.

        Arguments:
            consumer: name of the receiver.
        """
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        for topic in topics:
            self._by_topic.setdefault(topic, {})[waiter] = topics
        self._consumers[waiter] = consumer, topics
        self._unchecked.update(topics)
        timer = loop.call_later(wait_ms / 1_000, _end, waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():  # woken, but can't receive the message any more
                for topic in topics:
                    self.wake(topic, 1)
            raise
        finally:
            timer.cancel()
            del self._consumers[waiter]
            self._remove(topics, waiter)

    def wake(self, topic: str, count: int) -> None:
        """Wake the `count` receivers of a topic that have waited longest."""
        waiters = self._by_topic.get(topic, {})
        while count > 0 and waiters:
            waiter, topics = next(iter(waiters.items()))
            self._remove(topics, waiter)
            if not waiter.done():  # else it was cancelled
                waiter.set_result(None)
                count -= 1

    def wake_for(self, deliverable: Callable[[str, int], int], mailbox: Mailbox, now: int) -> bool:
        """Wake as many receivers of each topic as it has deliverable messages; return whether there are any.

        Arguments:
            deliverable: returns the number of messages of a topic, up to a limit.
            now: log time, µs.
        """
        is_any = False
        changed, mailbox.changed_topics = mailbox.changed_topics, set()
        if ALL_TOPICS in changed:
            topics = set(self._by_topic)
        else:
            topics = self._unchecked | (changed & self._by_topic.keys())
        while self._dues and self._dues[0][0] <= now:
            at, topic = heapq.heappop(self._dues)
            if self._due.get(topic) == at:
                del self._due[topic]
                topics.add(topic)
        self._unchecked = set()
        for topic in sorted(topics):
            count = self.count(topic)
            if count and (messages := deliverable(topic, count)):
                self.wake(topic, messages)
                self._unchecked.add(topic)  # those who were woken may fail to receive the messages
                is_any = True
            elif count:
                self._set_due(topic, mailbox, now)
        return is_any

    def next_due(self, state: LoadedMailbox, now: int) -> int | None:
        """Return when the next timer of a mailbox is due, or a topic that somebody waits for; None for never.

        Arguments:
            now: log time, µs; so is the result.
        """
        mailbox = state.mailbox
        if mailbox.over_capacity or state.snapshots.is_active:
            return 0
        timer = mailbox.next_timer()
        for topic in self._unchecked & self._by_topic.keys():
            self._set_due(topic, mailbox, now)
        while self._dues:
            at, topic = self._dues[0]
            if self._due.get(topic) == at:
                if topic in self._by_topic:
                    return at if timer is None or at < timer else timer
                del self._due[topic]
            heapq.heappop(self._dues)
        return timer

    def _set_due(self, topic: str, mailbox: Mailbox, now: int) -> None:
        due = mailbox.next_due(topic, now)
        if due is None:
            self._due.pop(topic, None)
        elif self._due.get(topic) != due:
            self._due[topic] = due
            heapq.heappush(self._dues, (due, topic))
            if len(self._dues) > 2 * len(self._due) + MAX_STALE:
                self._dues = [(at, each) for each, at in self._due.items()]
                heapq.heapify(self._dues)

    def wake_all(self, failure: PostroomError) -> None:
        """Wake every receiver, and end every watch with a failure."""
        for topic in self:
            self.wake(topic, self.count(topic))
        self._failure = failure
        for watches in self.watches.values():
            for watch in watches:
                watch.failure = failure
                watch.changed.set()

    @contextmanager
    def watch(self, stream: bytes) -> Iterator[EndWatch]:
        """Watch for the ends of messages with the id of this stream, for the length of a context."""
        watch, prefix = EndWatch(self._failure), stream[:PREFIX_BYTES]
        self.watches.setdefault(prefix, []).append(watch)
        try:
            yield watch
        finally:
            self.watches[prefix].remove(watch)
            if not self.watches[prefix]:
                del self.watches[prefix]

    def note(self, events: GroupEvents) -> None:
        """Notify the watches of messages whose end is durable."""
        for commit in events.commits:
            for event in each_event(commit.events):
                if isinstance(event, _ENDS):
                    for watch in self.watches.get(event.stream[:PREFIX_BYTES], ()):
                        watch.ends[event.stream] = event
                        watch.changed.set()

    def _remove(self, topics: Sequence[str], waiter: asyncio.Future[None]) -> None:
        for topic in topics:
            if (waiters := self._by_topic.get(topic)) is not None:
                waiters.pop(waiter, None)
                if not waiters:
                    del self._by_topic[topic]
