"""What waits in the outbox and the inbox of a context, counted at one moment."""

from postroom.adapters.postgres.database import connect, unavailable
from postroom.adapters.postgres.messaging.aggregate_events import micros
from postroom.adapters.postgres.messaging.tables import Tables, messaging_statements
from postroom.application.ports.read_models import ContextBacklog


def count_backlog(database: str, context: str, tables: Tables) -> list[ContextBacklog]:
    """Return what waits in the outbox and in the inbox of a context (SDS-047 QRY-050, QRY-051).

    Arguments:
        database: URL of the service's own database.

    Raises: Unavailable when it can't be read.
    """
    statement = messaging_statements("backlog.sql", tables)["backlog"]
    with connect(database, "postroom backlog") as connection, unavailable(database):
        return [
            ContextBacklog(
                context, box, count, parked, None if oldest is None else micros(oldest), micros(at)
            )
            for box, count, parked, oldest, at in connection.execute(statement.encode()).fetchall()
        ]
