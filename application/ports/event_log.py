"""Port: the event log of one mailbox (append at an expected position, read in order)."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from postroom.domain.record import Record


class Head(NamedTuple):
    """Where a log ends: position, log time (µs), chain hash and epoch of its last record."""

    position: int
    at: int
    chain: bytes
    epoch: int


class StoredSnapshot(NamedTuple):
    """A saved fold: the state after the record at `position`, whose chain hash is `chain`."""

    position: int
    chain: bytes
    state: bytes


class Seal(NamedTuple):
    """Where the log ended when its owner last left, so that an end that was cut off is noticed."""

    position: int
    chain: bytes


class LogSize(NamedTuple):
    """Say how large a log is, in bytes: its records, about, and all that the store holds for them and others.

    What truncation freed counts as `held` until the store gave it back to the disk.
    """

    records: int
    held: int


class EventLog(Protocol):
    """Keep the records of one mailbox; every adapter passes `tests/conformance/event_log.py`.

    Calls block and may come from any thread, one append at a time.
    """

    @property
    def mailbox(self) -> str:
        """Return the name of the mailbox."""

    @property
    def durability(self) -> str:
        """Say what an append survives: `power-cut`, `process-crash` or `nothing`."""

    def append(self, records: Sequence[Record]) -> None:
        """Append records, all or none, durable when this returns.

        The first record's position says where the log is expected to end: just before it.

        Raises:
            WrongPosition: the log ends elsewhere.
            Fenced: it ends elsewhere because an owner of a newer epoch wrote to it.
            Unavailable: the store failed; whether the records were kept is unknown.
        """

    def read(self, after: int = 0, limit: int | None = None) -> Iterator[Record]:
        """Yield whole records in the order of their positions, from the one after `after` on."""

    def replay(self, after: int = 0) -> Iterator[tuple[Any, ...]]:
        """Yield of each record only the columns up to `state`: what folding a mailbox needs, quickly."""

    def history(self, stream: bytes) -> list[Record]:
        """Return the whole records of one message or of the mailbox itself, oldest first."""

    def known(self, streams: Iterable[bytes]) -> set[bytes]:
        """Return which of these streams have records."""

    def at_positions(self, positions: Sequence[int]) -> dict[int, Record]:
        """Return the whole records at these positions; what is missing is left out."""

    def head(self) -> Head | None:
        """Return where the log ends, or None while it is empty."""

    def first_position(self) -> int | None:
        """Return the position of the first record that retention left, or None while the log is empty."""

    def position_before(self, at: int) -> int:
        """Return the position of the last record written before log time `at` (µs), or 0."""

    def position_at_size(self, size: int) -> int:
        """Return the last position through which the oldest records take `size` bytes at most, about, or 0.

        Quick for a part of the log; one record more is counted where the first alone takes more.
        """

    def truncate(self, through: int, limit: int) -> int:
        """Remove up to `limit` of the records at or before `through`, oldest first; return how many went."""

    def size(self) -> LogSize:
        """Return how large the log is, indexes included."""

    def give_back(self, limit: int) -> int:
        """Give up to about `limit` bytes that truncation freed back to the disk; return how many went.

        Short enough for appends to wait for it. What is not given back is used for new records.
        """

    def save_snapshot(self, snapshot: StoredSnapshot) -> None:
        """Keep a snapshot; all but the newest two may be dropped."""

    def snapshots(self) -> Iterator[StoredSnapshot]:
        """Yield the kept snapshots, newest first, each read only when it is asked for."""

    def seal(self, seal: Seal) -> None:
        """Keep where the log ends now, in place of what was kept before."""

    def sealed(self) -> Seal | None:
        """Return where the log ended when its owner last left, or None."""

    def close(self) -> None:
        """Release what the log holds; closing twice is fine."""
