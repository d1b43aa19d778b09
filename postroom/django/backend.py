"""`PostroomBackend`: a backend of `django.tasks` whose tasks are messages of a mailbox.

A task is enqueued in the transaction of the caller, in the outbox table of the database that Django uses. The
owner of the mailbox sends it after the commit, each once.
"""

import os
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

from django.apps import apps
from django.core.checks import Error, Warning
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.utils import timezone

from postroom.adapters.compose import shown_store
from postroom.adapters.compose.connect import Connection, connect
from postroom.adapters.compose.store import MEMORY, is_remote
from postroom.adapters.sql.mailbox_outbox import MailboxOutbox
from postroom.application.messages import NewMessage
from postroom.application.outbox.events import read_message
from postroom.application.ports.outbox import RecordedMessage
from postroom.application.query_results import MessageDetail
from postroom.django.calls import (
    JSON,
    TaskCall,
    find_task,
    from_microseconds,
    make_task_result,
    message_priority,
    set_field,
)
from postroom.django.database import POSTGRESQL, SQLITE, address_of, is_of_tests
from postroom.django.framework import (
    BaseTaskBackend,
    InvalidTask,
    InvalidTaskBackend,
    TaskError,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_enqueued,
)
from postroom.domain.arguments import check_text
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.domain.message import MS
from postroom.domain.names import DEFAULT_MAILBOX, check_mailbox, check_topic

OPTIONS = ("store", "mailbox", "database", "token", "console")
DEFAULT_STORE = "postroom.db"
TIMEOUT_MS = 10_000


