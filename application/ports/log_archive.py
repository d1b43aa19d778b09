"""Port: the archive of records that retention removes from a log."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from postroom.domain.record import Record


class Segment(NamedTuple):
    """A file of archived records, of all positions from `first` to `last`.

    Arguments:
        before: chain hash of the record before `first`; None if that was removed without being archived.
        chain: chain hash of the record at `last`.
    """

    mailbox: str
    first: int
    last: int
    before: bytes | None
    chain: bytes


class LogArchive(Protocol):
    """Archived records of mailboxes; every adapter passes `tests/conformance/log_archive.py`.

    Calls block, may come from any thread, and raise Unavailable when the archive can't be used.
    """

    def store(self, mailbox: str, records: Sequence[Record], before: bytes | None) -> Segment:
        """Store records with consecutive positions; they are durable when this returns.

        Storing the same records again, or some of them together with others, is fine.

        Arguments:
            before: chain hash of the record before the first; None when unknown.
        """

    def mailboxes(self) -> list[str]:
        """Return the sorted names of the mailboxes with archived records."""

    def segments(self, mailbox: str) -> list[Segment]:
        """Return the segments of a mailbox in the order of positions; they may overlap."""

    def last_segment(self, mailbox: str) -> Segment | None:
        """Return the segment that reaches the highest position, or None when nothing is archived."""

    def read(self, mailbox: str, after: int = 0) -> Iterator[Record]:
        """Yield whole records in the order of their positions, each once, starting after position `after`.

        Positions have gaps where records were removed without being archived.

        Raises: BrokenLog when a record is missing or was altered since it was archived.
        """

    def replay(self, mailbox: str, after: int = 0) -> Iterator[tuple[Any, ...]]:
        """Yield only the columns up to `state` of each record, unverified; they suffice to fold a mailbox."""

    def read_stream(self, mailbox: str, stream: bytes) -> list[Record]:
        """Return the whole records of one message or of the mailbox itself, oldest first, not verified."""

    def at_positions(self, mailbox: str, positions: Sequence[int]) -> dict[int, Record]:
        """Return the whole records at these positions, not verified, without those that are missing."""

    def position_before(self, mailbox: str, at: int) -> int:
        """Return the position of the last record written before log time `at` (µs), or 0."""

    def size(self, segment: Segment) -> int:
        """Return the size of a segment in bytes."""
