"""Recognizing PostgreSQL URLs, in a separate module that does not import the driver."""

SCHEMES = ("postgresql://", "postgres://")


def is_url(store: str) -> bool:
    """Return whether the address of a store is a PostgreSQL URL."""
    return store.startswith(SCHEMES)
