"""Commands on whole stores: migrate them, back them up, restore and import them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import WrongUsage
from postroom.application.text import pluralize

if TYPE_CHECKING:
    from postroom.adapters.compose.maintenance import Migration
    from postroom.application.backup.manifest import Manifest


def create(
    session: Session,
    folder: Annotated[str, Argument(metavar="FOLDER", help="New folder for the backup.")],
    archive: Annotated[
        str | None,
        Option(metavar="FOLDER", help="Folder of the log archive, to name its segments. [archive.folder]"),
    ] = None,
) -> None:
    """Back up a store to a new folder, while others send and receive.

    The folder appears when the backup is complete. It contains all mailboxes as of one moment, and has the
    end of each log, so that it can be verified. Read models and keys are not part of it, and the segments of
    the log archive are only named.
    """
    from postroom.adapters.compose.backup import back_up

    with session.out.progress("Backing up", 1) as advance:
        manifest = back_up(
            session.existing_store(), Path(folder), archive=session.archive(archive), progress=advance
        )
    _show(session, manifest, folder, f"{folder}: complete")


def verify(
    session: Session,
    folder: Annotated[str, Argument(metavar="FOLDER", help="Folder of the backup.")],
    archive: Annotated[
        str | None,
        Option(metavar="FOLDER", help="Copy of the log archive, to be verified with the backup."),
    ] = None,
) -> None:
    """Verify the files of a backup, and every hash of its logs; needs no store."""
    from postroom.adapters.compose.backup import verify_backup

    with session.out.progress("Verifying", 1) as advance:
        manifest, _ = verify_backup(Path(folder), archive=archive, progress=advance)
    _show(session, manifest, folder, f"{folder}: intact")


def import_store(
    session: Session,
    old: Annotated[str, Argument(metavar="OLD", help="SQLite file or postgresql:// URL of the old store.")],
    new: Annotated[str, Argument(metavar="NEW", help="New SQLite file, or URL of a migrated database.")],
) -> None:
    """Copy a store in the format from before 23 November 2026 into a new one.

    The old store is verified and not changed; no process may write it meanwhile. The new one is verified,
    too. It has no read models yet.
    """
    from postroom.adapters.compose.maintenance import import_store as import_

    with session.out.progress("Importing", None) as advance:
        names = import_(old, new, progress=lambda count: advance(0, f"{count:,} events"))
    if session.out.as_json:
        session.out.json({"store": new, "logs": names})
    else:
        session.out.line(f"{new}: {pluralize(len(names), 'log')} imported and verified")


async def restore(
    session: Session,
    folder: Annotated[str, Argument(metavar="FOLDER", help="Folder of the backup.")],
    into: Annotated[
        str, Option(metavar="STORE", help="SQLite file, postgresql:// or nats:// URL to restore into.")
    ],
    replace: Annotated[bool, Option("--replace", help="Replace what the store contains.")] = False,
    discard_newer: Annotated[
        int,
        Option(metavar="N", min=0, help="Give up N records of the store that the backup lacks."),
    ] = 0,
) -> None:
    """Restore a backup into an empty store, after verifying it.

    With --replace, the backup replaces the contents of the store; no process may use it. If it has records
    that the backup lacks, such as acknowledged sends, the error names their number for --discard-newer.
    Owners and receipts from after the backup are refused. Rebuild the read models afterwards. A store in
    JetStream must be empty; it can't be opened before all of it is restored.
    """
    from postroom.adapters.compose.restore import restore as run
    from postroom.adapters.compose.store import JETSTREAM_SCHEME, scheme_of

    with session.out.progress("Verifying", 1) as advance:
        restoration = await run(
            Path(folder), into, replace=replace, discard_newer=discard_newer, progress=advance
        )
    if session.out.as_json:
        session.out.json(restoration)
        return
    _show(session, restoration.manifest, folder, f"{restoration.store}: restored from {folder}")
    for loss in restoration.losses:
        records, messages = pluralize(loss.records, "record"), pluralize(loss.messages, "message")
        session.out.line(f"discarded from {loss.mailbox}: {records}, {messages}")
    if scheme_of(into) == JETSTREAM_SCHEME:
        session.out.line("JetStream has no read models; build them with: postroom views rebuild --into")
    else:
        session.out.line("The store has no read models yet; make them with: postroom views rebuild")


def _show(session: Session, manifest: "Manifest", folder: str, headline: str) -> None:
    if session.out.as_json:
        session.out.json({"folder": folder, "manifest": manifest})
        return
    from postroom.adapters.cli.output import Time

    session.out.table(
        ("log", "first", "head", "epoch", "recorded"),
        [
            (
                each.mailbox,
                each.first,
                each.position,
                each.epoch,
                Time(each.recorded_at),
            )
            for each in manifest.mailboxes
            if each.position
        ],
    )
    session.out.line()
    records = pluralize(manifest.records, "record")
    session.out.line(headline)
    session.out.line(f"  {records}, {manifest.bytes / 1e6:,.1f} MB, as of {Time(manifest.created_at)}")


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
            help="Grant a role the rights to use the databases, later partitions and read models "
            "included; may be repeated.",
        ),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Only list the migrations that would run.")] = False,
) -> None:
    """Create or update the tables of PostgreSQL databases: a store, outbox and inbox, leases, a key store.

    Run it for a new database and after every update of Postroom, as a user with the right to create tables;
    no other command creates any. A SQLite store is copied beside itself and updated; without this command,
    its next owner does so.
    """
    from postroom.adapters.compose import is_database, shown_store
    from postroom.adapters.compose.maintenance import (
        MessagingSettings,
        migrate_keys,
        migrate_leases,
        migrate_messaging,
        migrate_store,
    )
    from postroom.adapters.compose.store import MEMORY, has_store, is_remote

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


CHECKOUT = Path(__file__).resolve().parents[2]


def bench(
    session: Session,
    arguments: Annotated[
        list[str] | None,
        Argument(metavar="[ARGUMENTS]...", help="Arguments of the benchmarks; see postroom bench -- --help."),
    ] = None,
) -> int:
    """Run the benchmarks in tests/benchmarks of a source checkout; packages do not contain them."""
    if not (CHECKOUT / "tests" / "benchmarks").is_dir():
        raise WrongUsage(
            "The benchmarks are not part of the installed package; clone the source repository and run "
            "make bench there."
        )
    options = ["--json"] if session.out.as_json else []
    command = [sys.executable, "-m", "tests.benchmarks", *options, *(arguments or [])]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": str(CHECKOUT)}, check=False).returncode
