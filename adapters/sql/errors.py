"""Errors of databases that say something about the log."""

from postroom.domain.errors import IntegrityFailure


def check_ids(error: Exception, where: str) -> None:
    """Raise IntegrityFailure if a database error is the violation of the unique index on message ids.

    The log accepts an id once in a mailbox, so one of the records was altered.

    Arguments:
        where: the read models' name for messages.
    """
    if "message_id" in str(error):
        raise IntegrityFailure(
            f"The read models {where} can't include a message: another message of its mailbox has the same "
            "id, so one of the two was altered in the log. Check the log with `postroom verify`, and restore "
            "the store from a backup."
        ) from error
