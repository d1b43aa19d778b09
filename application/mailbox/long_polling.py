"""Long polling: receivers waiting for messages of topics."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import islice


class LongPolls:
    """Waiting receivers by topic, in order of arrival; a receiver may wait for several topics."""

    def __init__(self) -> None:
        self._by_topic: dict[str, dict[asyncio.Future[None], Sequence[str]]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._by_topic))

    def count(self, topic: str) -> int:
        """Return the number of waiting receivers of a topic."""
        return len(self._by_topic.get(topic, ()))

    async def wait(self, topics: Sequence[str], wait_ms: int) -> None:
        """Return when woken, or after `wait_ms`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for topic in topics:
            self._by_topic.setdefault(topic, {})[waiter] = topics
        try:
            await asyncio.wait([waiter], timeout=wait_ms / 1_000)
        except asyncio.CancelledError:
            if waiter.done():  # woken, but can't receive the message any more
                for topic in topics:
                    self.wake(topic, 1)
            raise
        finally:
            self._remove(topics, waiter)

    def wake(self, topic: str, count: int) -> None:
        """Wake the `count` receivers of a topic that have waited longest."""
        for waiter, topics in list(islice(self._by_topic.get(topic, {}).items(), count)):
            self._remove(topics, waiter)
            waiter.set_result(None)

    def wake_for(self, deliverable: Callable[[str, int], int]) -> None:
        """Wake as many receivers of each topic as it has deliverable messages.

        Arguments:
            deliverable: returns the number of messages of a topic, up to a limit.
        """
        for topic in self:
            count = deliverable(topic, self.count(topic))
            if count:
                self.wake(topic, count)

    def wake_all(self) -> None:
        """Wake every receiver."""
        for topic in self:
            self.wake(topic, self.count(topic))

    def _remove(self, topics: Sequence[str], waiter: asyncio.Future[None]) -> None:
        for topic in topics:
            waiters = self._by_topic.get(topic)
            if waiters is not None:
                waiters.pop(waiter, None)
                if not waiters:
                    del self._by_topic[topic]
