"""Where outbox and inbox of a bounded context are: what `[messaging]` of the settings file says."""

import msgspec

from postroom.adapters.postgres.messaging.tables import Tables


class MessagingSettings(msgspec.Struct, frozen=True):
    """Name a bounded context and its database.

    Arguments:
        database: `postgresql://user:password@host:port/database`, the service's own.
        context: first word of the subjects of its events, such as `sea`; empty where nothing is published.
        tables: what its tables are called, where that isn't what the migrations call them.
    """

    database: str
    context: str = ""
    tables: Tables = Tables()
