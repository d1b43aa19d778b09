"""The ingester: stores the envelopes of a source, each exactly once (RFC-037 pattern behaviour)."""

import asyncio
from collections.abc import Callable

from postroom.application.background import background_task, wait_at_most
from postroom.application.ingest.batch import BatchIngester, IngestSettings, Stopped
from postroom.application.ingest.counts import IngestCounts
from postroom.application.ingest.dead_letters import DeadLetterSubject
from postroom.application.mailbox.send import SendEnvelopes
from postroom.application.monitor import Progress
from postroom.application.ports.payload_validator import PayloadValidator
from postroom.application.ports.source import Source, SourceMessage
from postroom.application.telemetry import logger
from postroom.domain.errors import Unavailable

MAX_BATCHES = 4
"""Batches in progress at once; the mailbox appends waiting ones together."""
FETCH_WAIT_MS = 500
PAUSE_SECONDS = 0.5
"""Pause after the source failed."""
REPORT_SECONDS = 5.0

Report = Callable[[IngestCounts], None]


class Ingester:
    """Consumer of a source that stores its messages, and acks each after the log has stored it.

    A message that is redelivered, for example after a crash, is recognised by its id, so every published
    message is stored exactly once.

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
        self._settings = settings or IngestSettings()
        self._batches = BatchIngester(source, send_envelopes, self._settings, payloads, dead_letters)
        self._tasks: set[asyncio.Task[None]] = set()
        self.progress = Progress()
        """Fetches from the source."""

    @property
    def counts(self) -> IngestCounts:
        """Return the counts so far."""
        return self._batches.counts

    def reconfigure(self, settings: IngestSettings, payloads: PayloadValidator | None) -> None:
        """Apply other settings and schemas from the next messages on."""
        self._settings = settings
        self._batches.reconfigure(settings, payloads)

    def stop(self) -> None:
        """Make `run` return after the batches in progress are stored and settled."""
        self._batches.stopping.set()

    async def run(self, *, idle_ms: int | None = None, report: Report | None = None) -> IngestCounts:
        """Ingest until stopped, through outages of the source and of the store.

        Arguments:
            idle_ms: return when no message has arrived for this long; None never returns.
            report: called with the counts every few seconds.

        Raises:
            Fenced, WrongPosition, MailboxOwned: another process owns the mailbox.
            NotFound, InvalidRequest: the source was removed, or has an unsupported configuration.
        """
        async with background_task(self._report_regularly(report)):
            try:
                await self._fetch_batches(idle_ms)
                while self._tasks:
                    await self._wait_for_one()
            finally:
                self.stop()
                await asyncio.gather(*self._tasks, return_exceptions=True)
                self._batches.report_problems()
        return self.counts

    async def _fetch_batches(self, idle_ms: int | None) -> None:
        now = asyncio.get_running_loop().time
        active_at = now()
        while not self._batches.stopping.is_set():
            messages = await self._fetch(FETCH_WAIT_MS if idle_ms is None else min(idle_ms, FETCH_WAIT_MS))
            if messages is None or self._tasks:
                active_at = now()
            if messages:
                active_at = now()
                self.counts.received += len(messages)
                self._tasks.add(asyncio.create_task(self._batches.ingest(messages)))
            elif idle_ms is not None and now() - active_at >= idle_ms / 1_000:
                return
            while len(self._tasks) >= MAX_BATCHES or any(task.done() for task in self._tasks):
                await self._wait_for_one()

    async def _fetch(self, wait_ms: int) -> "list[SourceMessage] | None":
        """Return the next messages, or None when the source can't be reached."""
        try:
            messages = list(await self._source.fetch(self._settings.batch_size, wait_ms))
        except Unavailable as error:
            self.progress.failed()
            logger().warning("ingest.source_unavailable", error=str(error))
            await wait_at_most(PAUSE_SECONDS, self._batches.stopping.wait())
            return None
        self.progress.succeeded()
        return messages

    async def _wait_for_one(self) -> None:
        done, self._tasks = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        errors = [error for task in done if (error := task.exception()) is not None]
        for error in errors:
            if not isinstance(error, Stopped):
                raise error

    async def _report_regularly(self, report: Report | None) -> None:
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            self._batches.report_problems()
            if report is not None:
                report(self.counts)
