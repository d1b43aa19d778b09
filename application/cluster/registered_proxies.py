"""The proxies that registered with an admin, to which it pushes changes of routes."""

import asyncio
from collections.abc import Callable, Iterable
from typing import NamedTuple

from postroom.application.cluster.route_queue import PushCounts, RouteQueue
from postroom.application.ports.route_push import RouteChange, RoutePush
from postroom.domain.message import MS


class _RegisteredProxy(NamedTuple):
    queue: RouteQueue
    seen_at: int


class RegisteredProxies:
    """Soft state of an admin: a proxy registers again with another one.

    Arguments:
        ttl_ms: after which a proxy that did not register again is pushed nothing more.
        uptime: µs of a monotonic clock.
    """

    def __init__(self, push: RoutePush, counts: PushCounts, ttl_ms: int, uptime: Callable[[], int]) -> None:
        self._push = push
        self._counts = counts
        self._ttl_us = ttl_ms * MS
        self._uptime = uptime
        self._proxies: dict[str, _RegisteredProxy] = {}

    async def register(self, proxy: str, address: str, push_key: str) -> RouteQueue:
        """Note that a proxy is alive, and return the queue of its changes."""
        current = self._proxies.get(proxy)
        if current is not None and current.queue.address == address:
            queue, former = current.queue, None
        else:
            queue = RouteQueue(address, self._push, self._counts, self._uptime)
            former = current
        queue.push_key = push_key
        self._proxies[proxy] = _RegisteredProxy(queue, self._uptime())
        if former is not None:
            await former.queue.close()
        return queue

    async def forget(self, proxy: str) -> None:
        """Push nothing more to a proxy."""
        if (current := self._proxies.pop(proxy, None)) is not None:
            await current.queue.close()

    async def forget_silent(self) -> None:
        """Push nothing more to proxies that did not register again in time."""
        now = self._uptime()
        for proxy in [name for name, each in self._proxies.items() if now - each.seen_at > self._ttl_us]:
            await self.forget(proxy)

    def add_changes(self, changes: Iterable[RouteChange]) -> None:
        """Push changes to all proxies soon."""
        changes = list(changes)
        for each in self._proxies.values():
            each.queue.add(changes)

    def seen_at(self, proxy: str) -> int | None:
        """Return the uptime in µs at which a proxy registered last; None if it did not with this admin."""
        current = self._proxies.get(proxy)
        return None if current is None else current.seen_at

    async def close(self) -> None:
        """Stop pushing."""
        await asyncio.gather(*map(self.forget, list(self._proxies)))
