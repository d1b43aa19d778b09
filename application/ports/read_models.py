"""Ports: the read models that projections build, and queries that search them."""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from enum import StrEnum
from typing import Protocol

import msgspec

from postroom.application.masking import NO_MASK, Mask
from postroom.application.page import Page, PageCursor, check_limit
from postroom.application.ports.dead_letters import DeadLetters
from postroom.application.ports.facets import BARS, Facets, SearchStatistics, SuggestionField, Timeline
from postroom.domain.errors import InvalidRequest
from postroom.domain.search import (
    DEFAULT_LIMIT,
    NO_BODIES,
    BodyRules,
    EventFilter,
    FoundMessage,
    TableStats,
)

SHOWN_PARKED = 5
"""Default number of parked records in a status."""
PERIODS = ("hour", "day")


class ShardBacklog(msgspec.Struct, frozen=True):
    """The number of unsettled messages of one shard (SDS-047 QRY-050, QRY-051).

    Arguments:
        oldest_at: log time in µs at which the oldest message, except dead letters, was sent; None if none.
    """

    mailbox: str
    topic: str
    shard: int
    ready: int
    in_flight: int
    delayed: int
    dead: int
    oldest_at: int | None


class ContextBacklog(msgspec.Struct, frozen=True):
    """The backlog of the outbox or the inbox of a bounded context (SDS-047 QRY-050, QRY-051).

    Arguments:
        box: `outbox` or `inbox`.
        count: events that are not published, or messages that are neither processed nor dead-lettered.
        parked: events among them that are not retried automatically, or messages that are dead letters.
        oldest_at: when the oldest counted one occurred or was received, µs UTC.
        as_of: when they were counted, µs UTC.
    """

    context: str
    box: str
    count: int
    parked: int
    oldest_at: int | None
    as_of: int


class ActivityCount(msgspec.Struct, frozen=True):
    """The number of events of one type in a topic, in an hour or a day (RFC-037 phase 7).

    Arguments:
        starts_at: when the hour or the day (UTC) began, µs of log time.
        topic: empty for events of the mailbox itself.
        event: event type, such as `MessageSent`.
        first_at, last_at: log time in µs of the first and the last event.
    """

    starts_at: int
    topic: str
    event: str
    events: int
    first_at: int
    last_at: int


class BacklogFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of the shards in a backlog.

    Arguments:
        topics: exact names or globs; one must match.
        cursor: `next_cursor` of the previous page.
    """

    mailbox: str | None = None
    topics: tuple[str, ...] = ()
    limit: int = DEFAULT_LIMIT
    cursor: str | None = None

    def __post_init__(self) -> None:
        check_limit(self.limit)


class ActivityFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of activity, returned latest hour or day first.

    Arguments:
        period: `hour` or `day`.
        topics: exact names or globs; one must match; events of the mailbox itself match none.
        since, until: log time in µs; hours or days that began at or after `since`, and before `until`.
        cursor: `next_cursor` of the previous page.
    """

    period: str = "day"
    mailbox: str | None = None
    topics: tuple[str, ...] = ()
    since: int | None = None
    until: int | None = None
    limit: int = DEFAULT_LIMIT
    cursor: str | None = None

    def __post_init__(self) -> None:
        check_limit(self.limit)
        if self.period not in PERIODS:
            raise InvalidRequest(f"Unknown period {self.period!r}; expected {' or '.join(PERIODS)}.")


class BacklogCursor(PageCursor, frozen=True, array_like=True):
    """The shard after which the next page of backlog begins."""

    mailbox: str
    topic: str
    shard: int


class ActivityCursor(PageCursor, frozen=True, array_like=True):
    """The count after which the next page of activity begins."""

    starts_at: int
    topic: str
    event: str


class MailboxLag(msgspec.Struct, frozen=True):
    """Lag of a mailbox's read models: `lag` records, from `position` to the log's `head`.

    Arguments:
        seconds: how long the oldest of those records has been waiting.
        is_same_log: whether the log is the one that the read models were built from; if it was replaced or
            cut, they must be rebuilt.
    """

    mailbox: str
    position: int
    head: int
    lag: int
    seconds: float
    is_same_log: bool = True


class ParkedRecord(msgspec.Struct, frozen=True):
    """A log record that could not be folded into the read models.

    Arguments:
        type: event type and schema version. parked_at: wall clock, µs since 1970 UTC.
    """

    mailbox: str
    position: int
    type: str
    error: str
    parked_at: int


class Version(msgspec.Struct, frozen=True):
    """One version of the read models.

    Arguments:
        status: building, active, retired (can be rolled back to), failed or dropped.
        owner: name of the process that built it. started_at, finished_at: wall clock, µs since 1970 UTC.
        counts: records read and rows built. seconds: how long each phase took.
        bodies: topics whose bodies are searched for words.
    """

    version: int
    status: str
    owner: str
    started_at: int
    finished_at: int | None
    counts: dict[str, int]
    seconds: dict[str, float]
    error: str | None
    bodies: BodyRules = NO_BODIES


