"""How a PostgreSQL database is told from other stores; apart, so that asking loads no driver."""

SCHEMES = ("postgresql://", "postgres://")


def is_url(store: str) -> bool:
    """Tell whether a store is a PostgreSQL database, by its URL."""
    return store.startswith(SCHEMES)
