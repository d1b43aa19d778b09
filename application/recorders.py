"""Code shared by recorders of the `eventsourcing` library: checks of ids, and subscriptions that poll."""

from collections.abc import Iterator, Sequence
from threading import Event
from uuid import UUID

from eventsourcing.persistence import ApplicationRecorder, Notification, ProgrammingError, Subscription

POLL_SECONDS = 0.05
PAGE = 500


class PollingSubscription(Subscription[ApplicationRecorder]):
    """Subscription that polls a recorder whose events become visible in the order of their positions."""

    def __init__(self, recorder: ApplicationRecorder, gt: int | None, topics: Sequence[str]) -> None:
        super().__init__(recorder, gt, topics)
        self._page: Iterator[Notification] = iter(())
        self._stop = Event()

    def stop(self) -> None:
        """End the iteration; may be called from any thread."""
        super().stop()
        self._stop.set()

    def __next__(self) -> Notification:
        while not self._stop.is_set():
            notification = next(self._page, None)
            if notification is not None:
                self._last_notification_id = notification.id
                return notification
            page = self._recorder.select_notifications(
                self._last_notification_id, PAGE, topics=self._topics, inclusive_of_start=False
            )
            self._page = iter(page)
            if not page:
                self._stop.wait(POLL_SECONDS)
        raise StopIteration


def check_originator(originator_id: UUID | str) -> UUID:
    """Return the id of an aggregate.

    Raises: ProgrammingError when it is not a UUID.
    """
    if not isinstance(originator_id, UUID):
        raise ProgrammingError(f"Originator ids must be UUIDs, not {originator_id!r}.")
    return originator_id
