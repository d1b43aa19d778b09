"""The outbox of a mailbox as services use it: messages are recorded in the service's own transaction."""

import re
import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec
from uuid_utils.compat import uuid7

from postroom.adapters.sql.statements import check_schema, statements
from postroom.adapters.sql.transaction import MissingTable, execute, execute_async
from postroom.application.mailbox.message_factory import MessageFactory
from postroom.application.messages import NewMessage
from postroom.application.outbox.events import record_message
from postroom.domain.arguments import check_int, check_type
from postroom.domain.names import DEFAULT_MAILBOX, check_mailbox
from postroom.domain.policy import MAX_FRAME_BYTES, MailboxLimits

if TYPE_CHECKING:
    from postroom.adapters.sql.transaction import AsyncConnection, Connection

_RECORD = statements("postroom.adapters.sql", "mailbox_outbox.sql")
_TABLE = re.compile(r"\boutbox_messages\b")
_CREATE = {"sqlite": _RECORD["create_in_sqlite"]}


def _wall() -> int:
    return time.time_ns() // 1_000


class _Recorder:
    """Base of `MailboxOutbox` and `AsyncMailboxOutbox`."""

    def __init__(
        self,
        mailbox: str = DEFAULT_MAILBOX,
        *,
        notify: bool = False,
        schema: str | None = None,
        frame_bytes: int = MailboxLimits().frame_bytes,
        wall: Callable[[], int] = _wall,
        make_id: Callable[[], UUID] = uuid7,
    ) -> None:
        self._mailbox = check_mailbox(mailbox)
        self._notify = notify
        self._schema = "" if schema is None else check_schema(check_type("schema", schema, str))
        self._record = _RECORD | {"postgresql": _record_in(self._schema)}
        self._frame_bytes = check_int("frame_bytes", frame_bytes, 1, MAX_FRAME_BYTES)
        self._wall = wall
        self._factory = MessageFactory(mailbox, wall, make_id)

    def _prepare(self, messages: Sequence[NewMessage]) -> tuple[list[str], dict[str, Any]]:
        rows = [record_message(each, self._factory, self._wall, self._frame_bytes) for each in messages]
        values = [{"id": row.id, "topic": row.topic, "message": row.message} for row in rows]
        parameters = {"mailbox": self._mailbox, "messages": msgspec.json.encode(values).decode()}
        return [row.id for row in rows], parameters | {"wake": self._notify, "schema": self._schema}


def create_table(connection: "Connection | sqlite3.Connection") -> None:
    """Create the table in SQLite, if it is missing, in the open transaction of a connection."""
    execute(connection, _CREATE, {})


def _record_in(schema: str) -> str:
    statement = _RECORD["postgresql"]
    return _TABLE.sub(f'"{schema}".outbox_messages', statement) if schema else statement


class MailboxOutbox(_Recorder):
    """Recorder of messages for a mailbox in the transaction of the change that they belong to.

    The owner of the mailbox sends them after the commit, in the order of recording, each once. `Outbox` does
    the same for events on NATS JetStream.

    Arguments:
        mailbox: name of the mailbox.
        notify: wake the owner on commit, on PostgreSQL, which serialises the commits of transactions that
            notify and so limits their rate; without it the owner polls.
        schema: schema of the table on PostgreSQL: the store's, if its URL names one. None looks it up in the
            search path.
        frame_bytes: maximum size of a message with its envelope; the mailbox must allow it.
        wall: returns the time in µs since 1970 UTC.
        make_id: generates the ids of messages without one.
    """

    def record(self, connection: "Connection | sqlite3.Connection", *messages: NewMessage) -> list[str]:
        """Record messages in the open transaction of a connection, without committing.

        Arguments:
            connection: a `sqlite3.Connection`, a psycopg `Connection`, a SQLAlchemy `Connection` or
                `Session`, which is flushed, or a connection of Django, such as `django.db.connection`. In
                SQLite, the table is created if it is missing.

        Returns: the ids of the messages, in their order.

        Raises:
            InvalidRequest: a field is invalid, or the connection is in autocommit mode.
            FrameTooLarge: a message is larger than `frame_bytes`.
            Unavailable: the table is missing, on PostgreSQL.
        """
        if not messages:
            return []
        ids, parameters = self._prepare(messages)
        try:
            execute(connection, self._record, parameters)
        except MissingTable as error:
            if not error.creatable:
                raise
            create_table(connection)
            execute(connection, self._record, parameters)
        return ids


class AsyncMailboxOutbox(_Recorder):
    """The asyncio form of `MailboxOutbox`; it takes the same arguments."""

    async def record(self, connection: "AsyncConnection", *messages: NewMessage) -> list[str]:
        """Record messages as `MailboxOutbox.record` does.

        Arguments:
            connection: a psycopg `AsyncConnection`, an aiosqlite `Connection`, or a SQLAlchemy
                `AsyncConnection` or `AsyncSession`.
        """
        if not messages:
            return []
        ids, parameters = self._prepare(messages)
        try:
            await execute_async(connection, self._record, parameters)
        except MissingTable as error:
            if not error.creatable:
                raise
            await execute_async(connection, _CREATE, {})
            await execute_async(connection, self._record, parameters)
        return ids
