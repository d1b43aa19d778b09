"""`postroom migrate`: create and update the tables of PostgreSQL databases."""

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
        Option(metavar="URL", help="Also migrate this database of outbox and inbox. [messaging.database]"),
    ] = None,
    leases: Annotated[
        str | None, Option(metavar="URL", help="Also migrate this database of leases, of admins.")
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Only list the migrations that would run.")] = False,
) -> None:
    """Create or update the tables of a PostgreSQL store, and of databases with outbox and inbox or leases.

    Run it for a new database and after every update of Postroom, as a user with the right to create tables;
    no other command creates any. A SQLite store needs no migration.
    """
    from postroom.adapters.compose import is_database, shown_store
    from postroom.adapters.compose.postgres import (
        MessagingSettings,
        migrate_leases,
        migrate_messaging,
        migrate_store,
    )

    targets = [(session.store, migrate_store)] if is_database(session.store) else []
    if messaging or session.settings.sections.get("messaging"):
        service = session.settings.section("messaging", MessagingSettings, {"database": messaging})
        targets.append((service.database, migrate_messaging))
    if leases:
        targets.append((leases, migrate_leases))
    if not targets:
        raise WrongUsage(
            f"Nothing to migrate: the store {session.shown_store} is not a database; name one with "
            "--store, --messaging or --leases postgresql://..."
        )
    results = [(shown_store(url), run(url, dry_run=dry_run)) for url, run in targets]
    if session.out.as_json:
        session.out.json({"dry_run": dry_run, "databases": [_facts(*each) for each in results]})
        return
    state = "to be applied" if dry_run else "applied"
    rows = [
        (name, f"{each.set}/{each.number:04d}_{each.name}", state)
        for name, migrations in results
        for each in migrations
    ]
    if rows:
        session.out.table(("database", "migration", "state"), rows)
    for name, migrations in results:
        if not migrations:
            session.out.line(f"{name} is up to date")


def _facts(name: str, migrations: "list[Migration]") -> dict[str, object]:
    return {
        "database": name,
        "migrations": [{"set": each.set, "number": each.number, "name": each.name} for each in migrations],
    }
