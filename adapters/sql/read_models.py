"""The read models port over SQL tables in any database."""

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol

import msgspec
from sqlalchemy import Connection, Row, func, inspect, select

from postroom.adapters.sql.access_path import choose, read_page
from postroom.adapters.sql.dead_letters import DeadLetterQuery, activity_page, backlog_page
from postroom.adapters.sql.search import Dialect, SearchQuery, matching_topics
from postroom.adapters.sql.statements import statements
from postroom.adapters.sql.statistics import SqlStatistics
from postroom.adapters.sql.tables import (
    MESSAGE_COLUMNS,
    ReadModelTables,
    context_backlog,
    projection,
    projection_cursor,
    read_cursors,
    read_parked,
    settings_of,
    tables_of,
)
from postroom.application.mailbox.codec import envelopes_by_position
from postroom.application.page import Page
from postroom.application.ports.dead_letters import (
    DeadLetter,
    DeadLetterFilter,
    DeadLetterGroupFilter,
    DeadLetterGroupPage,
)
from postroom.application.ports.event_log import LogArchive
from postroom.application.ports.read_models import (
    SHOWN_PARKED,
    ActivityCount,
    ActivityCursor,
    ActivityFilter,
    BacklogCursor,
    BacklogFilter,
    ContextBacklog,
    MailboxLag,
    ParkedRecord,
    ProjectionStatus,
    ReadModels,
    Scan,
    ShardBacklog,
    Version,
)
from postroom.domain.commit import POSITIONS_PER_MAILBOX
from postroom.domain.errors import NotFound, Unavailable
from postroom.domain.message import Status
from postroom.domain.search import (
    Cursor,
    EventFilter,
    FoundMessage,
    Order,
    TableStats,
)
from postroom.projections.incremental import START, Head, find_difference
from postroom.projections.incremental import Cursor as LogCursor
from postroom.projections.models.messages import without_token
from postroom.projections.plan import FORMAT

OpenArchive = Callable[[str], LogArchive]
"""Opens the folder of a log archive."""
AnyRow = Row[Any] | tuple[Any, ...]
SHOWN_VERSIONS = 10
SCAN_PAGE_ROWS = 200
"""Rows per page of a scan: few, because an envelope may be a MiB."""

_SQL = statements("postroom.adapters.sql", "versions.sql", format=FORMAT)
_decode_json = msgspec.json.Decoder().decode
_decode_headers = msgspec.json.Decoder(dict[str, str]).decode
_STATUS = {status.name.lower(): status for status in Status} | {"delayed": Status.READY}
_ITEM_FIELDS = tuple(
    name
    for name in FoundMessage.__struct_fields__
    if name not in ("custom_headers", "status", "envelope_blob")
)
_item_values = itemgetter(*map(MESSAGE_COLUMNS.index, _ITEM_FIELDS))
_ID_COLUMN, _STATUS_COLUMN, _HEADERS_COLUMN = map(MESSAGE_COLUMNS.index, ("id", "status", "custom_headers"))


class QueriedLog(Protocol):
    """The logs of a store, for queries on read models that may be elsewhere.

    Arguments:
        open_archive: opens the folder of a log archive.
    """

    open_archive: OpenArchive | None

    def contexts(self) -> tuple[ContextBacklog, ...]:
        """Return the backlog of the contexts; see `ReadModels.contexts`."""

    def log_heads(self, cursors: Mapping[int, LogCursor]) -> list[Head]:
        """Return the ends of the mailbox logs of the store; see `read_heads`."""

    def log_envelopes(self, db: Connection | None, places: Sequence[int]) -> dict[int, bytes]:
        """Return the envelopes that the log has, without auth tokens, by the places of their messages.

        Arguments:
            db: a transaction of the store's database; None for one of its own.
        """

    def log_time_after(self, mailbox: str, position: int) -> int | None:
        """Return the log time (µs) of a mailbox's first record after a position, or None without one."""

    def is_following(self, target: str = "") -> bool:
        """Return whether a follower holds its lock; see `FollowedLog.leader_lock`."""

    def close(self) -> None:
        """Close the connections; idempotent."""


