"""Wiring of the backlog of contexts."""

from postroom.adapters.compose.store import open_store
from postroom.adapters.postgres.messaging.backlog import count_backlog
from postroom.adapters.postgres.messaging.settings import MessagingSettings
from postroom.application.messaging.backlog_monitor import ContextBacklogRefresher

__all__ = ["MessagingSettings", "context_backlogs"]


def context_backlogs(store: str, messaging: MessagingSettings) -> ContextBacklogRefresher:
    """Return the refresher of the backlog of a context's outbox and inbox.

    Arguments:
        store: path of a SQLite store, or URL of a PostgreSQL one.
        messaging: the context, and the service's own database.
    """
    return ContextBacklogRefresher(
        lambda: count_backlog(messaging.database, messaging.context, messaging.tables),
        open_store(store).save_context_backlog,
        messaging.context,
    )
