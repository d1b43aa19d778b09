"""The log reader port over the streams of JetStream."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import pyarrow as pa

from postroom.adapters.jetstream.event_log import JetStreamEventLog
from postroom.adapters.jetstream.settings import parse_store_url
from postroom.adapters.jetstream.state import StoreState
from postroom.adapters.jetstream.store_streams import OpenStreams, StoreStreams
from postroom.domain.commit import Commit
from postroom.domain.names import is_mailbox
from postroom.projections.commit_columns import read_ranges
from postroom.projections.log_reader import Condition, LogBounds, LogExtent, LogReader, Range


@dataclass(frozen=True)
class JetStreamLogReader(LogReader):
    """A reader of the logs of a store in JetStream; see `LogReader`. The repr omits the URL."""

    url: str = field(repr=False)
    allow_gaps: bool = False
    _connected: StoreStreams | None = field(default=None, repr=False, compare=False)

    @contextmanager
    def connected(self) -> "Iterator[JetStreamLogReader]":
        streams = StoreStreams(parse_store_url(self.url))
        with streams.opened():
            yield replace(self, _connected=streams)

    def mailboxes(self) -> dict[str, int]:
        with self._streams().opened() as opened:
            return mailbox_ids(opened)

    def heads(self) -> dict[str, int]:
        return {extent.name: extent.last for extent in self.extents()}

    def bounds(self) -> dict[str, LogBounds]:
        with self._streams().opened() as opened:
            states = {name: StoreState(opened).log_state(name) for name in mailbox_ids(opened)}
        return {name: LogBounds(state.removed, state.sealed) for name, state in states.items()}

    def extents(self, through: Mapping[str, int] | None = None) -> list[LogExtent]:
        extents: list[LogExtent] = []
        streams = self._streams()
        with streams.opened() as opened:
            for name, id_ in mailbox_ids(opened).items():
                if through is not None and not through.get(name):
                    continue
                with closing(JetStreamEventLog(streams, name, create_missing=False)) as log:
                    extent = _extent(log, id_, None if through is None else through[name])
                extents += [extent] if extent is not None else []
        return extents

    def read(
        self, ranges: Iterable[Range], columns: Sequence[str], where: Sequence[Condition] = ()
    ) -> Iterator[pa.RecordBatch]:
        with self.connected() if self._connected is None else nullcontext(self) as reader:
            select = partial(reader.commits, envelopes="envelope" in columns)
            yield from read_ranges(select, ranges, columns, where, allow_gaps=self.allow_gaps)

    def commits(self, range_: Range, *, envelopes: bool = True) -> Generator[Commit, None, None]:
        extent, first, last = range_
        log = JetStreamEventLog(self._streams(), extent.name, create_missing=False, allow_gaps=True)
        with closing(log):
            for commit in log.commits(first - 1, envelopes=envelopes):
                if commit.first > last:
                    return
                yield commit

    def _streams(self) -> StoreStreams:
        return self._connected or StoreStreams(parse_store_url(self.url))


def mailbox_ids(streams: OpenStreams) -> dict[str, int]:
    """Return the ids of all mailboxes by name, in the order of ids."""
    return {name: id_ for name, id_ in StoreState(streams).mailboxes().items() if is_mailbox(name)}


def _extent(log: JetStreamEventLog, id_: int, through: int | None) -> LogExtent | None:
    """Return the extent of a log, up to a position if one is given; None if it is empty."""
    head, first = log.head(), log.first_position()
    if head is None or first is None:
        return None
    if through is None or through >= head.position:
        return LogExtent(id_, log.mailbox, first, head.position, head.at, head.chain.hex())
    if through < first:
        return None
    (commit,) = log.commits_of([through], envelopes=False)
    return LogExtent(id_, log.mailbox, first, through, commit.at, commit.chain.hex())