class SqlReadModels(SqlStatistics, QueriedLog, ReadModels):
    """Queries on SQL tables; each call reads one version, in one transaction.

    Arguments:
        store: the store's name for messages, without a password.
        dialect: the dialect of its database.
        open_archive: opens the folder of a log archive.
    """

    def __init__(self, store: str, dialect: Dialect, open_archive: OpenArchive | None) -> None:
        self._shown = store
        self._dialect = dialect
        self.open_archive = open_archive

    @abstractmethod
    def _exists(self) -> bool:
        """Return whether there is a catalog of versions."""

    @abstractmethod
    def _transaction(self) -> AbstractContextManager[Connection]:
        """Read from one snapshot; raise Unavailable for errors of the database."""

    def _catalog(self, db: Connection) -> Connection:
        """Return the connection to the catalog of versions, which is the database's own by default."""
        return db

    def _query(
        self, filter_: EventFilter, tables: ReadModelTables, topics: Mapping[str, int | None] | None
    ) -> SearchQuery:
        """Return the statements for a filter."""
        return SearchQuery(filter_, tables, topics, self._dialect)

    @abstractmethod
    def _prepare_scan(self, db: Connection) -> None:
        """Prepare this transaction for reading all matching messages, however long it takes."""

    @abstractmethod
    def _size(self, db: Connection) -> int:
        """Return the size of the read models in bytes, including all versions."""

    @abstractmethod
    def _is_rebuild_running(self) -> bool:
        """Return whether a rebuild holds its lock."""

    def search(self, filter_: EventFilter) -> Page[FoundMessage]:
        with self._reading() as (db, tables):
            topics = matching_topics(db, tables, filter_.topics)
            if topics == {}:
                return Page(())
            query = self._query(filter_, tables, topics)
            rows = read_page(db, query)
            shown = rows[: filter_.limit]
            envelopes = self._envelopes(db, tables, shown) if filter_.envelopes else {}
            items = tuple(map(partial(to_message, envelopes), shown))
        last = rows[filter_.limit - 1] if len(rows) > filter_.limit else None
        return Page(items, Cursor(last.timestamp, last.id).encode() if last is not None else None)

    @contextmanager
    def scan(self, filter_: EventFilter) -> Iterator[Scan]:
        filter_ = msgspec.structs.replace(filter_, order=Order.OLDEST_FIRST, offset=0, cursor=None)
        with self._reading() as (db, tables):
            self._prepare_scan(db)
            catalog = self._catalog(db)
            version = catalog.execute(select(projection).where(projection.c.version == tables.version)).one()
            positions = {each.mailbox: each.position for each in read_cursors(catalog, version).values()}
            yield Scan(tables.version, positions, self._scan_pages(db, tables, filter_))

    def _scan_pages(
        self, db: Connection, tables: ReadModelTables, filter_: EventFilter
    ) -> Iterator[Sequence[FoundMessage]]:
        topics = matching_topics(db, tables, filter_.topics)
        if topics == {}:
            return
        for page in self._row_pages(db, self._query(filter_, tables, topics)):
            envelopes = self._envelopes(db, tables, page) if filter_.envelopes else {}
            yield list(map(partial(to_message, envelopes), page))

    def _envelopes(self, db: Connection, tables: ReadModelTables, rows: Sequence[AnyRow]) -> dict[int, bytes]:
        """Return the envelopes of messages by their ids, without those that nothing has any more."""
        places = [row[_ID_COLUMN] for row in rows]
        envelopes = self.log_envelopes(db, places) if places else {}
        archived = [place for place in places if place not in envelopes]
        return envelopes | self._archived_envelopes(db, tables, archived) if archived else envelopes

    def _archived_envelopes(
        self, db: Connection, tables: ReadModelTables, places: Sequence[int]
    ) -> dict[int, bytes]:
        """Return the envelopes of messages that only the archive of the version has."""
        catalog, envelopes = self._catalog(db), dict[int, bytes]()
        plan = catalog.scalar(select(projection.c.plan).where(projection.c.version == tables.version))
        folder = settings_of(plan).archive
        if folder is None or self.open_archive is None:
            return envelopes
        archive, cursor = self.open_archive(folder), projection_cursor.c
        for id_, group in groupby(sorted(places), lambda place: place // POSITIONS_PER_MAILBOX):
            base = id_ * POSITIONS_PER_MAILBOX
            name = select(cursor.mailbox).where(cursor.version == tables.version, cursor.mailbox_id == id_)
            for commit in archive.commits_of(catalog.scalar(name) or "", [place - base for place in group]):
                for position, envelope in envelopes_by_position(commit).items():
                    envelopes[base + position] = without_token(envelope)
        return envelopes

    def _row_pages(self, db: Connection, query: SearchQuery) -> Iterator[Sequence[AnyRow]]:
        """Yield the rows of a query, a page at a time."""
        statement = query.all_rows(choose(db, query))
        with db.execute(statement, execution_options={"yield_per": SCAN_PAGE_ROWS}) as rows:
            yield from rows.partitions()

    def get(self, message_id: str, mailbox: str | None = None) -> FoundMessage:
        page = self.search(EventFilter(message_id=message_id, mailbox=mailbox, limit=1))
        if not page.items:
            raise NotFound(
                f"The read models have no message {message_id}; if it was sent recently, run "
                "`postroom views rebuild`."
            )
        return page.items[0]

    def backlog(self, filter_: BacklogFilter) -> Page[ShardBacklog]:
        with self._reading("backlog") as (db, tables):
            topics = matching_topics(db, tables, filter_.topics)
            rows = db.execute(backlog_page(filter_, tables, topics, self._dialect)).all()
        items = tuple(ShardBacklog(*row) for row in rows[: filter_.limit])
        last = items[-1] if len(rows) > filter_.limit else None
        return Page(items, BacklogCursor(last.mailbox, last.topic, last.shard).encode() if last else None)

    def dead_letters(self, filter_: DeadLetterFilter) -> Page[DeadLetter]:
        with self._reading("dead_letters") as (db, tables):
            topics = matching_topics(db, tables, filter_.topics)
            return DeadLetterQuery(filter_, tables, topics, self._dialect).read_page(db)

    def dead_letter_groups(self, filter_: DeadLetterGroupFilter) -> DeadLetterGroupPage:
        with self._reading("dead_letters") as (db, tables):
            topics = matching_topics(db, tables, filter_.topics)
            return DeadLetterQuery(filter_, tables, topics, self._dialect).read_groups(db, filter_)

    def activity(self, filter_: ActivityFilter) -> Page[ActivityCount]:
        with self._reading("activity") as (db, tables):
            topics = matching_topics(db, tables, filter_.topics)
            rows = db.execute(activity_page(filter_, tables, topics, self._dialect)).all()
        items = tuple(
            ActivityCount(starts_at, topic, event, int(events), first_at, last_at)
            for starts_at, topic, event, events, first_at, last_at in rows[: filter_.limit]
        )
        last = items[-1] if len(rows) > filter_.limit else None
        return Page(items, ActivityCursor(last.starts_at, last.topic, last.event).encode() if last else None)

    def contexts(self) -> tuple[ContextBacklog, ...]:
        if not self._exists():
            return ()
        with self._transaction() as db:
            # The file of an earlier release lacks the table.
            if db.dialect.name == "sqlite" and not inspect(db).has_table(context_backlog.name):
                return ()
            rows = db.execute(
                select(context_backlog).order_by(context_backlog.c.context, context_backlog.c.box)
            )
            return tuple(ContextBacklog(*row) for row in rows)

    def stats(self) -> TableStats:
        """Return totals of messages; the size includes all versions of the read models."""
        with self._reading() as (db, tables):
            topic = tables.topic.c
            sums = (func.sum(topic.messages), func.min(topic.first_timestamp), func.max(topic.last_timestamp))
            total, oldest, newest = db.execute(select(*sums)).one()
            return TableStats(int(total or 0), self._size(db), oldest, newest)

    def status(self, shown_parked: int = SHOWN_PARKED) -> ProjectionStatus:
        newest = select(projection).order_by(projection.c.version.desc()).limit(SHOWN_VERSIONS)
        active: list[Row[Any]] = []
        rows: list[Row[Any]] = []
        parked: tuple[ParkedRecord, ...] = ()
        cursors: dict[int, LogCursor] = {}
        parked_count = 0
        if self._exists():
            with self._transaction() as session:
                db = self._catalog(session)
                active = list(db.execute(select(projection).where(projection.c.status == "active")).all())
                rows = list(db.execute(newest).all())
                if active:
                    cursors = read_cursors(db, active[0])
                    parked_count, parked = read_parked(db, active[0].version, shown_parked)
        building = next((row for row in rows if row.status == "building"), None)
        is_running = building is not None and self._is_rebuild_running()
        return ProjectionStatus(
            _version(active[0]) if active else None,
            tuple(self._lags(cursors)),
            bool(active) and self.is_following(),
            parked_count,
            parked,
            _version(building) if building is not None and is_running else None,
            tuple(map(_version, rows)),
        )

    @contextmanager
    def _reading(self, model: str = "mailbox") -> Iterator[tuple[Connection, ReadModelTables]]:
        if not self._exists():
            raise self._not_built()
        with self._transaction() as db:
            active = self._active(db)
            if active is None:
                raise self._not_built()
            version, models = active
            if models is None:
                raise Unavailable(
                    f"Version {version} of the read models {self._shown} was built by an earlier release; "
                    "rebuild them with `postroom views rebuild`."
                )
            tables = self._tables(db, version, models)
            if model not in tables.models:
                raise NotFound(
                    f"Version {tables.version} of the read models {self._shown} was built without {model}; "
                    f"build it with `postroom views rebuild --only {model}`."
                )
            yield db, tables

    def _active(self, db: Connection) -> tuple[int, str | None] | None:
        """Return the number of the active version and its models; None before the first rebuild."""
        active = self._catalog(db).exec_driver_sql(_SQL["active"].format(schema="")).one_or_none()
        return None if active is None else (active.version, active.models)

    def _tables(self, db: Connection, version: int, models: str) -> ReadModelTables:
        """Return the tables of a version."""
        return tables_of(version, models, self._dialect.text, self._dialect.stream_text)

    def _not_built(self) -> NotFound:
        return NotFound(
            f"The store {self._shown} has no read models yet; build them with `postroom views rebuild`."
        )

    def _lags(self, cursors: Mapping[int, LogCursor]) -> Iterator[MailboxLag]:
        """Yield the lags of the mailboxes that have a log, and of those whose log is gone, by name."""
        now = time.time()
        heads = {head.id: head for head in self.log_heads(cursors)}
        gone = [Head(id_, each.mailbox, 1, 0) for id_, each in cursors.items() if id_ not in heads]
        for head in sorted([*heads.values(), *gone], key=lambda head: head.name):
            cursor = cursors.get(head.id, START)
            lag = max(0, head.last - cursor.position)
            since = self.log_time_after(head.name, cursor.position) if lag else None
            seconds = 0.0 if since is None else max(0.0, round(now - since / 1e6, 3))
            is_same_log = find_difference(cursor, heads.get(head.id)) is None
            yield MailboxLag(head.name, cursor.position, head.last, lag, seconds, is_same_log)


def to_message(envelopes: Mapping[int, bytes], row: AnyRow) -> FoundMessage:
    """Return the message of a row of `MESSAGE_COLUMNS`; its envelope is empty if it is not in `envelopes`."""
    headers = row[_HEADERS_COLUMN]  # a position is found faster than a name
    items = dict(zip(_ITEM_FIELDS, _item_values(row), strict=True))
    if items["message_id"] is None:
        digits = row[-1].hex()
        items["message_id"] = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
    return FoundMessage(
        **items,
        status=_STATUS[row[_STATUS_COLUMN]],
        custom_headers=_decode_headers(headers) if headers else {},
        envelope_blob=envelopes.get(row[_ID_COLUMN], b""),
    )


def _version(row: Row[Any]) -> Version:
    return Version(
        row.version,
        row.status,
        row.owner,
        row.started_at,
        row.finished_at,
        _decode_json(row.counts) if row.counts else {},
        _decode_json(row.seconds) if row.seconds else {},
        row.error,
        settings_of(row.plan).body_rules,
    )
