"""Migrations of stores, of the outbox and inbox tables, of leases, and of key stores."""

import os
from collections.abc import Sequence
from pathlib import Path

from postroom.adapters.postgres.messaging.settings import MessagingSettings
from postroom.adapters.postgres.url import is_url
from postroom.adapters.sql.migrations import Migration
from postroom.adapters.sqlite.database import migrate
from postroom.application.extras import explain_missing_extra

__all__ = [
    "MessagingSettings",
    "Migration",
    "migrate_keys",
    "migrate_leases",
    "migrate_messaging",
    "migrate_store",
]


def migrate_store(url: str, *, dry_run: bool = False, grant_to: Sequence[str] = ()) -> list[Migration]:
    """Bring a store, which may be a file, up to this version; see the `migrate` of SQLite and PostgreSQL.

    A file has no roles: `grant_to` is for databases.
    """
    if is_url(url):
        return _migrate(url, "store", dry_run, grant_to)
    return migrate(Path(os.path.realpath(url)), dry_run=dry_run)


def migrate_messaging(url: str, *, dry_run: bool = False, grant_to: Sequence[str] = ()) -> list[Migration]:
    """Bring outbox and inbox of a service's own database up to this version."""
    return _migrate(url, "messaging", dry_run, grant_to)


def migrate_leases(url: str, *, dry_run: bool = False, grant_to: Sequence[str] = ()) -> list[Migration]:
    """Bring a lease store up to this version."""
    return _migrate(url, "leases", dry_run, grant_to)


def migrate_keys(url: str, *, dry_run: bool = False, grant_to: Sequence[str] = ()) -> list[Migration]:
    """Bring a key store of data subjects up to this version."""
    return _migrate(url, "keys", dry_run, grant_to)


def _migrate(url: str, set_: str, dry_run: bool, grant_to: Sequence[str]) -> list[Migration]:
    with explain_missing_extra("postgres"):
        from postroom.adapters.postgres.migrate import migrate as migrate_database
    return migrate_database(url, set_, dry_run=dry_run, grant_to=grant_to)
