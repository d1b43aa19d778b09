"""Capture: publishes the rows of a table of any service, in the order of commit (SDS-047 CMD-050).

The write-ahead log of the database is the outbox: rows are read from a replication slot and published, and
the slot's position is confirmed once all are settled. An event that can't be published moves to the outbox
table with all later events of its aggregate; the relay retries or parks it there.
"""

import asyncio
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from postroom.application.cloudevents import JSON
from postroom.application.messaging import by_event_type
from postroom.application.metrics import BACKLOG_SECONDS, Metric, Monitor, Progress, count_label
from postroom.application.outbox.events import CONTENT_TYPE, decide_on, record_only
from postroom.application.outbox.formats import EventRoute, MessageFormat
from postroom.application.outbox.relay import (
    MAX_TYPES,
    OutboxRelay,
    OutboxSettings,
    PublishBatch,
    correlation_of,
)
from postroom.application.ports.event_log import Clock
from postroom.application.ports.outbox import (
    Aggregate,
    CaptureSource,
    Decision,
    HeldEvents,
    OutboxRow,
    Publisher,
    SlotInUse,
    SlotState,
)
from postroom.application.telemetry import logger
from postroom.application.threads import wait_at_most
from postroom.domain.errors import PostroomError, Unavailable
from postroom.domain.outbox import MS, MarkFailed, OutboxCommand, OutboxEvent, ParkOutboxEvent
from postroom.domain.policy import OutageBackoff, backoff_ms

BACKOFF = OutageBackoff(250, 15_000)
"""Backoff while the database or the target is down."""
READ_MS = 1_000
ONCE_MS = 50
NOT_READ = "The row can't be published: "
"""Start of the error of a row that can't be read."""
TAKE_OVER_MS = 1_000
"""How often a second process tries to take over."""


class CaptureCounts(msgspec.Struct):
    """Numbers of rows that were published, and that were held in the outbox table."""

    published: int = 0
    held: int = 0


class OutboxCapture:
    """Publisher of the rows that transactions insert into a table.

    Arguments:
        relay: publishes the events that are held.
        random: returns uniform random numbers in [0, 1).
    """

    def __init__(
        self,
        source: CaptureSource,
        held: HeldEvents,
        relay: OutboxRelay,
        publisher: Publisher,
        route: EventRoute,
        format_: MessageFormat,
        clock: Clock,
        random: Callable[[], float],
        settings: OutboxSettings,
    ) -> None:
        self._source = source
        self._held = held
        self._relay = relay
        self._publisher = publisher
        self._route = route
        self._format = format_
        self._clock = clock
        self._random = random
        self._settings = settings
        self._backoff = BACKOFF.within(settings.backoff_max_ms)
        self._stopping = asyncio.Event()
        self._right_ends = 0.0
        self._is_standby = False
        self.counts = CaptureCounts()
        self.published_by_type: Counter[str] = Counter()
        """Rows published by type; the types after the first hundred are counted together."""
        self.progress = Progress()

    def stop(self) -> None:
        """Make `run` return after the events that are being published are settled."""
        self._stopping.set()
        self._relay.stop()

    async def run(self) -> None:
        """Publish rows until stopped, through outages of the database and of the target.

        Raises: InvalidRequest when the slot, the publication or the table can't be used as configured.
        """
        relaying = asyncio.create_task(self._relay.run())
        failures = 0
        try:
            while not self._stopping.is_set():
                try:
                    await self.capture_once(READ_MS, is_patient=True)
                except Unavailable as error:
                    failures = await self._wait_out(error, failures)
                else:
                    failures, self._is_standby = 0, False
                    self.progress.succeeded()
        finally:
            self._relay.stop()
            await self._source.close()
            await relaying

    async def run_once(self) -> None:
        """Publish all rows that are committed already, and the held events that are due.

        Raises: Unavailable when the database or the target can't be used, InvalidRequest as `run` does.
        """
        end = await self._source.end()
        position = -1
        while position < end and not self._stopping.is_set():
            position = await self.capture_once(ONCE_MS) or position
        while await self._relay.relay_once():
            pass

    async def capture_once(self, wait_ms: int, *, is_patient: bool = False) -> int | None:
        """Settle one batch, and return the position that was confirmed, if any.

        Arguments:
            is_patient: wait for the end of an outage of the target instead of raising Unavailable.

        Raises: Unavailable when the database or the target can't be used.
        """
        try:
            batch = await self._source.read(self._settings.batch, wait_ms)
            await self._renew()
            rows, failures = batch.rows, 0
            while rows:
                remaining, outage = await self._settle(rows)
                if outage is not None:
                    if not is_patient:
                        raise outage
                    failures = await self._wait_out(outage, 0 if len(remaining) < len(rows) else failures)
                rows = remaining
                if rows and self._stopping.is_set():
                    await self._source.close()
                    return None
            if batch.position is not None:
                await self._source.confirm(batch.position)
        except BaseException:
            await self._source.close()  # reading again begins after what is confirmed: no row is lost
            raise
        return batch.position

    async def _settle(self, rows: Sequence[OutboxRow]) -> tuple[list[OutboxRow], Unavailable | None]:
        """Publish or hold rows; return those that remain, and the outage that is the cause."""
        await self._renew()
        waiting = await self._held.find_waiting({_aggregate(row) for row in rows})
        batch = PublishBatch(self._publisher, self._route, self._format, self._has_time)
        await batch.publish(
            [row for row in rows if _aggregate(row) not in waiting], self._settings.concurrency
        )
        for row, _ in batch.published:
            self.counts.published += 1
            count_label(self.published_by_type, row.event.event_type, MAX_TYPES)
        published = {id(row) for row, _ in batch.published}
        remaining = [row for row in rows if id(row) not in published]
        waiting |= {_aggregate(row) for row, _ in (*batch.refused, *batch.unreadable)}
        held = [row for row in remaining if _aggregate(row) in waiting]
        if held and self._has_time():
            await self._hold(held, {id(row): error for row, error in batch.refused})
            remaining = [row for row in remaining if _aggregate(row) not in waiting]
        return remaining, batch.outage

    async def _renew(self) -> None:
        """Prolong the right to publish once half of it has passed."""
        now, claim = self._clock.uptime(), self._settings.claim_ms * MS
        if now > self._right_ends - claim // 3:
            await self._source.check_reader()
            self._right_ends = now + claim * 2 // 3

    async def _hold(self, rows: Sequence[OutboxRow], errors: Mapping[int, str]) -> None:
        """Move rows to the outbox table; `errors` has the errors of refused rows by identity."""
        now = self._clock.wall()
        events = [_held(row, self._command(row, errors.get(id(row))), now) for row in rows]
        await self._held.hold(events)
        self.counts.held += len(events)
        for row in rows:
            if row.unreadable is not None:
                logger().error(
                    "outbox.capture_unreadable",
                    outbox_id=str(row.event.id),
                    corr_id=correlation_of(row.event),
                    error=row.unreadable,
                )

    def _command(self, row: OutboxRow, error: str | None) -> OutboxCommand | None:
        if row.unreadable is not None:
            reason = row.unreadable.rstrip(".")
            return ParkOutboxEvent(
                f"{NOT_READ}{reason}. Correct [capture.columns] and retry this event, or insert a corrected "
                "row and discard this event."
            )
        return None if error is None else MarkFailed(error, self._settings.policy, self._random())

    def _has_time(self) -> bool:
        return self._clock.uptime() < self._right_ends

    async def _wait_out(self, error: Unavailable, failures: int) -> int:
        """Pause after an outage, and return the number of failures in sequence."""
        pause = TAKE_OVER_MS
        if isinstance(error, SlotInUse):
            if not self._is_standby:
                logger().info("outbox.capture_standby", reason=str(error))
            self._is_standby = True
            self.progress.succeeded()
        else:
            self.progress.failed()
            failures += 1
            pause = backoff_ms(self._backoff, failures, self._random())
            logger().retry("outbox.capture_unavailable", error=str(error), pause_ms=pause)
        await wait_at_most(pause / 1_000, self._stopping.wait())
        return failures


