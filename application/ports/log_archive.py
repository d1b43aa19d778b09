"""Port: the archive of commits that retention removes from a log."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from postroom.domain.commit import Commit, IndexEntry


class Segment(NamedTuple):
    """A file of archived commits, of all positions from `first` to `last`.

    Arguments:
        before: chain hash of the commit before `first`; None if that was removed without being archived.
        chain: chain hash of the commit that ends at `last`.
    """

    mailbox: str
    first: int
    last: int
    before: bytes | None
    chain: bytes


class LogArchive(Protocol):
    """Archived commits of mailboxes; every adapter passes `tests/conformance/log_archive.py`.

    Calls block, may come from any thread, and raise Unavailable when the archive can't be used.
    """

    def store(self, mailbox: str, commits: Sequence[Commit], before: bytes | None) -> Segment:
        """Store consecutive commits with their envelopes; they are durable when this returns.

        Storing the same commits again, or some of them together with others, is fine.

        Arguments:
            before: chain hash of the commit before the first; None when unknown.

        Raises: BrokenLog when a commit can't be decoded; nothing was stored.
        """

    def mailboxes(self) -> list[str]:
        """Return the sorted names of the mailboxes with archived commits."""

    def segments(self, mailbox: str) -> list[Segment]:
        """Return the segments of a mailbox in the order of positions; they may overlap."""

    def last_segment(self, mailbox: str) -> Segment | None:
        """Return the segment that reaches the highest position, or None when nothing is archived."""

    def commits(self, mailbox: str, after: int = 0, *, envelopes: bool = True) -> Iterator[Commit]:
        """Yield the commits that end after position `after`, in order, each once.

        Positions have gaps where commits were removed without being archived.

        Arguments:
            envelopes: read them; otherwise, they are empty.

        Raises: BrokenLog when a commit is missing or was altered since it was archived.
        """

    def commits_of(self, mailbox: str, positions: Iterable[int], *, envelopes: bool = True) -> list[Commit]:
        """Return the commits that hold these positions, each once and in order, not verified."""

    def index_of(self, mailbox: str, streams: Iterable[bytes]) -> list[IndexEntry]:
        """Return the entries of these streams in the index, in the order of streams and versions."""

    def position_before(self, mailbox: str, at: int) -> int:
        """Return the last position of the last commit written before log time `at` (µs), or 0."""

    def verify(self, segment: Segment) -> None:
        """Check that what other tools read of a segment is what its commits say, envelopes included.

        Raises: BrokenLog naming the first position at which they differ.
        """

    def size(self, segment: Segment) -> int:
        """Return the size of a segment in bytes."""
