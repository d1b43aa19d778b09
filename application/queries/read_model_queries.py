"""Queries of the read models: totals, status, groups of dead letters, and searches by headers and text."""

from postroom.application.erasure.protection import Protection
from postroom.application.erasure.search import as_stored
from postroom.application.ports.dead_letters import DeadLetterGroupFilter, DeadLetterGroupPage
from postroom.application.ports.read_models import SHOWN_PARKED, ProjectionStatus, ReadModels
from postroom.domain.search import EventFilter, SearchPage, TableStats


class GetTableStats:
    """A query for the totals of all messages."""

    def __init__(self, read_models: ReadModels) -> None:
        """Take the read models of a store."""
        self._read_models = read_models

    def __call__(self) -> TableStats:
        """Return the totals.

        Raises: NotFound before the first rebuild, Unavailable when the read models can't be read.
        """
        return self._read_models.stats()


class GetProjectionStatus:
    """A query for the status of the read models."""

    def __init__(self, read_models: ReadModels) -> None:
        """Take the read models of a store."""
        self._read_models = read_models

    def __call__(self, shown_parked: int = SHOWN_PARKED) -> ProjectionStatus:
        """Return the status; before the first rebuild it has no versions.

        Arguments:
            shown_parked: number of parked records to list.

        Raises: Unavailable when the read models can't be read.
        """
        return self._read_models.status(shown_parked)


class GroupDeadLetters:
    """A query for groups of the dead letters in the read models."""

    def __init__(self, read_models: ReadModels) -> None:
        """Take the read models of a store."""
        self._read_models = read_models

    def __call__(self, filter_: DeadLetterGroupFilter) -> DeadLetterGroupPage:
        """Return one page of groups; see `DeadLetters.dead_letter_groups`.

        Raises: NotFound before the first rebuild, Unavailable when the read models can't be read.
        """
        return self._read_models.dead_letter_groups(filter_)


class SearchMessages:
    """A search in the read models."""

    def __init__(self, read_models: ReadModels, protection: Protection | None = None) -> None:
        """Take the read models of a store, and what finds encrypted messages by their subjects."""
        self._read_models = read_models
        self._protection = protection

    def __call__(self, filter_: EventFilter) -> SearchPage:
        """Return one page of the messages that match.

        Raises: NotFound before the first rebuild, Unavailable when the read models or the keys can't be read.
        """
        stored = filter_ if self._protection is None else as_stored(filter_, self._protection)
        return self._read_models.search(stored)
