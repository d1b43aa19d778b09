"""`postroom migrate`: PostgreSQL databases are brought up to this version, when somebody says so."""

from typing import TYPE_CHECKING, Annotated

from typer import Option

from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import WrongUsage

if TYPE_CHECKING:
    from postroom.adapters.compose.postgres import Migration


def migrate(
    session: Session,
    messaging: Annotated[
        str | None,
        Option(metavar="URL", help="Database of outbox and inbox, too; default \\[messaging] database."),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Only show what is to be done.")] = False,
) -> None:
    """Create or update the tables of a PostgreSQL store, and of a database with outbox and inbox.

    Run it once for a new database and again after Postroom was updated, as a user who may create tables;
    nothing else in Postroom does. A store that is a file needs it never.
    """
    from postroom.adapters.compose import is_database, shown_store
    from postroom.adapters.compose.messaging import MessagingSettings
    from postroom.adapters.compose.postgres import migrate_messaging, migrate_store

    wanted = [(session.store, migrate_store)] if is_database(session.store) else []
    if messaging or session.settings.sections.get("messaging"):
        service = session.settings.section("messaging", MessagingSettings, {"database": messaging})
        wanted.append((service.database, migrate_messaging))
    if not wanted:
        raise WrongUsage(
            f"There is nothing to migrate: the store {session.shown_store} is no database; name one with "
            "--store postgresql://... or --messaging postgresql://..."
        )
    found = [(shown_store(url), run(url, dry_run=dry_run)) for url, run in wanted]
    if session.out.as_json:
        session.out.json({"dry_run": dry_run, "databases": [_facts(*each) for each in found]})
        return
    state = "to be applied" if dry_run else "applied"
    rows = [
        (name, f"{each.set}/{each.number:04d}_{each.name}", state) for name, done in found for each in done
    ]
    if rows:
        session.out.table(("database", "migration", "state"), rows)
    for name, done in found:
        if not done:
            session.out.line(f"{name} is up to date")


def _facts(name: str, done: "list[Migration]") -> dict[str, object]:
    return {
        "database": name,
        "migrations": [{"set": each.set, "number": each.number, "name": each.name} for each in done],
    }
