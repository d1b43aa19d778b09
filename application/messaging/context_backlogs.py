"""Periodic refresh of the stored backlog of a context's outbox and inbox."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread

from postroom.application.ports.read_models import ContextBacklog
from postroom.application.telemetry import logger
from postroom.domain.errors import PostroomError

EVERY_SECONDS = 5.0
Count = Callable[[], Sequence[ContextBacklog]]
"""Count the backlog in the service's own database."""
Save = Callable[[Sequence[ContextBacklog]], None]
"""Store counts with the read models, unless newer ones are stored."""


class ContextBacklogRefresher:
    """Refresher of the stored backlog of one context.

    The backlog is counted in the tables of outbox and inbox, which have partial indexes of unsettled rows. It
    can't be folded from their events: these have no total order, and rows inserted by plain SQL have none
    until a relay reads them.
    """

    def __init__(self, count: Count, save: Save, context: str) -> None:
        self._count = count
        self._save = save
        self._context = context

    def refresh(self) -> Sequence[ContextBacklog]:
        """Count the backlog, store the counts, and return them.

        Raises: Unavailable when either database can't be used.
        """
        counts = self._count()
        self._save(counts)
        return counts

    @contextmanager
    def refreshing(self, every_seconds: float = EVERY_SECONDS) -> Iterator[None]:
        """Refresh periodically in a thread for the duration of the context; failures are logged."""
        stop = Event()

        def run() -> None:
            while True:
                try:
                    self.refresh()
                except PostroomError as error:
                    logger().warning("contexts.not_refreshed", context=self._context, error=str(error))
                if stop.wait(every_seconds):
                    return

        thread = Thread(target=run, name="postroom contexts", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
