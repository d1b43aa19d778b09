"""The place that keeps the logs of a test of the event log conformance suite."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

from msgspec.structs import replace

from postroom.application.ports.event_log import EventLog
from postroom.domain.message import MessageSent
from postroom.domain.record import Event, Record

ONE, TWO = "acme@one", "acme@two"


class Store(ABC):
    """One place that keeps logs, for as long as a test runs."""

    is_durable: bool
    """Whether a log that was closed and opened again is the same."""
    durability: str
    """What the logs say an append survives."""

    @abstractmethod
    def open(self, mailbox: str = ONE) -> EventLog:
        """Return the log of a mailbox, for its owner."""

    @abstractmethod
    def open_reader(self, mailbox: str = ONE) -> EventLog:
        """Return the log of a mailbox that exists, for somebody who only reads."""


def replayed(records: Iterable[Record]) -> list[tuple[int, Event]]:
    """Return positions and events of records, without envelopes, as `EventLogReader.replay` does."""
    return [
        (record.position, replace(record.event, envelope=b""))
        if isinstance(record.event, MessageSent)
        else (record.position, record.event)
        for record in records
    ]
