"""`GetProjectionStatus`: the versions of the read models and their lag behind the log."""

from postroom.application.ports.read_models import SHOWN_PARKED, ProjectionStatus, ReadModels


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
