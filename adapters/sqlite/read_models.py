"""The read models port over the SQLite file that `projections/rebuild.py` writes beside the store."""

import fcntl
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    column,
    create_engine,
    func,
    literal_column,
    select,
    table,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import QueuePool

from postroom.adapters.sql.listing import backlog_page, dead_letter_page
from postroom.adapters.sql.search import FEW, FEW_ENOUGH, Lead, SearchQuery
from postroom.adapters.sql.tables import ReadModelTables, projection, tables_of
from postroom.adapters.sqlite.database import connect_reader, statements
from postroom.application.ports.read_models import (
    BacklogFilter,
    BacklogPage,
    DeadLetter,
    DeadLetterFilter,
    DeadLetterPage,
    MailboxLag,
    Place,
    ProjectionStatus,
    ShardBacklog,
    Version,
    rebuild_lock_path,
    views_path,
)
from postroom.domain.errors import NotFound, Unavailable
from postroom.domain.message import Status
from postroom.domain.search import Cursor, EventFilter, FoundMessage, SearchPage, TableStats, topic_matches

SHOWN_VERSIONS = 10
TRIGRAM = 3
"""Characters a word needs for the text index to know it."""

_SQL = statements("views.sql")
_encode_json = msgspec.json.Encoder().encode
_decode_json = msgspec.json.Decoder().decode
_decode_headers = msgspec.json.Decoder(dict[str, str]).decode
_STATUS = {status.name.lower(): status for status in Status} | {"delayed": Status.READY}
_ITEM_FIELDS = tuple(
    name for name in FoundMessage.__struct_fields__ if name not in ("custom_headers", "status")
)


