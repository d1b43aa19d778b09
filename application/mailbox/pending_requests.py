"""Requests that wait to be decided."""

import math

from postroom.application.mailbox.drain_rate import DrainRate
from postroom.application.mailbox.fair_queue import FairQueue
from postroom.application.mailbox.group import Request, cost_of, topic_of
from postroom.application.mailbox.loaded_mailbox import LoadedMailbox
from postroom.application.ports.clock import Clock
from postroom.domain.errors import Saturated

GROUP_COST = 400
"""Cost per append: enough to amortise a sync, little enough to decide during the previous append."""
PENDING_COST = 50_000
TOPIC_QUANTUM = 32
"""Cost of the commands of one topic that are decided before it is the next topic's turn."""


class PendingRequests:
    """Bounded queue of requests, in which topics take turns (svc-mailbox I-5)."""

    def __init__(self, mailbox: str, clock: Clock) -> None:
        self._mailbox = mailbox
        self._clock = clock
        self._queue: FairQueue[Request] = FairQueue(PENDING_COST, TOPIC_QUANTUM)
        self._drain_rate = DrainRate()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, request: Request, state: LoadedMailbox | None) -> None:
        """Add a request.

        Arguments:
            state: names the topics of messages that are settled.

        Raises: Saturated when there is no room.
        """
        topic, cost = topic_of(request.commands, state), cost_of(request.commands)
        if not self._queue.has_room(topic, cost):
            raise Saturated(
                f"Mailbox {self._mailbox} has too many commands pending; retry shortly.",
                self._drain_rate.retry_ms(cost, self._clock.uptime()),
            )
        self._queue.push(topic, request, cost)

    def repeat(self, request: Request) -> None:
        """Add a request that was decided before, to be decided again."""
        self._queue.push(topic_of(request.commands, None), request.for_retry(), cost_of(request.commands))

    def take(self, limit: float = GROUP_COST) -> list[Request]:
        """Remove the requests of the next group, in order of arrival."""
        before = self._queue.cost
        requests = self._queue.take(limit)
        self._drain_rate.record_drain(before - self._queue.cost, self._clock.uptime())
        return requests

    def take_all(self) -> list[Request]:
        """Remove all requests, in order of arrival."""
        return self.take(math.inf)
