"""Callers that wait for messages of a topic."""

import asyncio
from collections.abc import Callable, Iterator


class Waiters:
    """Let long polls sleep until a topic may have something for them."""

    def __init__(self) -> None:
        self._by_topic: dict[str, set[asyncio.Future[None]]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_topic)

    async def wait(self, topic: str, wait_ms: int) -> None:
        """Return when the topic is woken, or after `wait_ms`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters = self._by_topic.setdefault(topic, set())
        waiters.add(waiter)
        try:
            await asyncio.wait([waiter], timeout=wait_ms / 1_000)
        finally:
            waiters.discard(waiter)
            if not waiters:
                self._by_topic.pop(topic, None)

    def wake(self, is_ready: Callable[[str], bool]) -> None:
        """Wake those whose topic `is_ready`."""
        for topic, waiters in self._by_topic.items():
            if is_ready(topic):
                for waiter in waiters:
                    if not waiter.done():
                        waiter.set_result(None)
