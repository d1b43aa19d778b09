"""`VerifyLog`, `VerifyRange`: verify that no event of a log was removed, moved or altered."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from postroom.application.anchors import Anchor, ExpectedEnds, truncated_log
from postroom.application.mailbox.codec import encode_envelopes, is_intact, to_records
from postroom.application.mailbox.stored_snapshots import check_seal, refuse_altered_records, usable_snapshots
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.browse_log import missing_position
from postroom.application.queries.verify_index import IndexCheck
from postroom.domain.arguments import check_int
from postroom.domain.commit import GENESIS, POSITIONS_PER_MAILBOX, Commit, chained
from postroom.domain.errors import BrokenLog
from postroom.domain.mailbox.events import LogTruncated, MailboxCreated
from postroom.domain.mailbox.evolve import evolve
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.message import MessageSent
from postroom.domain.names import mailbox_stream
from postroom.domain.record import Record


class FoldCheck:
    """Check that each event of a mailbox can be applied to the state before it.

    After retention, the events before the oldest snapshot can't be applied, and are only read. Events of
    reserved logs, whose epoch is 0, are never applied.
    """

    def __init__(self, log: EventLogReader, start: int) -> None:
        """Take the log whose events after `start` will follow."""
        self._mailbox = Mailbox(log.mailbox) if start == 0 else None
        self._snapshots = {} if start == 0 else {each.position: each for each in usable_snapshots(log)}

    def applied(self, commit: Commit, records: Iterable[Record]) -> Iterator[Record]:
        """Yield the records of the next commit, each after it was applied.

        Raises: BrokenLog naming the commit, and its first event that can't be applied.
        """
        mailbox = self._mailbox if commit.epoch else None
        if mailbox is not None and commit.at < mailbox.at:
            raise _broken_log(commit, commit.first, "is older than the one before")
        for record in records:
            if mailbox is not None:
                try:
                    evolve(mailbox, record.event)
                except Exception as error:  # an altered event can break `evolve` in any way
                    raise _broken_log(commit, record.position, "can't be applied") from error
            yield record
        if mailbox is not None and mailbox.epoch != commit.epoch:
            raise _broken_log(commit, commit.first, f"has epoch {commit.epoch} instead of {mailbox.epoch}")
        snapshot = self._snapshots.pop(commit.last, None)
        if self._mailbox is None and snapshot is not None:
            self._mailbox = snapshot.restore()


def _broken_log(commit: Commit, position: int, what: str) -> BrokenLog:
    return BrokenLog(
        f"The event at position {position}, in the commit of positions {commit.first} to {commit.last}, "
        f"{what}: it or one before it was altered. Restore the store from a backup.",
        position,
    )


PROGRESS_EVENTS = 10_000


class Verification(msgspec.Struct, frozen=True):
    """The verified events, `first` to `last`, and the chain hash of the last commit in hex.

    Stored elsewhere, `last` and `chain` let a later verification detect a log that was rewritten or cut.

    Arguments:
        mailbox: whose log was verified.
        first, last: positions of the first and the last event.
        messages: number of messages whose payloads were verified.
        chain: chain hash of the last commit, in hexadecimal.
        anchors: number of anchors that the log was compared with.
        older_anchors: number of those that are older than its first commit and could not be.
    """

    mailbox: str
    first: int
    last: int
    messages: int
    chain: str
    anchors: int = 0
    older_anchors: int = 0


class Removal(Protocol):
    """Removal of the commits through a position; `link` is the chain hash of the last one."""

    @property
    def through(self) -> int:
        """Return the position at which the last removed commit ends."""

    @property
    def link(self) -> bytes:
        """Return its chain hash."""


def mailbox_removals(log: EventLogReader) -> Sequence[Removal]:
    """Return the removals that the owners of a mailbox recorded."""
    records = log.read_stream(mailbox_stream(log.mailbox))
    return [record.event for record in records if isinstance(record.event, LogTruncated)]


@dataclass(frozen=True)
class VerifyLog:
    """A verification of a log: of its name, chain, messages (svc-mailbox I-12), index and seal.

    Every event must be decodable, valid after those before it, and in the index.

    Arguments:
        removals: returns the removals that are recorded in a log.
    """

    log: EventLogReader
    removals: Callable[[EventLogReader], Sequence[Removal]] = mailbox_removals

    def __call__(
        self,
        *,
        expected_last: int | None = None,
        expected_chain: str | None = None,
        anchors: Sequence[Anchor] = (),
        progress: Callable[[int], None] = lambda _: None,
        observe: Callable[[MessageSent], None] = lambda _: None,
    ) -> Verification:
        """Verify the whole log.

        Arguments:
            expected_last, expected_chain: position and hash of an earlier one; detect a log that was cut
                or rewritten since.
            anchors: of this log or of others, which are ignored; they detect the same.
            progress: called with the position, about every 10,000 events.
            observe: called with each message.

        Raises: BrokenLog with the first position that fails.
        """
        start, chain = start_of(self.log, self.removals)
        last, messages = start, 0
        own = [each for each in anchors if each.log == self.log.mailbox]
        ends = [(each.position, each.chain) for each in own]
        if expected_last is not None:
            ends.append((expected_last, expected_chain or ""))
        expected = ExpectedEnds(self.log.mailbox, ends, start, chain)
        fold, index = FoldCheck(self.log, start), IndexCheck(self.log)
        for commit in chained(self.log.commits(start), chain, start + 1):
            expected.check(commit)
            envelopes: list[bytes] = []
            for record in fold.applied(commit, to_records(commit)):
                check_name(self.log.mailbox, record.event)
                index.add(record)
                if (sent := check_message(record)) is not None:
                    envelopes.append(sent.envelope)
                    observe(sent)
            messages += len(envelopes)
            check_envelopes(commit, envelopes)
            if commit.last // PROGRESS_EVENTS > last // PROGRESS_EVENTS:
                progress(commit.last)
            last, chain = commit.last, commit.chain
        check_seal(self.log)
        expected.finish(last)
        index.finish(last)
        older = sum(each.position < start for each in own)
        return Verification(self.log.mailbox, start + 1, last, messages, chain.hex(), len(own) - older, older)


def start_of(
    log: EventLogReader, removals: Callable[[EventLogReader], Sequence[Removal]]
) -> tuple[int, bytes]:
    """Return the position before the first commit of a log, and the chain hash to continue from.

    Raises: BrokenLog when commits at the start are missing although retention did not remove them.
    """
    first = log.first_position()
    if first is None or first == 1:
        return 0, GENESIS
    candidates = [each for each in removals(log) if each.through >= first - 1]
    if candidates:
        oldest = min(candidates, key=lambda removal: removal.through)
        return oldest.through, oldest.link
    raise BrokenLog(
        f"The log of mailbox {log.mailbox} starts at position {first}, but no retention is recorded for the "
        "positions before it. Restore the store from a backup.",
        first,
    )


def check_envelopes(commit: Commit, envelopes: Sequence[bytes]) -> None:
    """Raise BrokenLog when a commit's envelopes differ from its messages'."""
    if commit.envelopes != encode_envelopes(envelopes):
        raise BrokenLog(
            f"The commit of positions {commit.first} to {commit.last} has other envelopes than those of its "
            "messages: it was altered. Restore the store from a backup.",
            commit.first,
        )


def check_name(mailbox: str, event: object) -> None:
    """Raise BrokenLog when a log that begins with `event` belongs to another mailbox."""
    if isinstance(event, MailboxCreated) and event.name != mailbox:
        raise BrokenLog(
            f"The store has the log of {event.name} under the name {mailbox}: the names of "
            "mailboxes were altered. Restore the store from a backup.",
            1,
        )


def check_message(record: Record) -> MessageSent | None:
    """Return the message that a record has, if any; raise `BrokenLog` when its envelope was altered."""
    if not isinstance(record.event, MessageSent):
        return None
    if not is_intact(record):
        raise BrokenLog(
            f"The message at position {record.position} does not match its hashes: its envelope was "
            "altered. Restore the store from a backup.",
            record.position,
        )
    return record.event


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

    Unlike `VerifyLog`, it does not fold the mailbox or check the index: both need the log from its start.

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
