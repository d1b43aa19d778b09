"""Migrations of stores, of the outbox and inbox tables, of leases, and of key stores."""

from postroom.adapters.postgres.messaging.settings import MessagingSettings
from postroom.adapters.postgres.migrate import Migration, migrate

__all__ = [
    "MessagingSettings",
    "Migration",
    "migrate_keys",
    "migrate_leases",
    "migrate_messaging",
    "migrate_store",
]


def migrate_store(url: str, *, dry_run: bool = False) -> list[Migration]:
    """Bring a PostgreSQL store up to this version; see `postroom.adapters.postgres.migrate.migrate`."""
    return migrate(url, "store", dry_run=dry_run)


def migrate_messaging(url: str, *, dry_run: bool = False) -> list[Migration]:
    """Bring outbox and inbox of a service's own database up to this version."""
    return migrate(url, "messaging", dry_run=dry_run)


def migrate_leases(url: str, *, dry_run: bool = False) -> list[Migration]:
    """Bring a lease store up to this version."""
    return migrate(url, "leases", dry_run=dry_run)


def migrate_keys(url: str, *, dry_run: bool = False) -> list[Migration]:
    """Bring a key store of data subjects up to this version."""
    return migrate(url, "keys", dry_run=dry_run)
