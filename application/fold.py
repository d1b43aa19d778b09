"""Fold a mailbox from its log: from the newest snapshot that fits, then the tail."""

from collections.abc import Iterable

from postroom.application.codec import to_event, to_events
from postroom.application.ports.event_log import EventLog
from postroom.domain.errors import BrokenLog
from postroom.domain.mailbox.snapshot import restore_snapshot
from postroom.domain.mailbox.state import Mailbox, evolve
from postroom.domain.message import Message
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
    mailbox = _from_snapshot(log, limits, default_policy) or Mailbox(log.mailbox, limits, default_policy)
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


def fold_message(records: Iterable[Record]) -> Message | None:
    """Return one message as its whole history tells it, or None without records."""
    message: Message | None = None
    for record in records:
        message = evolve_message(message, to_event(record), record.position, record.epoch)  # type: ignore[arg-type]
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


def _from_snapshot(
    log: EventLog, limits: MailboxLimits | None, default_policy: TopicPolicy | None
) -> Mailbox | None:
    for snapshot in log.snapshots():
        record = log.at_positions([snapshot.position]).get(snapshot.position)
        if record is not None and record.chain == snapshot.chain:
            mailbox = restore_snapshot(snapshot.state, log.mailbox, limits, default_policy)
            if mailbox is not None:
                return mailbox
    return None
