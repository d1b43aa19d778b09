"""`SearchMessages`: search messages by headers and text (RFC-037 `QueryEvents`)."""

from postroom.application.erasure.protection import Protection
from postroom.application.erasure.search import as_stored
from postroom.application.ports.read_models import ReadModels
from postroom.domain.search import EventFilter, SearchPage


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
