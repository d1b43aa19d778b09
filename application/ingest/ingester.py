"""The ingester: takes envelopes from a source and stores each exactly once (RFC-037 pattern behaviour)."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from postroom.application.background import beside
from postroom.application.commands.send import SendEnvelopes
from postroom.application.ingest.batch import Batches, IngestSettings, Stopped
from postroom.application.ingest.counts import Ingested
from postroom.application.ingest.dead_letters import DeadLetterSubject
from postroom.application.ports.payload_validator import PayloadValidator
from postroom.application.ports.source import Source, SourceMessage
from postroom.application.telemetry import logger
from postroom.domain.errors import Unavailable

BATCHES_AHEAD = 4
"""Batches under way at once: the mailbox appends those that wait together."""
FETCH_WAIT_MS = 500
PAUSE_SECONDS = 0.5
"""How long to wait after the source failed."""
REPORT_SECONDS = 5.0

Report = Callable[[Ingested], None]


class Ingester:
    """Store what a source delivers, and acknowledge it only when the log holds it.

    A message that comes again, after a crash of whatever was involved, is known to the log by its id and adds
    nothing. So all that was published is stored, and stored once.
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
        """Take the ports.

        Arguments:
            send_envelopes: of the mailbox to store in.
            payloads: checks payloads against the schemas of their topics; None checks none.
            dead_letters: takes what can't be stored; None skips what is malformed, with a warning.
        """
        self._source = source
        self._settings = settings or IngestSettings()
        self._batches = Batches(source, send_envelopes, self._settings, payloads, dead_letters)
        self._under_way: set[asyncio.Task[None]] = set()

    @property
    def counts(self) -> Ingested:
        """Return what was done so far."""
        return self._batches.counts

    def stop(self) -> None:
        """Let `run` return once what can be stored is stored and settled."""
        self._batches.stopping.set()

    async def run(self, *, idle_ms: int | None = None, report: Report | None = None) -> Ingested:
        """Ingest until told to stop, through outages of the source and of the store.

        Arguments:
            idle_ms: end when nothing has come for so long; None waits for ever.
            report: is called with the counts every few seconds.

        Raises:
            Fenced, WrongPosition, MailboxOwned: somebody else owns the mailbox.
            NotFound, InvalidRequest: the source is gone, or not what it should be.
        """
        async with beside(self._keep_reporting(report)):
            try:
                await self._take_in(idle_ms)
                while self._under_way:
                    await self._wait_for_one()
            finally:
                self.stop()
                await asyncio.gather(*self._under_way, return_exceptions=True)
                self._batches.report_problems()
        return self.counts

    async def _take_in(self, idle_ms: int | None) -> None:
        now = asyncio.get_running_loop().time
        last_news = now()
        while not self._batches.stopping.is_set():
            messages = await self._fetch(FETCH_WAIT_MS if idle_ms is None else min(idle_ms, FETCH_WAIT_MS))
            if messages is None or self._under_way:
                last_news = now()
            if messages:
                last_news = now()
                self.counts.received += len(messages)
                self._under_way.add(asyncio.create_task(self._batches.ingest(messages)))
            elif idle_ms is not None and now() - last_news >= idle_ms / 1_000:
                return
            while len(self._under_way) >= BATCHES_AHEAD or any(task.done() for task in self._under_way):
                await self._wait_for_one()

    async def _fetch(self, wait_ms: int) -> "list[SourceMessage] | None":
        """Return what came, or None when the source can't be reached."""
        try:
            return list(await self._source.fetch(self._settings.batch_size, wait_ms))
        except Unavailable as error:
            logger().warning("ingest.source_unavailable", error=str(error))
            with suppress(TimeoutError):
                async with asyncio.timeout(PAUSE_SECONDS):
                    await self._batches.stopping.wait()
            return None

    async def _wait_for_one(self) -> None:
        done, self._under_way = await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
        errors = [error for task in done if (error := task.exception()) is not None]
        for error in errors:
            if not isinstance(error, Stopped):
                raise error

    async def _keep_reporting(self, report: Report | None) -> None:
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            self._batches.report_problems()
            if report is not None:
                report(self.counts)
