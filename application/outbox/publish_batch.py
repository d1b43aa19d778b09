"""Publishing a batch of outbox events in the order of each aggregate (SDS-047 CMD-050)."""

import asyncio
from collections.abc import Callable, Iterator, Sequence

from postroom.application.correlation import correlate
from postroom.application.outbox.formats import MessageFormat
from postroom.application.outbox.route import Route
from postroom.application.ports.outbox_repository import Kind, OutboxRow
from postroom.application.ports.publisher import NotStored, Publisher
from postroom.application.telemetry import logger, summarize
from postroom.application.trace_context import read_context
from postroom.application.tracing import PUBLISH, outgoing_headers, tracer
from postroom.domain.errors import InvalidRequest, Unavailable
from postroom.domain.outbox import OutboxEvent


class PublishBatch:
    """Events of one claim, in one or more batches, and the results of publishing the last batch.

    Arguments:
        has_time: returns whether the right to publish lasts long enough for one more event.
    """

    def __init__(
        self, publisher: Publisher, route: Route, format_: MessageFormat, has_time: Callable[[], bool]
    ) -> None:
        self._publisher = publisher
        self._route = route
        self._format = format_
        self._has_time = has_time
        self._started = 0
        self._last_published = 0
        self._unanswered: list[tuple[int, OutboxRow, Unavailable]] = []
        self.silent: set[Kind] = set()
        """Kinds of the events that the target did not confirm; no more of them are published."""
        self.published: list[tuple[OutboxRow, str]] = []
        self.refused: list[tuple[OutboxRow, str]] = []
        self.unreadable: list[tuple[OutboxRow, str]] = []
        self.outage: Unavailable | None = None

    async def publish(self, rows: Sequence[OutboxRow], concurrency: int) -> None:
        """Publish events: sequentially within an aggregate, up to `concurrency` aggregates in parallel."""
        self.published, self.refused, self.unreadable = [], [], []
        lanes: dict[tuple[str, str], list[OutboxRow]] = {}
        for row in rows:
            lanes.setdefault((row.event.aggregate_type, row.event.aggregate_id), []).append(row)
        waiting = iter(lanes.values())
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(concurrency, len(lanes))):
                workers.create_task(self._work(waiting))
        # If the target stored an event sent later, it is up, and the missing answer is due to this event.
        unanswered, self._unanswered, self.outage = self._unanswered, [], None
        for start, row, error in unanswered:
            if start < self._last_published:
                self.refused.append((row, str(error)))
            else:
                self._unanswered.append((start, row, error))
                self.outage = error

    async def _work(self, lanes: Iterator[list[OutboxRow]]) -> None:
        for lane in lanes:
            for row in lane:
                if not self._has_time():
                    return
                if _kind(row.event) in self.silent:
                    break
                with correlate(correlation_of(row.event)):
                    is_published = await self._publish_one(row)
                if not is_published:
                    break  # later events of this aggregate wait for it

    async def _publish_one(self, row: OutboxRow) -> bool:
        event = row.event
        if row.unreadable is not None or row.payload is None:
            reason = row.unreadable or "its payload can't be read"
            self.unreadable.append((row, f"The event can't be published: {reason}. Correct or discard it."))
            return False
        self._started += 1
        start = self._started
        try:
            subject = self._route.name_of(event)
            parent = read_context(event.traceparent, event.tracestate, event.baggage)
            with tracer().span(PUBLISH, (subject,), message_id=str(event.id), parent=parent):
                message = self._format.write(event, row.payload)
                headers = message.headers | outgoing_headers()
                await self._publisher.publish(subject, message.payload, headers)
        except (InvalidRequest, NotStored) as error:
            self.refused.append((row, str(error)))
            return False
        except Unavailable as error:
            self._unanswered.append((start, row, error))
            self.silent.add(_kind(event))
            return False
        except Exception as error:  # one event's defect must not stop the others
            logger().exception("outbox.defect", outbox_id=str(event.id))
            self.refused.append((row, summarize(error)))
            return False
        self._last_published = max(self._last_published, start)
        self.published.append((row, subject))
        return True


def _kind(event: OutboxEvent) -> Kind:
    return Kind(event.aggregate_type, event.event_type, event.event_version)


def correlation_of(event: OutboxEvent) -> str:
    """Return the correlation id of an event, or else its id, for logs."""
    return event.correlation.correlation_id or str(event.id)
