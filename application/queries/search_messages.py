"""`SearchMessages`: find messages by their headers (RFC-037 `QueryEvents`)."""

from postroom.application.ports.read_models import ReadModels
from postroom.domain.search import EventFilter, SearchPage


class SearchMessages:
    """Search the archive as it stood at the last rebuild."""

    def __init__(self, read_models: ReadModels) -> None:
        """Take the read models of a store."""
        self._read_models = read_models

    def __call__(self, wanted: EventFilter) -> SearchPage:
        """Return one page of the messages that match.

        Raises: NotFound before the first rebuild, Unavailable when the read models can't be read.
        """
        return self._read_models.search(wanted)
