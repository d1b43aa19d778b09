"""Code shared by recorders of the `eventsourcing` library: bounds, checks of ids, subscriptions that poll."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Event
from typing import NamedTuple, TypeVar
from uuid import UUID

from eventsourcing.persistence import (
    AggregateRecorder,
    ApplicationRecorder,
    IntegrityError,
    Notification,
    ProgrammingError,
    StoredEvent,
    Subscription,
)

from postroom.domain.arguments import MAX_INT

T = TypeVar("T")

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


class VersionRange(NamedTuple):
    """The events of an aggregate that a caller selects: versions above `gt`, up to `lte`."""

    gt: int = -MAX_INT
    lte: int = MAX_INT
    desc: bool = False
    limit: int = MAX_INT

    def select(self, events: Iterable[T], version: Callable[[T], int]) -> list[T]:
        """Return the events of the range; `events` are an aggregate's in the order of their versions."""
        within = [each for each in events if self.gt < version(each) <= self.lte]
        return (within[::-1] if self.desc else within)[: self.limit]


class VersionRecorder(AggregateRecorder):
    """Base of recorders that select the events of an aggregate by a range of versions."""

    def select_events(
        self,
        originator_id: UUID | str,
        *,
        gt: int | None = None,
        lte: int | None = None,
        desc: bool = False,
        limit: int | None = None,
    ) -> list[StoredEvent]:
        """Return events of one aggregate in the order of their versions.

        Arguments:
            originator_id: a UUID; for the log of a mailbox also the id that the sender chose for a message.
            gt, lte: bounds of the versions.
        """
        versions = VersionRange(
            -MAX_INT if gt is None else gt,
            MAX_INT if lte is None else lte,
            desc,
            MAX_INT if limit is None else limit,
        )
        return self._events(originator_id, versions)

    @abstractmethod
    def _events(self, originator_id: UUID | str, versions: VersionRange) -> list[StoredEvent]:
        """Return the events of an aggregate in a range of its versions."""


class PollingRecorder(VersionRecorder, ApplicationRecorder):
    """Base of recorders whose events become visible in the order of their positions."""

    def select_notifications(
        self,
        start: int | None,
        limit: int,
        stop: int | None = None,
        topics: Sequence[str] = (),
        *,
        inclusive_of_start: bool = True,
    ) -> list[Notification]:
        """Return up to `limit` events from position `start` to `stop`, of every type or those in `topics`."""
        after = 0 if start is None else start - 1 if inclusive_of_start else start
        return self._notifications(max(after, 0), MAX_INT if stop is None else stop, topics, limit)

    def subscribe(self, gt: int | None = None, topics: Sequence[str] = ()) -> PollingSubscription:
        """Return an iterator over the events after position `gt`, including those appended later."""
        return PollingSubscription(self, gt, topics)

    @abstractmethod
    def _notifications(self, after: int, stop: int, topics: Sequence[str], limit: int) -> list[Notification]:
        """Return up to `limit` events after a position, up to `stop`; of any type if `topics` is empty."""


def conflict(aggregate: object, problem: str) -> IntegrityError:
    """Return the error of an insert that does not continue an aggregate."""
    return IntegrityError(f"Aggregate {aggregate} {problem}; load it again and repeat the command.")


def check_originator(originator_id: UUID | str) -> UUID:
    """Return the id of an aggregate.

    Raises: ProgrammingError when it is not a UUID.
    """
    if not isinstance(originator_id, UUID):
        raise ProgrammingError(f"Originator ids must be UUIDs, not {originator_id!r}.")
    return originator_id
