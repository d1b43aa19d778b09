"""`postroom project contexts`: what waits in the outbox and the inbox of each context."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

from typer import Option

from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import format_duration

if TYPE_CHECKING:
    from postroom.adapters.compose.messaging import MessagingSettings

Database = Annotated[
    str | None,
    Option("--messaging", metavar="URL", help="Count that service's first. \\[messaging.database]"),
]
Context = Annotated[
    str | None, Option("--context", metavar="NAME", help="What its rows are called. \\[messaging.context]")
]


def contexts(session: Session, database: Database = None, context: Context = None) -> None:
    """Tell what waits in the outbox and the inbox of each context, as it was counted last.

    The context of the settings, or the one named here, is counted first; `postroom project follow` does so
    every few seconds.
    """
    from postroom.adapters.compose import open_read_models
    from postroom.adapters.compose.contexts import refresh_contexts

    store = session.existing_store()
    messaging = messaging_of(session, database, context)
    if messaging is not None:
        refresh_contexts(store, messaging.database, messaging.context, messaging.tables)
    with closing(open_read_models(store)) as models:
        found = models.contexts()
    if session.out.as_json:
        session.out.json({"contexts": found})
        return
    session.out.table(
        ("context", "box", "waiting", "parked", "oldest", "counted"),
        [
            (
                each.context,
                each.box,
                each.count,
                each.parked,
                _age(each.oldest_at, each.as_of),
                _time(each.as_of),
            )
            for each in found
        ],
    )


@contextmanager
def refreshed_contexts(session: Session, store: str) -> Iterator[None]:
    """Count what waits in the context of the settings, if there is one, while the context manager lasts."""
    messaging = messaging_of(session)
    if messaging is None:
        yield
        return
    from postroom.adapters.compose.contexts import contexts_refreshed

    with contexts_refreshed(store, messaging.database, messaging.context, messaging.tables):
        yield


def messaging_of(
    session: Session, database: str | None = None, context: str | None = None
) -> "MessagingSettings | None":
    """Return where outbox and inbox are that the settings or options name; None where they name none."""
    if database is None and "database" not in session.settings.sections.get("messaging", {}):
        return None
    from postroom.adapters.compose.messaging import MessagingSettings

    given = {"database": database, "context": context}
    return session.settings.section("messaging", MessagingSettings, given)


def _age(since: int | None, now: int) -> str | None:
    return None if since is None else format_duration(max(0, now - since) / 1_000)


def _time(at: int) -> str:
    return f"{datetime.fromtimestamp(at / 1_000_000, UTC):%Y-%m-%dT%H:%M:%SZ}"