class SqliteReadModels:
    """Answer searches from a SQLite read-model file; every call reads one version, in one transaction.

    Arguments:
        store: path of the SQLite store whose read models these are.
    """

    def __init__(self, store: str | Path) -> None:
        self._store = Path(store)
        self._path = views_path(store)
        # AUTOCOMMIT hands transactions over to us: readers must see the version and its tables at one moment.
        self._engine = create_engine(
            "sqlite+pysqlite://",
            creator=lambda: connect_reader(self._path),
            poolclass=QueuePool,
            isolation_level="AUTOCOMMIT",
        )

    def search(self, wanted: EventFilter) -> SearchPage:
        """Return one page of matching messages; see `ReadModels.search`."""
        with self._reading() as (db, tables):
            topics = _topics(db, tables, wanted.topics)
            if topics == []:
                return SearchPage(())
            query = SearchQuery(wanted, tables, topics, _SqliteDialect())
            rows = db.execute(query.page(_choose(db, query))).all()
        items = tuple(map(_found, rows[: wanted.limit]))
        last = rows[wanted.limit - 1] if len(rows) > wanted.limit else None
        return SearchPage(items, Cursor(last.timestamp, last.id).encode() if last is not None else None)

    def get(self, message_id: str, mailbox: str | None = None) -> FoundMessage:
        """Return one message; see `ReadModels.get`."""
        page = self.search(EventFilter(message_id=message_id, mailbox=mailbox, limit=1))
        if not page.items:
            raise NotFound(
                f"The read models have no message {message_id}; if it was sent lately, run "
                "`postroom project rebuild`."
            )
        return page.items[0]

    def backlog(self, wanted: BacklogFilter) -> BacklogPage:
        """Return one page of the backlog; see `ReadModels.backlog`."""
        with self._reading() as (db, tables):
            topics = _topics(db, tables, wanted.topics)
            rows = db.execute(backlog_page(wanted, tables, topics, _SqliteDialect())).all()
        items = tuple(ShardBacklog(*row) for row in rows[: wanted.limit])
        last = items[-1] if len(rows) > wanted.limit else None
        return BacklogPage(items, Place(last.mailbox, last.topic, last.shard).encode() if last else None)

    def dead_letters(self, wanted: DeadLetterFilter) -> DeadLetterPage:
        """Return one page of the dead letters; see `ReadModels.dead_letters`."""
        with self._reading() as (db, tables):
            topics = _topics(db, tables, wanted.topics)
            rows = db.execute(dead_letter_page(wanted, tables, topics, _SqliteDialect())).all()
        items = tuple(DeadLetter(*row) for row in rows[: wanted.limit])
        last = items[-1] if len(rows) > wanted.limit else None
        return DeadLetterPage(items, Cursor(last.last_seen, last.id).encode() if last else None)

    def stats(self) -> TableStats:
        """Sum the archive up; the bytes are those of the read-model file, all its versions included."""
        with self._reading() as (db, tables):
            topic = tables.topic.c
            sums = (func.sum(topic.messages), func.min(topic.first_timestamp), func.max(topic.last_timestamp))
            total, oldest, newest = db.execute(select(*sums)).one()
        return TableStats(total or 0, self._path.stat().st_size, oldest, newest)

    def status(self) -> ProjectionStatus:
        """Tell what is served and how far behind it is; see `ReadModels.status`."""
        newest = select(projection).order_by(projection.c.version.desc()).limit(SHOWN_VERSIONS)
        active: list[Row[Any]] = []
        rows: list[Row[Any]] = []
        if self._path.exists():
            with self._transaction() as db:
                active = list(db.execute(select(projection).where(projection.c.status == "active")).all())
                rows = list(db.execute(newest).all())
        building = next((row for row in rows if row.status == "building"), None)
        is_running = building is not None and self._is_rebuild_running()
        return ProjectionStatus(
            _version(active[0]) if active else None,
            tuple(self._lags(_decode_json(active[0].cuts) if active else [])),
            _version(building) if building is not None and is_running else None,
            tuple(map(_version, rows)),
        )

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._engine.dispose()

    @contextmanager
    def _reading(self) -> Iterator[tuple[Connection, ReadModelTables]]:
        if not self._path.exists():
            raise self._not_built()
        with self._transaction() as db:
            version = db.scalar(select(projection.c.version).where(projection.c.status == "active"))
            if version is None:
                raise self._not_built()
            yield db, tables_of(version)

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        try:
            with self._engine.connect() as db:
                db.exec_driver_sql("BEGIN")
                try:
                    yield db
                finally:
                    db.exec_driver_sql("ROLLBACK")
        except (DBAPIError, sqlite3.Error) as error:
            reason = error.orig if isinstance(error, DBAPIError) else error
            raise Unavailable(
                f"The read models {self._path} can't be read: {reason}; rebuild them."
            ) from error

    def _not_built(self) -> NotFound:
        return NotFound(
            f"The store {self._store} has no read models yet; build them with `postroom project rebuild`."
        )

    def _lags(self, cuts: Iterable[dict[str, Any]]) -> Iterator[MailboxLag]:
        covered = {cut["name"]: cut["last"] for cut in cuts}
        if not self._store.exists():
            return
        with closing(connect_reader(self._store)) as log:
            for name, head in log.execute(_SQL["heads"]).fetchall():
                position = covered.get(name, 0)
                yield MailboxLag(name, position, head, head - position)

    def _is_rebuild_running(self) -> bool:
        """Tell whether the process that builds is alive: its lock ends with it."""
        with suppress(FileNotFoundError), open(rebuild_lock_path(self._store), "rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


class _SqliteDialect:
    """How SQLite looks values up in one parameter, and words in its trigram index."""

    def among(self, column_: ColumnElement[Any], values: Sequence[str]) -> ColumnElement[bool]:
        each = func.json_each(_encode_json(values).decode()).table_valued("value")
        return column_.in_(select(each.c.value))

    def text_candidates(self, tables: ReadModelTables, words: Sequence[str]) -> ColumnElement[bool] | None:
        # The index knows which three-letter pieces occur in a message, not where: it narrows, the text
        # decides.
        pieces = {word[at : at + TRIGRAM] for word in words for at in range(len(word) - TRIGRAM + 1)}
        if not pieces:
            return None
        query = " AND ".join('"' + piece.replace('"', '""') + '"' for piece in sorted(pieces))
        index = table(f"text_index_v{tables.version}", column("rowid"))
        return tables.mailbox.c.id.in_(
            select(index.c.rowid).where(literal_column(index.name).op("MATCH")(query))
        )


def _topics(db: Connection, tables: ReadModelTables, patterns: Sequence[str]) -> list[str] | None:
    """Return the topics that names and globs stand for; None when there are no patterns."""
    if not patterns:
        return None
    if not any("*" in pattern for pattern in patterns):
        return list(dict.fromkeys(patterns))
    known = db.scalars(select(tables.topic.c.topic)).all()
    return [topic for topic in known if any(topic_matches(pattern, topic) for pattern in patterns)]


def _choose(db: Connection, query: SearchQuery) -> Lead:
    """Return the condition true for the fewest messages, counting each no further than the best so far."""
    leads = query.leads()
    if len(leads) == 1 and leads[0].is_sorted:
        return leads[0]
    best, fewest = query.by_time, FEW
    for lead in leads:
        count = int(db.execute(query.count(lead, fewest)).scalar_one())
        if count < fewest or (best.field == "time" and lead.is_sorted):
            best, fewest = lead, count
        if fewest <= FEW_ENOUGH:
            break
    return best


def _found(row: Row[Any]) -> FoundMessage:
    return FoundMessage(
        **{name: getattr(row, name) for name in _ITEM_FIELDS},
        status=_STATUS[row.status],
        custom_headers=_decode_headers(row.custom_headers) if row.custom_headers else {},
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
    )
