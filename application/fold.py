"""Fold a mailbox from its log: from the newest snapshot that fits, then the tail."""

from collections.abc import Iterable, Iterator
from itertools import islice

from postroom.application.codec import to_event, to_events
from postroom.application.ports.event_log import EventLog
from postroom.domain.errors import BrokenLog, NotFound
from postroom.domain.mailbox.snapshot import restore_snapshot
from postroom.domain.mailbox.state import Mailbox, evolve
from postroom.domain.message import Message, MessageSent
from postroom.domain.message import evolve as evolve_message
from postroom.domain.policy import MailboxLimits, TopicPolicy
from postroom.domain.record import Record


def fold(
    log: EventLog, limits: MailboxLimits | None = None, default_policy: TopicPolicy | None = None
) -> Mailbox:
    """Return the mailbox as its log tells it; needs no ownership, so readers may fold it too.

    A snapshot counts only if the record it stands on is still in the log with the same chain hash.

    Raises: BrokenLog when the start of the log is gone and no snapshot covers it, or its end was cut off.
    """
    mailbox, _ = fold_from(log, limits, default_policy)
    return mailbox


def fold_from(
    log: EventLog, limits: MailboxLimits | None = None, default_policy: TopicPolicy | None = None
) -> tuple[Mailbox, int]:
    """Return the mailbox as `fold` does, and the position of the snapshot it was folded from, or 0."""
    check_seal(log)
    empty = Mailbox(log.mailbox, limits, default_policy)
    mailbox = next(_from_snapshots(log, limits, default_policy), empty)
    start = mailbox.position
    first = log.first_position()
    if first is not None and first > mailbox.position + 1:
        raise BrokenLog(
            f"The log of mailbox {log.mailbox} starts at position {first}, and no snapshot covers what came "
            "before. Restore the store from a backup.",
            first,
        )
    for event in to_events(log.replay(mailbox.position)):
        evolve(mailbox, event)
    return mailbox, start


def fold_at(log: EventLog, position: int) -> Mailbox:
    """Return the mailbox as it stood after the record at `position`, and empty as it began at 0.

    Folds from the newest snapshot at or before `position`, else from the first record.

    Raises: NotFound when the log does not reach `position`, or no longer knows what came before it.
    """
    head = log.head()
    last = head.position if head is not None else 0
    if not 0 <= position <= last:
        raise NotFound(f"The log of mailbox {log.mailbox} ends at position {last}; it has no {position}.")
    mailbox = next(_from_snapshots(log, through=position), Mailbox(log.mailbox))
    first = log.first_position() or 1
    if first > mailbox.position + 1:
        known = min((snapshot.position for snapshot in _from_snapshots(log)), default=first)
        raise NotFound(
            f"The past of mailbox {log.mailbox} is known from position {known} on, not at {position}: "
            "retention removed what came before."
        )
    for event in to_events(islice(log.replay(mailbox.position), position - mailbox.position)):
        evolve(mailbox, event)
    return mailbox


def fold_message(records: Iterable[Record]) -> Message | None:
    """Return one message as its whole history tells it; None where that is gone, or only its end is left."""
    message: Message | None = None
    for record in records:
        event = to_event(record)
        if message is None and not isinstance(event, MessageSent):
            return None  # retention removed the records up to somewhere in its history
        message = evolve_message(message, event, record.position, record.epoch)  # type: ignore[arg-type]
    return message


def check_seal(log: EventLog) -> None:
    """Check that the log still holds the record it ended with when its owner last left.

    Raises: BrokenLog when it doesn't.
    """
    seal = log.sealed()
    if seal is None or seal.position == 0:
        return
    record = log.at_positions([seal.position]).get(seal.position)
    if record is not None and record.chain == seal.chain:
        return
    first = log.first_position()
    if record is None and first is not None and first > seal.position:
        return  # retention went past it
    raise BrokenLog(
        f"The log of mailbox {log.mailbox} reached position {seal.position} when it was last closed, but "
        "that record "
        "is gone or altered: its end was cut off or rewritten. Restore the store from a backup.",
        seal.position,
    )


def _from_snapshots(
    log: EventLog,
    limits: MailboxLimits | None = None,
    default_policy: TopicPolicy | None = None,
    through: int | None = None,
) -> Iterator[Mailbox]:
    """Yield the mailbox as snapshots at or before `through` have it, newest first; those that fit the log."""
    for snapshot in log.snapshots():
        if through is not None and snapshot.position > through:
            continue
        record = log.at_positions([snapshot.position]).get(snapshot.position)
        if record is not None and record.chain == snapshot.chain:
            mailbox = restore_snapshot(snapshot.state, log.mailbox, limits, default_policy)
            if mailbox is not None:
                yield mailbox
