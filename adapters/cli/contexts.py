"""`postroom project contexts`: the backlog of the outbox and the inbox of each context."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated

from typer import Option

from postroom.adapters.cli.session import Session
from postroom.domain.errors import NotFound
from postroom.domain.names import describe_choices

if TYPE_CHECKING:
    from postroom.adapters.compose.contexts import MessagingSettings

Database = Annotated[
    str | None,
    Option("--messaging", metavar="URL", help="Database of the service. [messaging.database]"),
]
Context = Annotated[
    str | None, Option("--context", metavar="NAME", help="Name of the context. [messaging.context]")
]


def contexts(session: Session, database: Database = None, context: Context = None) -> None:
    """Show the backlog of the outbox and the inbox of each context, as of the last count.

    The configured context is counted now; `postroom project follow` counts it every few seconds.
    """
    from postroom.adapters.cli.tables import Time
    from postroom.adapters.compose.contexts import context_backlogs
    from postroom.adapters.compose.queries import open_read_models

    store = session.existing_store()
    messaging = messaging_settings(session, database, context)
    if messaging is not None:
        context_backlogs(store, messaging).refresh()
    with closing(open_read_models(store)) as models:
        backlogs = models.contexts()
    if context is not None and context not in (names := {each.context for each in backlogs}):
        raise NotFound(f"There is no context {context}; {describe_choices(context, names)}")
    if session.out.as_json:
        session.out.json({"contexts": backlogs})
        return
    session.out.table(
        ("context", "box", "waiting", "parked", "oldest", "counted"),
        [
            (
                each.context,
                each.box,
                each.count,
                each.parked,
                None if each.oldest_at is None else Time(each.oldest_at, each.as_of),
                Time(each.as_of),
            )
            for each in backlogs
        ],
    )


@contextmanager
def refresh_contexts(session: Session, store: str) -> Iterator[None]:
    """Refresh the backlog of the configured context, if there is one, until the context manager exits."""
    messaging = messaging_settings(session)
    if messaging is None:
        yield
        return
    from postroom.adapters.compose.contexts import context_backlogs

    backlogs = context_backlogs(store, messaging)
    with backlogs.refreshing():
        yield


def messaging_settings(
    session: Session, database: str | None = None, context: str | None = None
) -> "MessagingSettings | None":
    """Return the database and context of the service; None if no database is configured."""
    if database is None and "database" not in session.settings.sections.get("messaging", {}):
        return None
    from postroom.adapters.compose.contexts import MessagingSettings

    flags = {"database": database, "context": context}
    return session.settings.section("messaging", MessagingSettings, flags)
