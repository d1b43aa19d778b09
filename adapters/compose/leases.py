"""Opening lease stores, and the tables that are folded from them, by their addresses."""

from typing import TYPE_CHECKING

from postroom.adapters.compose.store import MEMORY
from postroom.adapters.postgres.url import is_url
from postroom.application.extras import explain_missing_extra
from postroom.application.ports.lease_store import LeaseStore, LeaseTables
from postroom.domain.arguments import check_path
from postroom.domain.errors import InvalidRequest

if TYPE_CHECKING:
    from postroom.adapters.sqlite.database import Durability


def open_lease_store(address: str, *, durability: "Durability" = "full") -> LeaseStore:
    """Open a lease store.

    Arguments:
        address: path of a SQLite file, `postgresql://...`, or `memory:`. A store on JetStream has settings of
            its own; see `postroom.adapters.jetstream`.
        durability: of a SQLite file; `full` survives power cuts, `relaxed` only process crashes.

    Raises: InvalidRequest for an address of another kind, Unavailable when the store can't be used,
        MissingExtra when a package is not installed.
    """
    check_path("The lease store", address)
    with explain_missing_extra("cluster"):
        if address == MEMORY:
            from postroom.adapters.memory.lease_store import (
                MemoryLeaseStore,
            )  # eventsourcing is slow to import

            return MemoryLeaseStore()
        if is_url(address):
            from postroom.adapters.postgres.lease_store import PostgresLeaseStore

            return PostgresLeaseStore(address)
        _refuse_other_urls(address)
        from postroom.adapters.sqlite.lease_store import SqliteLeaseStore

        return SqliteLeaseStore(address, durability=durability)


def open_lease_tables(address: str) -> LeaseTables | None:
    """Open RFC-049's tables in a lease store, or in a SQLite file beside a store on JetStream.

    Arguments:
        address: path of a SQLite file, `postgresql://...`, or `memory:`.

    Returns: None for a store in memory, which has no tables.
    Raises: as `open_lease_store`.
    """
    check_path("The store of lease tables", address)
    if address == MEMORY:
        return None
    with explain_missing_extra("cluster"):
        if is_url(address):
            from postroom.adapters.postgres.lease_tables import PostgresLeaseTables

            return PostgresLeaseTables(address)
        _refuse_other_urls(address)
        from postroom.adapters.sqlite.lease_tables import SqliteLeaseTables

        return SqliteLeaseTables(address)


def _refuse_other_urls(address: str) -> None:
    scheme, separator, _ = address.partition("://")
    if separator:
        raise InvalidRequest(
            f"The lease store begins with {scheme}://; a lease store is a file, memory: or "
            "postgresql://user@host/database. A store on JetStream has a setting of its own."
        )
