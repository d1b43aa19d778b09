"""Reading a whole store in JetStream for a backup, and restoring one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import takewhile
from secrets import token_hex

from msgspec.structs import replace

from postroom.adapters.jetstream.event_log import JetStreamEventLog
from postroom.adapters.jetstream.frames import StoredCommit
from postroom.adapters.jetstream.log_index import entries_of
from postroom.adapters.jetstream.settings import parse_store_url
from postroom.adapters.jetstream.state import StoreState
from postroom.adapters.jetstream.store_streams import StoreStreams
from postroom.application.ports.backup import MailboxHead, RecordedRow, StoreLoader, StoreSnapshot
from postroom.application.ports.event_log import Seal, StoredSnapshot
from postroom.application.text import pluralize
from postroom.domain.commit import GENESIS, Commit, IndexEntry, LastEvent
from postroom.domain.errors import InvalidRequest, NotFound


class JetStreamSnapshot(StoreSnapshot):
    """The content of a store's logs up to the ends that they had at the beginning; see `StoreSnapshot`."""

    def __init__(self, streams: StoreStreams) -> None:
        self._streams = streams
        with streams.opened() as opened:
            names = sorted(StoreState(opened).mailboxes())
        self._heads = {name: self._head(name) for name in names}

    def heads(self) -> list[MailboxHead]:
        return list(self._heads.values())

    def commits(self, mailbox: str) -> Iterator[Commit]:
        return (stored.commit() for stored in self._stored(mailbox))

    def entries(self, mailbox: str) -> Iterator[IndexEntry]:
        last = {
            (update.stream, update.position): update.last
            for stored in self._stored(mailbox)
            for update in stored.last_events
        }
        for stored in self._stored(mailbox):
            for entry in entries_of(stored.commit(envelopes=False)):
                yield replace(entry, last=last.get((entry.stream, entry.position)))

    def snapshots(self, mailbox: str) -> list[StoredSnapshot]:
        with self._log(mailbox) as log:
            return [each for each in log.snapshots() if each.position <= self._heads[mailbox].position]

    def seal(self, mailbox: str) -> Seal | None:
        with self._log(mailbox) as log:
            seal = log.read_seal()
        return seal if seal is not None and seal.position <= self._heads[mailbox].position else None

    def recorded_messages(self) -> Iterator[RecordedRow]:
        """Yield nothing: no transaction records messages in JetStream."""
        return iter(())

    def _stored(self, mailbox: str) -> Iterator[StoredCommit]:
        head = self._heads[mailbox]
        if head.first:
            with self._log(mailbox) as log:
                yield from takewhile(lambda stored: stored.last <= head.position, log.stored(head.first - 1))

    def _head(self, mailbox: str) -> MailboxHead:
        with self._log(mailbox) as log:
            head, first = log.head(), log.first_position()
        if head is None or first is None:
            return MailboxHead(mailbox, 0, 0, GENESIS.hex(), 0, 0)
        return MailboxHead(mailbox, first, head.position, head.chain.hex(), head.epoch, head.at)

    @contextmanager
    def _log(self, mailbox: str) -> Iterator[JetStreamEventLog]:
        with closing(JetStreamEventLog(self._streams, mailbox, create_missing=False)) as log:
            yield log


@contextmanager
def reading_store(url: str) -> Iterator[JetStreamSnapshot]:
    """Read a store while the context lasts.

    Raises: NotFound if the store does not exist, Unavailable if it can't be read.
    """
    streams = StoreStreams(parse_store_url(url))
    with streams.opened():
        yield JetStreamSnapshot(streams)


def existing_logs(url: str) -> list[str]:
    """Return the names of a store's logs, sorted; none if it is missing or its restore was interrupted."""
    try:
        with StoreStreams(parse_store_url(url)).opened() as streams:
            state = StoreState(streams)
            return [] if state.is_restoring() else sorted(state.mailboxes())
    except NotFound:
        return []


LastEvents = Callable[[str], Iterator[LastEvent]]
"""Returns the last events of a mailbox's messages that its index has, in the order of their positions."""


class _LogLoader:
    """A log that is restored; its commits get the additions to the index, which is made of commits here."""

    def __init__(self, log: JetStreamEventLog, last_events: Iterator[LastEvent]) -> None:
        self.log = log
        self._last_events = last_events
        self._next = next(last_events, None)

    def append(self, commits: Sequence[Commit]) -> None:
        """Append commits, in messages that are not larger than one may be if their commits are not."""
        limit = self.log.message_bytes
        group: list[Commit] = []
        size = 0
        for commit in commits:
            bytes_ = len(commit.events) + len(commit.envelopes)
            if group and size + bytes_ > limit:
                self.log.append(group)
                group, size = [], 0
            updates = [*self._updates(commit.last), *commit.last_events]
            group.append(commit._replace(entries=entries_of(commit), last_events=updates))
            size += bytes_
        self.log.append(group)

    def _updates(self, last: int) -> Iterator[LastEvent]:
        """Yield the last events up to a position that were not yielded yet."""
        while self._next is not None and self._next.last <= last:
            yield self._next
            self._next = next(self._last_events, None)


class JetStreamStoreLoader(StoreLoader):
    """Loader of an empty store, which nobody else can open before it is complete; see `StoreLoader`."""

    def __init__(self, streams: StoreStreams, state: StoreState, token: str, last_events: LastEvents) -> None:
        self._streams = streams
        self._state = state
        self._token = token
        self._last_events = last_events
        self._logs: dict[str, _LogLoader] = {}

    def log(self, mailbox: str) -> JetStreamEventLog:
        """Return a log that was added."""
        return self._logs[mailbox].log

    def close(self) -> None:
        """Close the logs."""
        for each in self._logs.values():
            each.log.close()

    def add_mailbox(self, mailbox: str, first: int, last: int) -> None:
        if first > 1:
            self._state.remove_through(mailbox, first - 1, 0)
        log = JetStreamEventLog(self._streams, mailbox, durable=False, restoration=self._token)
        self._logs[mailbox] = _LogLoader(log, self._last_events(mailbox))

    def append(self, mailbox: str, commits: Sequence[Commit]) -> None:
        self._logs[mailbox].append(commits)

    def add_entries(self, mailbox: str, entries: Sequence[IndexEntry]) -> None:
        """Do nothing: the index is made of the commits."""

    def save_snapshots(self, mailbox: str, snapshots: Sequence[StoredSnapshot]) -> None:
        for each in snapshots:
            self.log(mailbox).save_snapshot(each)

    def save_seal(self, mailbox: str, seal: Seal) -> None:
        self.log(mailbox).seal(seal)

    def record_messages(self, rows: Sequence[RecordedRow]) -> None:
        """Raise InvalidRequest: no transaction records messages in JetStream."""
        raise InvalidRequest(
            f"The backup has {pluralize(len(rows), 'message')} that transactions recorded and no owner sent, "
            "which JetStream can't hold; restore it into a file or a postgresql:// URL."
        )


@contextmanager
def loading_store(url: str, last_events: LastEvents) -> Iterator[JetStreamStoreLoader]:
    """Load a store; it can be opened when the context ends without an error, and restored again otherwise.

    Raises: InvalidRequest when the store is not empty or its servers are known not to sync every write,
        Unavailable when they can't be used.
    """
    shared, token = StoreStreams(parse_store_url(url)), token_hex(16)
    with shared.opened(create=True) as streams:
        streams.is_synced()
        state = StoreState(streams, token)
        state.begin_restoration()
        with closing(JetStreamStoreLoader(shared, state, token, last_events)) as loader:
            yield loader
            state.end_restoration()
