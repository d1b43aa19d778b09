"""`SearchMessages`: search messages by headers and text (RFC-037 `QueryEvents`)."""

from postroom.application.ports.read_models import ReadModels
from postroom.domain.search import EventFilter, SearchPage


class SearchMessages:
    """A search in the read models."""

    def __init__(self, read_models: ReadModels) -> None:
        """Take the read models of a store."""
        self._read_models = read_models

    def __call__(self, filter_: EventFilter) -> SearchPage:
        """Return one page of the messages that match.

        Raises: NotFound before the first rebuild, Unavailable when the read models can't be read.
        """
        return self._read_models.search(filter_)
