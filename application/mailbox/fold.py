"""Fold of a mailbox from its newest valid snapshot and the records after it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

from postroom.application.mailbox.stored_snapshots import SavedPart, usable_snapshots
from postroom.application.ports.event_log import EventLogReader
from postroom.domain.errors import BrokenLog, NotFound, PostroomError
from postroom.domain.event import Event
from postroom.domain.mailbox.batch import evolve_batch, is_batch
from postroom.domain.mailbox.state import Mailbox, evolve
from postroom.domain.message import Message, MessageSent
from postroom.domain.message import evolve as evolve_message
from postroom.domain.record import Record

P = ParamSpec("P")
T = TypeVar("T")


def fold(log: EventLogReader) -> Mailbox:
    """Return the mailbox as a fold of its log; requires no ownership.

    A snapshot is used only if the commit at its end is still in the log with the same chain hash.

    Raises: BrokenLog when the start of the log is missing and no snapshot covers it, or its end is missing.
    """
    mailbox, _ = fold_from(log)
    return mailbox


def fold_from(log: EventLogReader) -> tuple[Mailbox, list[SavedPart]]:
    """Return the mailbox as `fold` does, and the parts of the snapshot that was used, oldest first."""
    check_seal(log)
    mailbox, parts = Mailbox(log.mailbox), list[SavedPart]()
    for snapshot in usable_snapshots(log):
        restored = snapshot.restore()
        if restored is not None:
            mailbox, parts = restored, snapshot.parts
            break
    start = mailbox.position
    first = log.first_position()
    if first is not None and first > mailbox.position + 1:
        raise BrokenLog(
            f"The log of mailbox {log.mailbox} starts at position {first}, and no snapshot covers the "
            "records before. Restore the store from a backup.",
            first,
        )
    _evolve_all(mailbox, log.replay_runs(start))
    return mailbox, parts


def fold_at(log: EventLogReader, position: int) -> Mailbox:
    """Return the mailbox as of the record at `position`; at 0 it is empty.

    Folds from the newest snapshot at or before `position`, else from the first record.

    Raises: NotFound when the log does not reach `position`, or retention removed the records before it.
    """
    head = log.head()
    last = head.position if head is not None else 0
    if not 0 <= position <= last:
        raise NotFound(f"The log of mailbox {log.mailbox} ends at position {last}; it has no {position}.")
    restored = (snapshot.restore() for snapshot in usable_snapshots(log, position))
    mailbox = next((each for each in restored if each is not None), Mailbox(log.mailbox))
    first = log.first_position() or 1
    if first > mailbox.position + 1:
        oldest = min((snapshot.position for snapshot in usable_snapshots(log)), default=first)
        raise NotFound(
            f"The history of mailbox {log.mailbox} begins at position {oldest}, after {position}: retention "
            "removed the records before it."
        )
    _evolve_all(mailbox, _through(position, log.replay_runs(mailbox.position)))
    return mailbox


def fold_message(records: Iterable[Record]) -> Message | None:
    """Return a message as a fold of its records, or None if its first record is missing."""
    message: Message | None = None
    for record in records:
        event = record.event
        if message is None and not isinstance(event, MessageSent):
            return None  # retention removed the start of its history
        message = evolve_message(message, event, record.position, record.epoch)  # type: ignore[arg-type]
    return message


def check_seal(log: EventLogReader) -> None:
    """Check that the log still holds the commit that the last owner sealed.

    Raises: BrokenLog when it does not.
    """
    seal = log.read_seal()
    if seal is None or seal.position == 0:
        return
    record = log.at_positions([seal.position]).get(seal.position)
    if record is not None and record.chain == seal.chain:
        return
    first = log.first_position()
    if record is None and first is not None and first > seal.position:
        return  # retention removed it
    raise BrokenLog(
        f"The log of mailbox {log.mailbox} reached position {seal.position} when it was last closed, but "
        "the commit there is missing or altered: the end of the log was cut off or rewritten. Restore the "
        "store from a backup.",
        seal.position,
    )


def refuse_altered_records(query: Callable[P, T]) -> Callable[P, T]:
    """Decorate a query of a log: whatever an altered record breaks, BrokenLog is raised."""

    @wraps(query)
    def refusing(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return query(*args, **kwargs)
        except PostroomError:
            raise
        except Exception as error:
            raise BrokenLog(
                "The log has records that can't be read as they were written: at least one was altered. Run "
                "`postroom verify`, which names the first, and restore the store from a backup.",
                0,
            ) from error

    return refusing


def _evolve_all(mailbox: Mailbox, runs: Iterable[tuple[int, Sequence[Event]]]) -> None:
    """Evolve a mailbox by the events after its position, as `EventLogReader.replay_runs` yields them.

    Raises: BrokenLog naming the first event that is missing or can't be decoded or applied.
    """
    try:
        with mailbox.replaying():
            for position, run in runs:
                if position != mailbox.position + 1:
                    raise _gap(mailbox, position)
                if len(run) > 1 and is_batch(run):
                    evolve_batch(mailbox, run)
                else:
                    for event in run:
                        evolve(mailbox, event)
    except PostroomError:
        raise
    except Exception as error:  # an altered event can break `evolve` in any way
        position = mailbox.position
        raise BrokenLog(
            f"The event of mailbox {mailbox.name} at position {position} can't be applied: it or one before "
            "it was altered. Restore the store from a backup.",
            position,
        ) from error


def _through(
    position: int, runs: Iterable[tuple[int, Sequence[Event]]]
) -> Iterator[tuple[int, Sequence[Event]]]:
    """Yield the events up to a position."""
    for first, run in runs:
        if first > position:
            return
        yield first, run[: position - first + 1]


def _gap(mailbox: Mailbox, position: int) -> BrokenLog:
    expected = mailbox.position + 1
    return BrokenLog(
        f"The log of mailbox {mailbox.name} has no event at position {expected}, but one at {position}: "
        "commits were removed. Restore the store from a backup.",
        expected,
    )
