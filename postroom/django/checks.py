"""System checks with `--database`: of the tables of backends, and of their mailboxes."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from django.core.checks import Warning
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections

from postroom.adapters.compose import list_mailboxes, shown_store
from postroom.adapters.compose.store import has_store
from postroom.django.backend import PostroomBackend
from postroom.django.framework import task_backends
from postroom.domain.errors import PostroomError

REACH_MS = 2_000
"""Time in which a server must answer."""


def check_databases(
    app_configs: Sequence[Any] | None, databases: Iterable[str] | None = None, **_: Any
) -> Iterator[Any]:
    """Yield a warning for each table that is missing, and for each mailbox that can't be reached."""
    for backend in task_backends.all():
        if not isinstance(backend, PostroomBackend) or backend.problems:
            continue
        if backend.database in (databases or ()):
            yield from _check_table(backend)
            yield from _check_mailbox(backend)


def _check_table(backend: PostroomBackend) -> Iterator[Any]:
    connection = connections[backend.database]
    try:
        with connection.cursor() as cursor:
            exists = "outbox_messages" in connection.introspection.table_names(cursor)
    except DatabaseError as error:
        yield Warning(f"The database {backend.database} can't be read: {error}", id="postroom.W003")
        return
    if not exists:
        # No error, as it would keep `migrate` from making them.
        yield Warning(
            f"The database {backend.database} lacks the tables of the app postroom.django, so no task of "
            f"TASKS[{backend.alias!r}] can be enqueued.",
            hint=f"Run manage.py migrate --database {backend.database}.",
            id="postroom.W003",
        )


def _check_mailbox(backend: PostroomBackend) -> Iterator[Any]:
    """Yield a warning if the mailbox can't be used; no store is created."""
    try:
        if backend.is_remote:
            with backend.connect(REACH_MS):
                return
        if has_store(backend.store):
            list_mailboxes(backend.store)
            return
        problem = "There is no file yet."
    except ImproperlyConfigured:  # no option names a store, which the checks of the backend report
        return
    except PostroomError as error:
        problem = str(error)
    yield Warning(
        f"The mailbox of TASKS[{backend.alias!r}] in {shown_store(backend.store)} can't be used: {problem} "
        "Tasks are enqueued all the same, and run later.",
        hint="Run manage.py postroom_worker, which makes a file; or postroom migrate --store URL.",
        id="postroom.W004",
    )
