"""Errors of databases that say something about the log."""

from postroom.domain.errors import IntegrityFailure


def check_ids(error: Exception, where: str) -> None:
    """Raise IntegrityFailure if a database error is the violation of the unique index on message ids.

    The log accepts an id once in a topic, so one of the records was altered. Read models that an earlier
    release built accept it once in a mailbox.

    Arguments:
        where: the read models' name for messages.
    """
    if "message_id" in str(error):
        raise IntegrityFailure(
            f"The read models {where} can't include a message: another message of its topic has the "
            "same id, so one of the two was altered in the log, or an earlier release built the read "
            "models. Check the log with `postroom verify`; if it is intact, run `postroom views rebuild`, "
            "else restore the store from a backup."
        ) from error
