"""Settings of the outbox and inbox of a bounded context, and the names of their tables."""

import re
from functools import cache

import msgspec

from postroom.adapters.sql.statements import statements
from postroom.domain.errors import InvalidRequest
from postroom.domain.subject import check_token

_NAME = re.compile(r"[^\W\d]\w{0,62}(\.[^\W\d]\w{0,62})?\Z")


class Tables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names of the tables, each `name` or `schema.name`.

    Arguments:
        outbox_events, outbox_retries: events to be published, and attempts that failed.
        inbox_messages: messages that were received, by id.
        aggregate_events: histories of events and messages.
        inbox_queue, inbox_readers, inbox_workers, inbox_partitions: queue of ordered workers, the processes
            that fill it, the workers, and their partitions.
    """

    outbox_events: str = "outbox_events"
    outbox_retries: str = "outbox_retries"
    inbox_messages: str = "inbox_messages"
    aggregate_events: str = "aggregate_events"
    inbox_queue: str = "inbox_queue"
    inbox_readers: str = "inbox_readers"
    inbox_workers: str = "inbox_workers"
    inbox_partitions: str = "inbox_partitions"

    def __post_init__(self) -> None:
        for table in self.__struct_fields__:
            if not _NAME.match(getattr(self, table)):
                raise InvalidRequest(
                    f"{getattr(self, table)!r} is not a valid name for the table {table}; use name or "
                    "schema.name, of letters, digits and _."
                )

    def quoted(self, table: str) -> str:
        """Return a table's name, quoted for SQL."""
        return ".".join(f'"{part}"' for part in getattr(self, table).split("."))


@cache
def messaging_statements(resource: str, tables: Tables) -> dict[str, str]:
    """Return the statements of a `.sql` file of this package, with the configured names of the tables.

    Parameters are written `:name`.
    """
    names = re.compile(rf"\b({'|'.join(tables.__struct_fields__)})\b")
    return {
        name: names.sub(lambda match: tables.quoted(match[1]), text)
        for name, text in statements(__package__, resource).items()
    }


class MessagingSettings(msgspec.Struct, frozen=True):
    """Database and name of a bounded context: `[messaging]` of the settings file.

    Arguments:
        database: `postgresql://user:password@host:port/database`, the service's own.
        context: first token of the subjects of its events, such as `sea`; empty if nothing is published.
        tables: names of its tables, if they differ from the migrations.
    """

    database: str
    context: str = ""
    tables: Tables = Tables()

    def validate(self) -> "MessagingSettings":
        """Return the settings; raise InvalidRequest for a context that can't be part of a subject."""
        if self.context:
            check_token(self.context, "The context")
        return self
