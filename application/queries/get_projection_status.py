"""`GetProjectionStatus`: which version of the read models is served, and how far behind the log it is."""

from postroom.application.ports.read_models import SHOWN_PARKED, ProjectionStatus, ReadModels


class GetProjectionStatus:
    """Tell how fresh the read models are."""

    def __init__(self, read_models: ReadModels) -> None:
        """Take the read models of a store."""
        self._read_models = read_models

    def __call__(self, shown_parked: int = SHOWN_PARKED) -> ProjectionStatus:
        """Return the status; it is no error that nothing was built yet.

        Arguments:
            shown_parked: how many of the parked records to name.

        Raises: Unavailable when the read models can't be read.
        """
        return self._read_models.status(shown_parked)
