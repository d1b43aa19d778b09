"""What the commands of the outbox and of the inbox have in common."""

from typing import TYPE_CHECKING

from postroom.adapters.cli.session import Session
from postroom.application.pluralize import pluralize

if TYPE_CHECKING:
    from postroom.application.inbox.get_backlog import InboxBacklog
    from postroom.application.outbox.operate import OutboxBacklog


def show_backlog(session: Session, backlog: "InboxBacklog | OutboxBacklog") -> None:
    """Show the number of waiting rows, and the age of the oldest."""
    if session.out.as_json:
        session.out.json(backlog)
        return
    from postroom.adapters.cli.tables import Time

    oldest = None if backlog.oldest_at is None else Time(backlog.oldest_at)
    session.out.table(("context", "count", "oldest"), [(backlog.context, backlog.count, oldest)])


def show_cleanup(session: Session, removed: int | None, noun: str) -> None:
    """Show how many rows a cleanup removed; None if another one is running."""
    text = "another cleanup is running" if removed is None else f"{pluralize(removed, noun)} removed"
    session.out.result({"removed": removed}, text)
