"""`GetTableStats`: totals of the read models (RFC-037 `GetTableStats`)."""

from postroom.application.ports.read_models import ReadModels
from postroom.domain.search import TableStats


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
