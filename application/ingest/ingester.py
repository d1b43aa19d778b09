"""The ingester: stores the envelopes of a source, each exactly once (RFC-037 pattern behaviour)."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

from postroom.application.ingest.batch_storage import BatchStorage
from postroom.application.ingest.namespace import IngestCounts, IngestSettings
from postroom.application.ingest.ordered_storage import OrderedStorage
from postroom.application.ingest.redrive import DeadLetterSubject
from postroom.application.ingest.settlement import Settlement, Stopped
from postroom.application.mailbox.send import SendEnvelopes
from postroom.application.metrics import BACKLOG_SECONDS, Metric, Monitor, Progress
from postroom.application.ports.source import PayloadValidator, Source, SourceMessage
from postroom.application.telemetry import logger
from postroom.application.threads import background_task, wait_at_most
from postroom.domain.errors import PostroomError, Unavailable

FETCH_WAIT_MS = 500
PAUSE_SECONDS = 0.5
"""Pause after the source failed."""
REPORT_SECONDS = 5.0

Report = Callable[[IngestCounts], None]


class Ingester:
    """Consumer of a source that stores its messages, and acks each after the log has stored it.

    A message that is redelivered, for example after a crash, is recognised by its id, so every published
    message is stored exactly once. Messages are stored in the order in which the source delivers them; one
    that is retried alone may be stored after later ones, but not after ones with its sticky key.

    Arguments:
        send_envelopes: stores envelopes in the mailbox.
        payloads: validates payloads against the schemas of their topics; None validates none.
        dead_letters: receives messages that can't be stored; None skips malformed ones with a warning.
    """

    def __init__(
        self,
        source: Source,
        send_envelopes: SendEnvelopes,
        settings: IngestSettings | None = None,
        *,
        payloads: PayloadValidator | None = None,
        dead_letters: DeadLetterSubject | None = None,
    ) -> None:
        self._source = source
        self._stopping = asyncio.Event()
        self._settlement = Settlement(source, self._stopping)
        self._batches = BatchStorage(
            send_envelopes, settings or IngestSettings(), payloads, dead_letters, self._settlement
        )
        self._storage = OrderedStorage(self._batches, self._settlement)
        self.progress = Progress()
        """Fetches from the source."""

    @property
    def counts(self) -> IngestCounts:
        """Return the counts so far."""
        return self._batches.counts

    def reconfigure(self, settings: IngestSettings, payloads: PayloadValidator | None) -> None:
        """Apply other settings and schemas from the next messages on."""
        self._batches.reconfigure(settings, payloads)

    def stop(self) -> None:
        """Make `run` return after the batches in progress are stored and settled."""
        self._stopping.set()

    async def run(self, *, idle_ms: int | None = None, report: Report | None = None) -> IngestCounts:
        """Ingest until stopped, through outages of the source and of the store.

        Arguments:
            idle_ms: return when no message has arrived for this long; None never returns.
            report: called with the counts every few seconds.

        Raises:
            Fenced, WrongPosition, MailboxOwned: another process owns the mailbox.
            NotFound, InvalidRequest: the source was removed, or has an unsupported configuration.
        """
        fetching = asyncio.create_task(self._fetch_batches(idle_ms))
        storing = asyncio.create_task(self._storage.run())
        settling = asyncio.create_task(self._settlement.run())
        async with background_task(self._report_regularly(report)):
            try:
                pending = {fetching, storing, settling}
                while pending:
                    done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    _raise_first(done)
                    if fetching.done():
                        self._storage.end()
                    if storing.done():
                        self._settlement.end()
            finally:
                self.stop()
                fetching.cancel()
                self._storage.end()
                await asyncio.wait({fetching, storing})
                await self._storage.return_unsettled()  # after the last fetch, which would receive them again
                self._settlement.end()
                await asyncio.gather(fetching, storing, settling, return_exceptions=True)
                self._batches.report_problems()
        return self.counts

    async def _fetch_batches(self, idle_ms: int | None) -> None:
        now = asyncio.get_running_loop().time
        active_at = now()
        while not self._stopping.is_set():
            messages = await self._fetch(FETCH_WAIT_MS if idle_ms is None else min(idle_ms, FETCH_WAIT_MS))
            if messages is None or not (self._storage.is_idle and self._settlement.is_idle):
                active_at = now()
            if messages:
                active_at = now()
                self.counts.received += len(messages)
                self._storage.add(messages)
                await self._storage.wait_for_room()
            elif idle_ms is not None and now() - active_at >= idle_ms / 1_000:
                return

    async def _fetch(self, wait_ms: int) -> "list[SourceMessage] | None":
        """Return the next messages, or None when the source can't be reached."""
        try:
            messages = list(await self._source.fetch(self._batches.settings.batch_size, wait_ms))
        except Unavailable as error:
            self.progress.failed()
            logger().retry("ingest.source_unavailable", error=str(error))
            await wait_at_most(PAUSE_SECONDS, self._stopping.wait())
            return None
        self.progress.succeeded()
        return messages

    async def _report_regularly(self, report: Report | None) -> None:
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            self._batches.report_problems()
            if report is not None:
                report(self.counts)


def _raise_first(tasks: "Iterable[asyncio.Task[None]]") -> None:
    """Raise the error of the first task that failed; a stopped ingester is not a failure."""
    for task in tasks:
        error = task.exception()
        if error is not None and not isinstance(error, Stopped):
            raise error


def ingest_monitor(
    ingester: Ingester,
    namespace: str,
    *,
    measure_mailbox: Callable[[], Coroutine[Any, Any, list[Metric]]],
    is_mailbox_answering: Callable[[], Awaitable[bool]],
    count_pending: Callable[[], Awaitable[int]],
    stream_metrics: Callable[[], Sequence[Metric]],
) -> Monitor:
    """Return the monitor of an ingester.

    Arguments:
        measure_mailbox: returns the metrics of the archive if this process owns it.
        is_mailbox_answering: returns whether the owner of the archive answers.
        count_pending: counts the messages of the source that were not delivered yet.
        stream_metrics: metrics of the connection to the source.
    """
    labels = {"namespace": namespace}

    async def collect() -> list[Metric]:
        counts = ingester.counts
        outcomes = {
            "stored": counts.stored,
            "duplicate": counts.duplicates,
            "skipped": counts.skipped,
            "dead_lettered": counts.dead_lettered,
            "deferred": counts.deferred,
        }
        metrics = [
            *await measure_mailbox(),
            Metric(
                "postroom_ingest_messages",
                "counter",
                "Messages of the source by outcome.",
                [(labels | {"outcome": outcome}, number) for outcome, number in outcomes.items()],
            ),
            Metric("postroom_ingest_received", "counter", "Messages received.", [(labels, counts.received)]),
            Metric(
                "postroom_ingest_retries",
                "counter",
                "Attempts to store a batch after the first.",
                [(labels, counts.retries)],
            ),
            *stream_metrics(),
        ]
        try:
            async with asyncio.timeout(BACKLOG_SECONDS):
                pending = await count_pending()
        except (PostroomError, TimeoutError):
            return metrics
        lag = Metric(
            "postroom_ingest_lag_messages",
            "gauge",
            "Messages of the source that were not received yet.",
            [(labels, pending)],
        )
        return [*metrics, lag]

    async def find_missing() -> list[str]:
        missing = [] if await is_mailbox_answering() else ["mailbox"]
        if not ingester.progress.is_made:
            missing.append("source")
        return missing

    return Monitor(collect, find_missing)