def _aggregate(row: OutboxRow) -> Aggregate:
    return row.event.aggregate_type, row.event.aggregate_id


def _held(row: OutboxRow, command: OutboxCommand | None, now: int) -> tuple[Decision, bytes]:
    """Return the form in which a row is held."""
    if row.unreadable is None:
        event, payload = held_form(row)
    else:
        event, payload = replace(row.event, is_row=True), row.payload or b"null"
    row = row._replace(event=event, has_history=False)
    return (record_only(row, now) if command is None else decide_on(row, command, now)), payload


def held_form(row: OutboxRow) -> tuple[OutboxEvent, bytes]:
    """Return the event of a row with its JSON payload: in base64, which is exact, as jsonb is not."""
    event = row.event
    json_type = {} if event.is_binary else {CONTENT_TYPE: JSON}
    event = replace(event, is_binary=True, attributes=json_type | event.attributes)
    return event, b'"%s"' % b64encode(b"null" if row.payload is None else row.payload)


def capture_monitor(capture: OutboxCapture, context: str, source: CaptureSource, relay: Monitor) -> Monitor:
    """Return the monitor of a capture, with the metrics of `relay`, which publishes its held events."""
    labels = {"context": context}

    async def find_state() -> SlotState | None:
        try:
            async with asyncio.timeout(BACKLOG_SECONDS):
                return await source.state()
        except (PostroomError, TimeoutError):
            return None

    async def collect() -> list[Metric]:
        metrics = [
            *await relay.collect(),
            by_event_type(
                "postroom_outbox_captured",
                "Rows that were captured and published, by event type.",
                labels,
                capture.published_by_type,
            ),
            Metric(
                "postroom_outbox_held",
                "counter",
                "Rows that were captured and moved to the outbox table.",
                [(labels, capture.counts.held)],
            ),
        ]
        state = await find_state()
        if state is not None:
            by_slot = labels | {"slot": state.slot}
            metrics += [
                Metric(
                    "postroom_outbox_slot_lag_bytes",
                    "gauge",
                    "Write-ahead log since the last confirmed position.",
                    [(by_slot, state.lag_bytes)],
                ),
                Metric(
                    "postroom_outbox_slot_retained_bytes",
                    "gauge",
                    "Write-ahead log that the server keeps for the slot.",
                    [(by_slot, state.retained_bytes)],
                ),
            ]
            if state.safe_bytes is not None:
                metrics.append(
                    Metric(
                        "postroom_outbox_slot_safe_bytes",
                        "gauge",
                        "Write-ahead log that may still be written before the slot loses rows.",
                        [(by_slot, state.safe_bytes)],
                    )
                )
        return metrics

    async def find_missing() -> list[str]:
        missing = await relay.find_missing()
        return missing if capture.progress.is_made else [*missing, "capture"]

    return Monitor(collect, find_missing)
