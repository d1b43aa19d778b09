"""Options and output shared by the commands of the outbox, the inbox and streams."""

from typing import TYPE_CHECKING, Annotated

from typer import Option

from postroom.adapters.cli.session import Session
from postroom.application.pluralize import pluralize

if TYPE_CHECKING:
    from postroom.application.inbox.get_backlog import InboxBacklog
    from postroom.application.outbox.operate import OutboxBacklog

Database = Annotated[
    str | None, Option("--database", metavar="URL", help="Database of the service. [messaging.database]")
]
Nats = Annotated[str | None, Option("--nats", metavar="URL", help="NATS URL. [nats.url]")]
Outboxes = Annotated[
    list[str] | None,
    Option("--outbox", metavar="ADDRESS", help="Also count the messages that are recorded here; repeatable."),
]


def show_backlog(session: Session, backlog: "InboxBacklog | OutboxBacklog") -> None:
    """Show the number of waiting rows, and the age of the oldest."""
    if session.out.as_json:
        session.out.json(backlog)
        return
    from postroom.adapters.cli.tables import Time

    oldest = None if backlog.oldest_at is None else Time(backlog.oldest_at)
    session.out.table(("context", "count", "oldest"), [(backlog.context, backlog.count, oldest)])


def show_cleanup(session: Session, removed: int | None, noun: str) -> None:
    """Show the number of rows that a cleanup removed; None if another one is running."""
    text = "another cleanup is running" if removed is None else f"{pluralize(removed, noun)} removed"
    session.out.result({"removed": removed}, text)
