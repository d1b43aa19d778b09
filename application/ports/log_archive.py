"""Port: where the records of a mailbox go before retention removes them from its log."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from postroom.domain.record import Record


class Segment(NamedTuple):
    """Describe records that were archived together: all positions from `first` to `last`.

    Arguments:
        before: chain hash of the record before `first`; None where that record went without being archived.
        chain: chain hash of the record at `last`.
    """

    mailbox: str
    first: int
    last: int
    before: bytes | None
    chain: bytes


class LogArchive(Protocol):
    """Keep what retention removes; every adapter passes `tests/conformance/log_archive.py`.

    Calls block and may come from any thread. All of them raise Unavailable when the archive can't be used.
    """

    def store(self, mailbox: str, records: Sequence[Record], before: bytes | None) -> Segment:
        """Keep records whose positions follow each other, durable when this returns.

        Storing the same records again, or some of them together with others, is fine.

        Arguments:
            before: chain hash of the record before the first; None when it is not known.
        """

    def mailboxes(self) -> list[str]:
        """Return the names of the mailboxes of which records are archived, sorted."""

    def segments(self, mailbox: str) -> list[Segment]:
        """Return what is archived of a mailbox, in the order of positions; segments may overlap."""

    def last_segment(self, mailbox: str) -> Segment | None:
        """Return the segment that reaches the highest position, or None when nothing is archived."""

    def read(self, mailbox: str, after: int = 0) -> Iterator[Record]:
        """Yield whole records in the order of their positions, each once, from the one after `after` on.

        Raises: BrokenLog when a record is missing or was altered since it was archived; where records went
            without being archived, positions jump.
        """

    def replay(self, mailbox: str, after: int = 0) -> Iterator[tuple[Any, ...]]:
        """Yield of each record only the columns up to `state`: what folding a mailbox needs, not verified."""

    def history(self, mailbox: str, stream: bytes) -> list[Record]:
        """Return the whole records of one message or of the mailbox itself, oldest first, not verified."""

    def at_positions(self, mailbox: str, positions: Sequence[int]) -> dict[int, Record]:
        """Return the whole records at these positions, not verified; what is missing is left out."""

    def position_before(self, mailbox: str, at: int) -> int:
        """Return the position of the last record written before log time `at` (µs), or 0."""

    def size(self, segment: Segment) -> int:
        """Return how many bytes a segment takes."""
