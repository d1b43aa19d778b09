"""`VerifyRange`: verifies a part of a log, small enough for an interactive call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from postroom.application.anchors import truncated_log
from postroom.application.mailbox.codec import to_records
from postroom.application.mailbox.stored_snapshots import check_seal, refuse_altered_records
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.browse_log import missing_position
from postroom.application.queries.verify import (
    Removal,
    check_envelopes,
    check_message,
    check_name,
    mailbox_removals,
    start_of,
)
from postroom.domain.arguments import check_int
from postroom.domain.commit import POSITIONS_PER_MAILBOX, chained
from postroom.domain.errors import BrokenLog

MAX_EVENTS = 100_000
MAX_POSITION = POSITIONS_PER_MAILBOX - 1


class RangeVerification(msgspec.Struct, frozen=True):
    """The verified commits, of the positions `first` to `last`.

    Arguments:
        commits, messages: numbers of verified commits and messages.
        chain: chain hash of the last commit in hex, to continue with.
        following: the position to continue with; None at the end of the range or log.
    """

    mailbox: str
    first: int
    last: int
    commits: int
    messages: int
    chain: str
    following: int | None


@dataclass(frozen=True)
class VerifyRange:
    """A verification of a range of a log: of the chain, and of every event and message.

    Unlike `VerifyLog`, it neither folds the mailbox nor checks the index, which need the log from its start.

    Arguments:
        removals: returns the removals that are recorded in a log.
    """

    log: EventLogReader
    removals: Callable[[EventLogReader], Sequence[Removal]] = mailbox_removals

    @refuse_altered_records
    def __call__(
        self,
        first: int,
        through: int | None = None,
        *,
        chain: str | None = None,
        limit: int = MAX_EVENTS,
    ) -> RangeVerification:
        """Verify commits, starting with the one that contains position `first`.

        Arguments:
            through: last position; None for the end of the log.
            chain: `chain` of the verification that `first` continues; None trusts the previous commit.
            limit: number of events after which the verification ends with the current commit, 1 to 100,000.

        Raises: BrokenLog naming the commit or event that fails, NotFound if the log lacks the position.
        """
        check_int("limit", limit, 1, MAX_EVENTS)
        check_int("The first position", first, 1, MAX_POSITION)
        start, link = self._start(first, chain)
        last, commits, messages, head = start, 0, 0, self.log.head()
        end = 0 if head is None else head.position
        stop = end if through is None else min(through, end)
        for commit in chained(self.log.commits(start), link, start + 1):
            records = list(to_records(commit))
            check_name(self.log.mailbox, records[0].event)
            sent = [each for each in map(check_message, records) if each is not None]
            check_envelopes(commit, [each.envelope for each in sent])
            last, link = commit.last, commit.chain
            commits, messages = commits + 1, messages + len(sent)
            if last >= stop or last - start >= limit:
                break
        if last < stop and last - start < limit:
            raise truncated_log(self.log.mailbox, last, stop)
        if last >= end:
            check_seal(self.log)
        return RangeVerification(
            self.log.mailbox,
            start + 1,
            last,
            commits,
            messages,
            link.hex(),
            last + 1 if last < stop else None,
        )

    def _start(self, first: int, chain: str | None) -> tuple[int, bytes]:
        """Return the position before the commit that holds `first`, and the chain hash to continue from."""
        commit = next(iter(self.log.commits_of([first], envelopes=False)), None)
        oldest, head = self.log.first_position(), self.log.head()
        if commit is None:
            if oldest is not None and head is not None and oldest <= first <= head.position:
                raise BrokenLog(
                    f"The log of mailbox {self.log.mailbox} has no commit at position {first}: it was "
                    "removed or moved. Restore the store from a backup.",
                    first,
                )
            raise missing_position(self.log, first)
        if commit.first == oldest:
            start, link = start_of(self.log, self.removals)
        else:
            previous = next(iter(self.log.commits_of([commit.first - 1], envelopes=False)), None)
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
