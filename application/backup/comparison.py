"""Comparison of a log with the log of a backup that is to replace it."""

from collections.abc import Sequence
from typing import NamedTuple

from postroom.application.pluralize import pluralize
from postroom.application.ports.event_log import EventLogReader
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import MessageSent


class Loss(NamedTuple):
    """Events of a mailbox that the backup lacks.

    Arguments:
        common: last position through which both logs have the same commits; 0 for none.
        records, messages: number of the mailbox's events after it, and of the messages sent by them.
        is_diverged: whether the backup has other events after it; otherwise the mailbox only goes further.
    """

    mailbox: str
    common: int
    records: int
    messages: int
    is_diverged: bool


def compare(target: EventLogReader, backup: EventLogReader | None) -> Loss | None:
    """Return the loss if the backup's log replaced `target`, or None.

    Arguments:
        backup: None when the backup does not contain the mailbox.
    """
    head = target.head()
    if head is None:
        return None
    end = None if backup is None else backup.head()
    common = 0 if backup is None or end is None else _common(target, backup, head.position, end.position)
    if common == head.position:
        return None
    messages = sum(isinstance(event, MessageSent) for _, event in target.replay(common))
    is_diverged = end is not None and common < end.position
    return Loss(target.mailbox, common, head.position - common, messages, is_diverged)


def _common(target: EventLogReader, backup: EventLogReader, last: int, end: int) -> int:
    """Return the last position at which both logs have the same chain hash, by a binary search.

    A chain hash covers all commits before it, so the logs are the same up to there, the end of a commit.
    """
    first = max(target.first_position() or 1, backup.first_position() or 1)
    high = min(last, end)
    if first > high:  # retention removed every position that both have had
        return high
    low = first - 1
    while low < high:
        middle = (low + high + 1) // 2
        commit, copy = (log.commits_of([middle], envelopes=False) for log in (target, backup))
        if commit and copy and commit[0].chain == copy[0].chain:
            low = middle
        else:
            high = middle - 1
    return low if low >= first else 0


def check_losses(losses: Sequence[Loss], unsent: int, store: str, discard_newer: int) -> None:
    """Check that the operator knows what a restore discards.

    Arguments:
        unsent: number of messages that transactions recorded in the store and that were not sent yet.
        discard_newer: number of records and unsent messages that may be lost, exactly.

    Raises: InvalidRequest naming what would be lost, when that is another number of records.
    """
    count = sum(loss.records for loss in losses) + unsent
    if count == discard_newer:
        return
    if not count:
        raise InvalidRequest(
            f"The store {store} has no records that the backup lacks, not {discard_newer:,}; omit "
            "--discard-newer."
        )
    outbox = [f"the outbox has {pluralize(unsent, 'unsent message')}"] if unsent else []
    text = "; ".join([*map(_describe, losses), *outbox])
    raise InvalidRequest(
        f"The store {store} has records that the backup lacks: {text}. Restoring discards them, acknowledged "
        f"sends included; to do so, add --discard-newer {count}."
    )


def _describe(loss: Loss) -> str:
    records, messages = pluralize(loss.records, "record"), pluralize(loss.messages, "message")
    where = f"after position {loss.common:,}" if loss.common else "that the backup has nothing of"
    also = ", where the backup goes on with other records" if loss.is_diverged else ""
    return f"mailbox {loss.mailbox} has {records} with {messages} {where}{also}"
