"""Counting the backlog of a context's outbox and inbox."""

from postroom.adapters.postgres.database import connect, unavailable
from postroom.adapters.postgres.messaging.settings import Tables, messaging_statements
from postroom.application.ports.read_models import ContextBacklog


def count_backlog(database: str, context: str, tables: Tables) -> list[ContextBacklog]:
    """Return the backlog of a context's outbox and inbox in one snapshot (SDS-047 QRY-050, QRY-051).

    Arguments:
        database: URL of the service's own database.

    Raises: Unavailable when the database can't be read.
    """
    statement = messaging_statements("backlog.sql", tables)["backlog"]
    with connect(database, "postroom backlog") as connection, unavailable(database):
        return [ContextBacklog(context, *row) for row in connection.execute(statement.encode()).fetchall()]
