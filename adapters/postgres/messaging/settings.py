"""Settings of the outbox and inbox of a bounded context."""

import msgspec

from postroom.adapters.postgres.messaging.tables import Tables
from postroom.domain.subject import check_token


class MessagingSettings(msgspec.Struct, frozen=True):
    """Database and name of a bounded context: `[messaging]` of the settings file.

    Arguments:
        database: `postgresql://user:password@host:port/database`, the service's own.
        context: first token of the subjects of its events, such as `sea`; empty if nothing is published.
        tables: names of its tables, if they differ from those of the migrations.
    """

    database: str
    context: str = ""
    tables: Tables = Tables()

    def validate(self) -> "MessagingSettings":
        """Return the settings; raise InvalidRequest for a context that can't be part of a subject."""
        if self.context:
            check_token(self.context, "The context")
        return self
