"""Reading a whole store in JetStream, for a backup."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import takewhile

from msgspec.structs import replace

from postroom.adapters.jetstream.event_log import JetStreamEventLog
from postroom.adapters.jetstream.frames import StoredCommit
from postroom.adapters.jetstream.log_index import entries_of
from postroom.adapters.jetstream.settings import parse_store_url
from postroom.adapters.jetstream.state import StoreState
from postroom.adapters.jetstream.store_streams import StoreStreams
from postroom.application.ports.backup import MailboxHead, RecordedRow, StoreSnapshot
from postroom.application.ports.event_log import Seal, StoredSnapshot
from postroom.domain.commit import GENESIS, Commit, IndexEntry


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
