"""What a mailbox's log says in the end, added to the histories of its messages."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from postroom.domain.envelope.build import open_envelope
from postroom.domain.mailbox.commands import MailboxCreated, OwnershipTaken
from postroom.domain.message import MessageAcked, MessageSent
from postroom.domain.record import Record
from tests.linearizability.history import Operation, read_histories


class Outcome(NamedTuple):
    """What a log says.

    Arguments:
        epochs: how many it has.
        statuses: `acked` or `unsettled`, by payload.
    """

    epochs: int
    statuses: dict[str, str]


def read_outcome(records: Iterable[Record]) -> Outcome:
    """Return what a log says.

    Raises: AssertionError when an epoch does not grow, or a payload was stored twice.
    """
    epoch = epochs = 0
    statuses: dict[str, str] = {}
    payloads: dict[bytes, str] = {}
    for record in records:
        if record.epoch != epoch:
            assert record.epoch > epoch, f"after epoch {epoch}: {record}"
            assert isinstance(record.event, MailboxCreated | OwnershipTaken), record
            epoch, epochs = record.epoch, epochs + 1
        if isinstance(record.event, MessageSent):
            payload = open_envelope(record.event.envelope).payload.decode()
            assert payload not in statuses, f"{payload} was stored twice"
            statuses[payload], payloads[record.stream] = "unsettled", payload
        elif isinstance(record.event, MessageAcked):
            statuses[payloads[record.stream]] = "acked"
    return Outcome(epochs, statuses)


def message_histories(journals: Iterable[Path], statuses: dict[str, str]) -> dict[str, list[Operation]]:
    """Return the history of each message, by payload.

    A receive, whose object is the empty text, is an operation on each message that it delivered.
    """
    histories = read_histories(journals)
    for receive in histories.pop("", []):
        for payload, attempt in receive.output or ():
            histories.setdefault(payload, []).append(receive._replace(output=attempt))
    end = time.monotonic_ns()
    for payload, history in histories.items():
        status = statuses.get(payload, "absent")
        history.append(Operation("reader", end, end, "find", [], status))
    return histories