class PostroomBackend(BaseTaskBackend):  # type: ignore[misc] # Django has no types
    """Backend whose queues are the topics of a mailbox; `manage.py postroom_worker` runs its tasks.

    Arguments:
        alias: its name in `TASKS`.
        params: its settings in `TASKS`. `OPTIONS` may have `store`, the path, URL of a database or URL of a
            server of the mailbox, by default the database itself on PostgreSQL and `postroom.db` beside it on
            SQLite; `mailbox`, `main@local` by default; `database`, the alias of the database in whose
            transactions tasks are enqueued, `default` by default; `token` for a server; `console`, the URL to
            which a page of the admin links.

    An option that does not exist or is malformed is an error of the system checks, and of each use.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        # Kept until a check reports them: Django makes backends when modules of tasks are imported.
        self.problems = list(self._find_problems())
        options = {} if self.problems else self.options
        self.mailbox: str = options.get("mailbox", DEFAULT_MAILBOX)
        self.database: str = options.get("database", "default")
        self.token: str | None = options.get("token")
        self.console: str | None = options.get("console")
        self._outbox = MailboxOutbox(self.mailbox)

    def _find_problems(self) -> Iterator[str]:
        """Yield each problem of the settings."""
        if not isinstance(self.options, dict):
            yield f"OPTIONS must be a dictionary, not {type(self.options).__name__}"
            return
        for name, value in self.options.items():
            kind = str | os.PathLike if name == "store" else str
            if name not in OPTIONS:
                yield f"OPTIONS has no {name!r}; it may have {', '.join(OPTIONS)}"
            elif not isinstance(value, kind) or not os.fspath(value):
                yield f"the option {name} must be text that is not empty; it was {type(value).__name__}"
        if self.options.get("store") == MEMORY:
            yield "the option store is memory:, a store of one process; name a file"
        database = self.options.get("database", "default")
        if database not in connections.settings:
            yield f"the option database is {database!r}, which DATABASES does not have"
        try:
            check_mailbox(self.options.get("mailbox", DEFAULT_MAILBOX))
            for queue in sorted(self.queues, key=str):
                check_topic(queue)
        except InvalidRequest as error:
            yield str(error).rstrip(".")

    def ensure_valid(self) -> None:
        """Raise InvalidTaskBackend with the problems of the settings, if there are any."""
        if self.problems:
            raise self._invalid("; ".join(self.problems))

    def _invalid(self, problem: str) -> Exception:
        error: Exception = InvalidTaskBackend(f"TASKS[{self.alias!r}]: {problem}.")
        return error

    @cached_property
    def store(self) -> str:
        """Return the path of the store of the mailbox, or a URL.

        Raises: InvalidTaskBackend when no option says it, and the database is in memory.
        """
        if "store" in self.options:
            store: str = os.fspath(self.options["store"])
            return store if ":" in store else os.path.abspath(store)
        try:
            address = address_of(connections[self.database])
        except InvalidRequest as error:
            raise self._invalid(str(error).rstrip(".")) from error
        if address is None:
            raise self._invalid(
                "the database is in memory, so the option store must name the mailbox's store"
            )
        if connections[self.database].vendor == POSTGRESQL:
            return address
        return os.path.join(os.path.dirname(address), DEFAULT_STORE)

    @property
    def is_remote(self) -> bool:
        """Return whether the store is the URL of a server, whose own settings must name the database."""
        return is_remote(self.store)

    def find_outboxes(self) -> list[str]:
        """Return the databases that the owner of the mailbox is to watch.

        Raises: InvalidRequest for a database that is neither SQLite nor PostgreSQL.
        """
        address = address_of(connections[self.database])
        return [] if address is None or self.is_remote else [address]

    def connect(self, timeout_ms: int = TIMEOUT_MS) -> Connection:
        """Return a connection to the mailbox; see `postroom.connect`."""
        return connect(
            self.store,
            self.mailbox,
            token=self.token if self.is_remote else None,
            timeout_ms=timeout_ms,
            outboxes=self.find_outboxes(),
        )

    # -- enqueueing ---

    def enqueue(self, task: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Record the call of a task in the transaction of the caller; without one, in its own.

        Returns: the result, whose id is that of the message.
        Raises: InvalidTask when a worker could not find the task, and in a transaction of another database;
            TypeError or ValueError for an argument that JSON can't have; InvalidRequest; FrameTooLarge.
        """
        self.ensure_valid()
        self.validate_task(task)
        self._check_path(task)
        connection = connections[self.database]
        self._check_transaction(connection)
        call = TaskCall.of(task, args, kwargs)
        now_us = time.time_ns() // 1_000_000 * 1_000  # in ms, as headers have it
        message = NewMessage(
            topic=task.queue_name,
            payload=call.encode(),
            content_type=JSON,
            priority=message_priority(task.priority),
            deliver_after_ms=_delay_ms(task.run_after),
            published_at_us=now_us,
        )
        if connection.in_atomic_block or not connection.get_autocommit():
            (id_,) = self._outbox.record(connection, message)
        else:
            with transaction.atomic(using=self.database):
                (id_,) = self._outbox.record(connection, message)
        result = make_task_result(task, id_, call, self.alias, from_microseconds(now_us), None)
        task_enqueued.send_robust(type(self), task_result=result)
        return result

    def _check_path(self, task: Any) -> None:
        """Check that a worker will find a task by its path: better a refusal here than a dead letter."""
        path = task.module_path
        if path.startswith("__main__."):
            raise InvalidTask(f"The task {path} is in the program itself; move it to a module of an app.")
        try:
            own = find_task(path)
        except InvalidRequest as error:
            raise InvalidTask(str(error)) from error
        if own.func is not task.func:
            raise InvalidTask(f"The task {path} is not the one that its module has under this name.")

    def _check_transaction(self, connection: Any) -> None:
        """Refuse a call within a transaction of other databases only, whose rollback would not undo it."""
        if connection.in_atomic_block:
            return
        for other in connections.all(initialized_only=True):
            if other.in_atomic_block:
                raise InvalidTask(
                    f"Tasks are enqueued in the database {self.database!r}, which has no transaction here, "
                    f"but {other.alias!r} has; enqueue in transaction.atomic(using={self.database!r}), or in "
                    f"transaction.on_commit(..., using={other.alias!r})."
                )

    # -- results ---

    def get_result(self, result_id: str) -> Any:
        """Return the state and the result of a task.

        Raises: TaskResultDoesNotExist when neither outbox nor mailbox has it, InvalidTask when its task is no
            more; Unavailable when the mailbox can't be used.
        """
        self.ensure_valid()
        if not _can_be_id(str(result_id)):
            raise TaskResultDoesNotExist(result_id)
        result = self._find_recorded(result_id)
        if result is None and (detail := self._find_message(result_id)) is not None:
            result = self.result_of(detail)
        if result is None:
            raise TaskResultDoesNotExist(result_id)
        return result

    def result_of(self, detail: MessageDetail) -> Any:
        """Return the result of a task whose message is in the mailbox.

        Raises: InvalidTask when it is not the call of a task that exists.
        """
        try:
            call = TaskCall.read(detail.item.reconstruct_envelope().payload.value)
            task = call.find_task(detail.topic)
        except InvalidRequest as error:
            raise InvalidTask(f"Message {detail.message_id}: {error}") from error
        enqueued_at = from_microseconds(detail.item.timestamp * MS)
        return make_task_result(task, detail.message_id, call, self.alias, enqueued_at, detail)

    def _find_recorded(self, id_: str) -> Any:
        """Return the result of a task that is in the outbox; None if it is not."""
        from postroom.django.models import OutboxMessage

        rows = OutboxMessage.objects.using(self.database).filter(message_id=str(id_), mailbox=self.mailbox)
        row = rows.first()
        if row is None:
            return None
        try:
            message = read_message(RecordedMessage(row.position, row.message_id, row.topic, row.message))
            call = TaskCall.read(message.payload)
            task = call.find_task(row.topic)
        except InvalidRequest as error:
            raise InvalidTask(f"Outbox message {id_}: {error}") from error
        enqueued_at = from_microseconds(message.published_at_us or 0)
        result = make_task_result(task, row.message_id, call, self.alias, enqueued_at, None)
        if row.error is not None:  # the mailbox refused it
            result.errors.append(TaskError(exception_class_path="postroom.Rejected", traceback=row.error))
            set_field(result, "status", TaskResultStatus.FAILED)
        return result

    def has_waiting(self, queues: Sequence[str]) -> bool:
        """Return whether tasks of queues wait in the outbox; closes the connections of this thread."""
        from postroom.django.models import OutboxMessage

        rows = OutboxMessage.objects.using(self.database).filter(
            mailbox=self.mailbox, topic__in=queues, error=None
        )
        try:
            return bool(rows.exists())
        finally:
            connections.close_all()

    def _find_message(self, id_: str) -> MessageDetail | None:
        with self.connect() as mailbox:
            try:
                return mailbox.get_message(str(id_))
            except NotFound:
                return None

    # -- checks ---

    def check(self, **_: Any) -> Iterator[Any]:
        """Yield the problems of the settings; `postroom.django.checks` checks the databases."""
        where = f"TASKS[{self.alias!r}]"
        for problem in self.problems:
            yield Error(f"{where}: {problem}.", id="postroom.E001")
        if self.problems:
            return
        if not apps.is_installed("postroom.django"):
            yield Error(
                f"{where} needs the app postroom.django, which makes its tables.",
                hint="Add 'postroom.django' to INSTALLED_APPS, and run manage.py migrate.",
                id="postroom.E002",
            )
        try:
            self.find_outboxes()
            if "store" in self.options or not is_of_tests(connections[self.database]):
                shown_store(self.store)  # refuses the URL of anything else
        except (InvalidRequest, ImproperlyConfigured) as error:
            yield Error(f"{where}: {error}", id="postroom.E003")
            return
        own = connections[self.database]
        others = [
            each.alias
            for each in connections.all()
            if each.alias != self.database and each.settings_dict["ATOMIC_REQUESTS"]
        ]
        if others and not own.settings_dict["ATOMIC_REQUESTS"]:
            yield Warning(
                f"{where} enqueues in the database {self.database}, but requests run in transactions of "
                f"{', '.join(others)}, in which enqueueing is refused.",
                hint="Set ATOMIC_REQUESTS of that database, or enqueue in transaction.on_commit.",
                id="postroom.W001",
            )
        mode = str(own.settings_dict["OPTIONS"].get("transaction_mode") or "DEFERRED").upper()
        if own.vendor == SQLITE and mode == "DEFERRED":
            yield Warning(
                f"The database {self.database} is a SQLite file whose transactions fail with 'database is "
                "locked' if they read first and another process writes meanwhile, as the owner of the "
                "mailbox does.",
                hint="Set 'OPTIONS': {'transaction_mode': 'IMMEDIATE'} of the database.",
                id="postroom.W002",
            )


def _can_be_id(text: str) -> bool:
    """Return whether each database accepts a text as a message id; a view may take it from a URL."""
    try:
        check_text("The message id", text, 1)
    except InvalidRequest:
        return False
    return "\0" not in text  # PostgreSQL has none


def _delay_ms(run_after: datetime | None) -> int:
    """Return the time until a task may run."""
    if run_after is None:
        return 0
    due = run_after if timezone.is_aware(run_after) else timezone.make_aware(run_after)
    return max(0, -((datetime.now(UTC) - due) // timedelta(milliseconds=1)))
