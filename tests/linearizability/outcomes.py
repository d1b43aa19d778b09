"""What a mailbox's log says in the end, added to the histories of its messages."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from postroom.domain.envelope.build import open_envelope
from postroom.domain.mailbox.events import MailboxCreated, OwnershipTaken
from postroom.domain.message import MessageAcked, MessageReceived, MessageSent
from postroom.domain.record import Record
from tests.linearizability.history import Operation, read_histories


class TakeOver(NamedTuple):
    """The first record of an epoch; `uptime` is of the machine, in µs."""

    uptime: int
    owner: str
    epoch: int


class Outcome(NamedTuple):
    """What a log says.

    Arguments:
        take_overs: one for each epoch.
        statuses: `acked` or `unsettled`, by payload.
        doubled: payloads that were stored twice.
        overlaps: records of an epoch other than the one that was last taken over.
        late: payloads that were delivered after their ack.
    """

    take_overs: list[TakeOver]
    statuses: dict[str, str]
    doubled: list[str]
    overlaps: list[str]
    late: list[str]

    @property
    def epochs(self) -> int:
        """Return how many epochs the log has."""
        return len(self.take_overs)


def read_outcome(records: Iterable[Record]) -> Outcome:
    """Return what a log says."""
    outcome = Outcome([], {}, [], [], [])
    epoch = 0
    payloads: dict[bytes, str] = {}
    for record in records:
        event = record.event
        if record.epoch != epoch:
            if record.epoch > epoch and isinstance(event, MailboxCreated | OwnershipTaken):
                epoch = record.epoch
            else:
                outcome.overlaps.append(f"after epoch {epoch}: {record}")
        if isinstance(event, OwnershipTaken):
            outcome.take_overs.append(TakeOver(event.uptime, event.owner, event.epoch))
        elif isinstance(event, MessageSent):
            payload = open_envelope(event.envelope).payload.decode()
            if payload in outcome.statuses:
                outcome.doubled.append(payload)
            outcome.statuses[payload], payloads[record.stream] = "unsettled", payload
        elif isinstance(event, MessageAcked):
            outcome.statuses[payloads[record.stream]] = "acked"
        elif isinstance(event, MessageReceived):
            payload = payloads[record.stream]
            if outcome.statuses[payload] == "acked":
                outcome.late.append(payload)
    return outcome


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
