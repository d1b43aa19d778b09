"""`GroupDeadLetters`: dead letters in groups, such as those with the same error."""

from postroom.application.ports.dead_letters import DeadLetterGroupFilter, DeadLetterGroupPage
from postroom.application.ports.read_models import ReadModels


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
