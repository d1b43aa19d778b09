"""What outlives every process: the log of leases, and the logs of the mailboxes."""

from collections.abc import Callable
from typing import Any, NamedTuple

from postroom.domain.lease.lease import Lease, evolve
from tests.simulation.cluster.promises import Promises
from tests.simulation.cluster.world import MS, World

WRITTEN, CONFLICT, UNKNOWN = "written", "conflict", "unknown"


class LeaseLog:
    """The log of lease events, with optimistic concurrency, whose answers may get lost.

    Attributes:
        events: by position, counted from 1.
        leases: the fold of all events.
        doubt: probability that a writer does not learn whether its write took effect.
        latency: the longest time that a write takes, µs.
        promises: what every event must keep.
    """

    promises: Promises

    def __init__(self, world: World) -> None:
        self.events: list[Any] = []
        self.leases: dict[str, Lease] = {}
        self.doubt = 0.0
        self.latency = 5 * MS
        self._world = world

    def write(self, mailbox: str, version: int, events: list[Any], answer: Callable[[str], None]) -> None:
        """Append events to the stream of a mailbox, if `version` is still its last, and answer later.

        In doubt the write is lost, took effect, or takes effect after its writer was told that nobody knows.
        """
        random = self._world.random
        if random.random() < self.doubt:
            self._world.at(self._latency(), answer, UNKNOWN)
            if random.random() < 0.67:
                self._world.at(2 * self._latency(), self._arrive, mailbox, version, events, lambda _: None)
        else:
            self._world.at(self._latency(), self._arrive, mailbox, version, events, answer)

    def has(self, event: Any) -> bool:
        """Return whether an event, and not another one with its number, is in the log."""
        return any(each is event for each in reversed(self.events))

    def _arrive(self, mailbox: str, version: int, events: list[Any], answer: Callable[[str], None]) -> None:
        self._world.at(self._latency(), answer, self._append(mailbox, version, events))

    def _append(self, mailbox: str, version: int, events: list[Any]) -> str:
        lease = self.leases.get(mailbox)
        if version != (0 if lease is None else lease.version):
            return CONFLICT
        for event in events:
            before = self.leases.get(mailbox)
            self.events.append(event)
            self._world.note("log", len(self.events), event)
            self.promises.check(before, event)
            self.leases[mailbox] = evolve(before, event)
        return WRITTEN

    def _latency(self) -> int:
        return 1 + int(self._world.random.random() * self.latency)


class Entry(NamedTuple):
    """A record of a mailbox's log, as much of it as matters here."""

    epoch: int
    owner: tuple[str, int]


class MailboxLog:
    """The log of a mailbox: the next record must be at the next position, and is of no older epoch.

    Attributes:
        entries: by position, counted from 1.
        straggler: the longest time that one append of twenty takes, µs.
    """

    def __init__(self, world: World, mailbox: str, entries: list[Entry]) -> None:
        self.mailbox = mailbox
        self.entries = entries
        self.straggler = 500 * MS
        self._world = world

    @property
    def epoch(self) -> int:
        """The epoch of the last record."""
        return self.entries[-1].epoch if self.entries else 0

    def append(self, position: int, entry: Entry, answer: Callable[[bool], None]) -> None:
        """Append a record at a position, if that is the next one, and answer whether it was."""
        random = self._world.random
        delay = int(random.random() * (self.straggler if random.random() < 0.05 else 5 * MS))
        self._world.at(delay, self._arrive, position, entry, answer)

    def _arrive(self, position: int, entry: Entry, answer: Callable[[bool], None]) -> None:
        is_next = position == len(self.entries) + 1
        if is_next:
            last = self.entries[-1] if self.entries else Entry(0, ("", 0))
            self._world.require(
                entry.epoch >= last.epoch, "no append of an older epoch", self.mailbox, entry, last
            )
            if entry.epoch == last.epoch:
                self._world.require(
                    entry.owner == last.owner, "one owner an epoch", self.mailbox, entry, last
                )
            self.entries.append(entry)
        answer(is_next)
