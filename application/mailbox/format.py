"""The format of stores: which versions of Postroom can read what others wrote (ADR 0101)."""

from postroom.domain.errors import UnusableStore

FORMAT = 2
"""Number of the format of tables and events that this version writes.

It grows by one when a former version could not use what this one writes: with a new type of event, a new
version of one, or a change of the tables that a former version does not know. A store is frozen as a fixture
of the tests then, and SQLite and PostgreSQL have a migration to the new format.

1: commits (since 23 November 2026). 2: the format is recorded in the store, and settings are events.
"""
RECORDS = 0
"""The format before commits, which `postroom import-store` reads."""


def own_version() -> str:
    """Return the version of Postroom."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    try:
        return version("postroom")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"


def check_format(store: str, format_: int, writer: str = "") -> None:
    """Check that this version can read a store.

    Arguments:
        store: its name, for messages.
        format_: its format.
        writer: the version of Postroom that wrote it first in that format.

    Raises: UnusableStore.
    """
    if format_ > FORMAT:
        raise UnusableStore(
            f"The store {store} has the format {format_} of Postroom {writer}, and this version, "
            f"{own_version()}, reads formats up to {FORMAT}; install Postroom {writer} or a later version."
        )
    if format_ <= RECORDS:
        raise UnusableStore(
            f"The store {store} has the format of before 23 November 2026; run `postroom import-store "
            f"{store} NEW` to copy it into a new store."
        )
