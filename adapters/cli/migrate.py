"""`postroom migrate`: create and update the tables of databases, and the format of SQLite stores."""

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
    keys: Annotated[
        str | None, Option(metavar="URL", help="Also migrate this database of subject keys. [erasure.keys]")
    ] = None,
    grant_to: Annotated[
        list[str] | None,
        Option(
            metavar="ROLE",
            help="Grant a role of the databases what using them needs, later partitions and read models "
            "included; may be repeated.",
        ),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Only list the migrations that would run.")] = False,
) -> None:
    """Create or update the tables of PostgreSQL databases: a store, outbox and inbox, leases, a key store.

    Run it for a new database and after every update of Postroom, as a user with the right to create tables;
    no other command creates any. A SQLite store is copied beside itself and updated, which its next owner
    does otherwise.
    """
    from postroom.adapters.compose import is_database, shown_store
    from postroom.adapters.compose.postgres import (
        MessagingSettings,
        migrate_keys,
        migrate_leases,
        migrate_messaging,
        migrate_store,
    )
    from postroom.adapters.compose.remote import is_remote
    from postroom.adapters.compose.store import MEMORY, has_store

    has_file = session.store != MEMORY and not is_remote(session.store) and has_store(session.store)
    targets = [(session.store, migrate_store)] if has_file else []
    if messaging or session.settings.sections.get("messaging"):
        service = session.settings.section("messaging", MessagingSettings, {"database": messaging})
        targets.append((service.database, migrate_messaging))
    if leases:
        targets.append((leases, migrate_leases))
    if keys is None and (erasure := session.erasure_settings()) is not None and is_database(erasure.keys):
        keys = erasure.keys
    if keys:
        targets.append((keys, migrate_keys))
    if not targets:
        raise WrongUsage(
            f"Nothing to migrate: the store {session.shown_store} does not exist; name one with --store, or "
            "a database with --store, --messaging, --leases or --keys postgresql://..."
        )
    roles = grant_to or []
    if roles and not any(is_database(url) for url, _ in targets):
        raise WrongUsage(
            "--grant-to is for PostgreSQL databases; the rights on a SQLite store are its file's."
        )
    results = [(shown_store(url), run(url, dry_run=dry_run, grant_to=roles)) for url, run in targets]
    granted = [shown_store(url) for url, _ in targets if roles and is_database(url)]
    if session.out.as_json:
        facts = [_facts(*each) | {"granted_to": roles if each[0] in granted else []} for each in results]
        session.out.json({"dry_run": dry_run, "databases": facts})
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
    for name in granted:
        session.out.line(f"{name}: privileges {'to be ' if dry_run else ''}granted to {', '.join(roles)}")


def _facts(name: str, migrations: "list[Migration]") -> dict[str, object]:
    return {
        "database": name,
        "migrations": [{"set": each.set, "number": each.number, "name": each.name} for each in migrations],
    }