class ProjectionStatus(msgspec.Struct, frozen=True):
    """The active version, its lag, and the processes that update the read models.

    Arguments:
        active: the version that answers queries; None before the first rebuild.
        lags: one per mailbox; without an active version, all of its records.
        is_following: whether a process keeps the read models up to date.
        parked: number of records that could not be folded. parked_records: the first of them.
        rebuild: the version being built.
        versions: the newest ones, newest first.
    """

    active: Version | None
    lags: tuple[MailboxLag, ...]
    is_following: bool
    parked: int
    parked_records: tuple[ParkedRecord, ...]
    rebuild: Version | None
    versions: tuple[Version, ...]


class Scan(msgspec.Struct, frozen=True):
    """All messages that match a filter, in one snapshot; to be iterated once.

    Arguments:
        version: version of the read models.
        positions: by mailbox, the last log position in them.
        pages: the messages, oldest first, fetched lazily.
    """

    version: int
    positions: Mapping[str, int]
    pages: Iterator[Sequence[FoundMessage]]


class ReadModels(SearchStatistics, DeadLetters, Protocol):
    """Queries of the read models; every adapter passes `tests/conformance/read_models.py`.

    All calls block, may come from any thread, and raise NotFound before the first rebuild, and Unavailable
    when the read models can't be read.
    """

    def search(self, filter_: EventFilter) -> Page[FoundMessage]:
        """Return a page of the messages that `filter_.matches`.

        A cursor remains valid when messages arrive or another version becomes active: the next page begins
        after the same row, and is read from the active version.
        """

    def scan(self, filter_: EventFilter) -> AbstractContextManager[Scan]:
        """Read all messages that `filter_.matches`, ignoring its order and paging.

        The scan reads one snapshot while the context lasts, page by page.
        """

    def get(self, message_id: str, mailbox: str | None = None) -> FoundMessage:
        """Return one message by its id (RFC-037 `GetEvent`), or raise NotFound."""

    def backlog(self, filter_: BacklogFilter) -> Page[ShardBacklog]:
        """Return a page of the backlog, by mailbox, topic and shard (SDS-047 QRY-050)."""

    def activity(self, filter_: ActivityFilter) -> Page[ActivityCount]:
        """Return a page of event counts, by hour or day, topic and type, summed over all mailboxes."""

    def contexts(self) -> tuple[ContextBacklog, ...]:
        """Return the backlog of each context's outbox and inbox as last counted; never raises NotFound."""

    def stats(self) -> TableStats:
        """Return totals of the archive (RFC-037 `GetTableStats`)."""

    def status(self, shown_parked: int = SHOWN_PARKED) -> ProjectionStatus:
        """Return the active version and its lag; does not raise NotFound before the first rebuild.

        Arguments:
            shown_parked: maximum number of parked records to return.
        """

    def close(self) -> None:
        """Close the connections; closing twice is fine."""


class ExportFormat(StrEnum):
    """The format of a streamed export."""

    CSV = "csv"
    JSON = "json"
    """JSON lines."""
    PARQUET = "parquet"


class ExportOptions(msgspec.Struct, frozen=True):
    """The content of a streamed export.

    Arguments:
        payload: include envelopes and, unless encrypted, payloads.
        limit: maximum number of messages, oldest first; None for all.
        mask: headers whose values are hidden. With any mask, envelopes are left out; with one of fields of
            payloads, these too.
    """

    format: ExportFormat
    payload: bool = False
    limit: int | None = None
    mask: Mask = NO_MASK


class ExportPart(msgspec.Struct, frozen=True):
    """A part of a streamed export.

    Arguments:
        messages: how many messages the export has so far.
        payload_bytes: bytes of the envelopes so far, if they are included.
    """

    data: bytes
    messages: int
    payload_bytes: int


class SearchQueries(Protocol):
    """Facets, timeline, suggestions and exports of the messages of a mailbox.

    All raise NotFound before the first rebuild, Unavailable when the read models can't be read, and
    InvalidRequest for a filter that names another mailbox.
    """

    async def facets(self, filter_: EventFilter, /) -> Facets:
        """Count the matching messages by the values of fields; see `SearchStatistics.facets`."""

    async def timeline(self, filter_: EventFilter, bars: int = BARS, /) -> Timeline:
        """Count the matching messages by time; see `SearchStatistics.timeline`."""

    async def search_unsettled(self, filter_: EventFilter, /) -> Page[FoundMessage]:
        """Return a page of the unsettled messages that match, without read models.

        Raises: NotFound where another process has them in memory.
        """

    async def suggest(
        self, field: SuggestionField, start: str, /, *, covers: Callable[[str], bool] = lambda value: True
    ) -> tuple[str, ...]:
        """Return values of a field that begin with a text; see `SearchStatistics.suggest`."""

    def export(
        self, filter_: EventFilter, options: ExportOptions, /
    ) -> AbstractAsyncContextManager[AsyncIterator[ExportPart]]:
        """Read all matching messages in one snapshot, oldest first, as parts of a file.

        Memory is bounded: nothing is read ahead of a slow reader. The end of the context ends the export.
        """
