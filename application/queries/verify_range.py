"""`VerifyRange`: verify a part of a log that is small enough for a caller who waits."""

from collections.abc import Callable, Sequence

import msgspec

from postroom.application.mailbox.codec import to_records
from postroom.application.mailbox.fold import check_seal, refuse_altered_records
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.verify import (
    Removal,
    check_envelopes,
    check_message,
    mailbox_removals,
    start_of,
)
from postroom.domain.arguments import check_int
from postroom.domain.commit import POSITIONS_PER_MAILBOX, chained
from postroom.domain.errors import BrokenLog, NotFound

MAX_EVENTS = 100_000
MAX_POSITION = POSITIONS_PER_MAILBOX - 1


class RangeVerification(msgspec.Struct, frozen=True):
    """The verified commits, of the positions `first` to `last`.

    Arguments:
        commits, messages: how many were verified.
        chain: chain hash of the last commit in hex, to continue with.
        following: the position to continue with; None when the range or the log ends here.
    """

    mailbox: str
    first: int
    last: int
    commits: int
    messages: int
    chain: str
    following: int | None


class VerifyRange:
    """A verification of a range of a log: of the chain, and of every event and message.

    Unlike `VerifyLog` it does not fold the mailbox, nor compare the index: both take the log from its start.
    """

    def __init__(
        self,
        log: EventLogReader,
        removals: Callable[[EventLogReader], Sequence[Removal]] = mailbox_removals,
    ) -> None:
        """Take the log, and a function that returns the removals recorded in it."""
        self._log = log
        self._removals = removals

    @refuse_altered_records
    def __call__(
        self,
        first: int,
        through: int | None = None,
        *,
        chain: str | None = None,
        limit: int = MAX_EVENTS,
    ) -> RangeVerification:
        """Verify the commits from that of position `first` on.

        Arguments:
            through: last position; None for the end of the log.
            chain: `chain` of the verification that `first` continues; None believes the commit before it.
            limit: number of events after which it ends with the commit, 1 to 100,000.

        Raises: BrokenLog naming the commit or event that fails, NotFound when the log has no such position.
        """
        check_int("limit", limit, 1, MAX_EVENTS)
        check_int("The first position", first, 1, MAX_POSITION)
        start, link = self._start(first, chain)
        last, commits, messages, head = start, 0, 0, self._log.head()
        end = 0 if head is None else head.position
        stop = end if through is None else min(through, end)
        for commit in chained(self._log.commits(start), link, start + 1):
            sent = [each for each in map(check_message, to_records(commit)) if each is not None]
            check_envelopes(commit, [each.envelope for each in sent])
            last, link = commit.last, commit.chain
            commits, messages = commits + 1, messages + len(sent)
            if last >= stop or last - start >= limit:
                break
        if last < stop and last - start < limit:
            raise BrokenLog(
                f"The log of mailbox {self._log.mailbox} ends at position {last}, but it reached {stop} "
                "before: its end was cut off. Restore the store from a backup.",
                last + 1,
            )
        if last >= end:
            check_seal(self._log)
        return RangeVerification(
            self._log.mailbox,
            start + 1,
            last,
            commits,
            messages,
            link.hex(),
            last + 1 if last < stop else None,
        )

    def _start(self, first: int, chain: str | None) -> tuple[int, bytes]:
        """Return the position before the commit that holds `first`, and the chain hash to continue from."""
        commit = next(iter(self._log.commits_of([first], envelopes=False)), None)
        oldest, head = self._log.first_position(), self._log.head()
        if commit is None:
            if oldest is not None and head is not None and oldest <= first <= head.position:
                raise BrokenLog(
                    f"The log of mailbox {self._log.mailbox} has no commit at position {first}: it was "
                    "removed or moved. Restore the store from a backup.",
                    first,
                )
            positions = "no positions" if head is None else f"the positions {oldest} to {head.position}"
            raise NotFound(
                f"The log of mailbox {self._log.mailbox} has {positions}, and not {first}; name one of these."
            )
        if commit.first == oldest:
            start, link = start_of(self._log, self._removals)
        else:
            previous = next(iter(self._log.commits_of([commit.first - 1], envelopes=False)), None)
            if previous is None:
                raise BrokenLog(
                    f"The log jumps to position {commit.first}: the commits before it were removed or moved. "
                    "Restore the store from a backup.",
                    commit.first - 1,
                )
            start, link = previous.last, previous.chain
        if chain is not None and (start + 1, link.hex()) != (first, chain):
            raise BrokenLog(
                f"The log has another commit at position {first - 1} than before: it was rewritten. Restore "
                "the store from a backup.",
                first - 1,
            )
        return start, link
