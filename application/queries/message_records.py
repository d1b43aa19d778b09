"""The records of one message, read from the log."""

from collections.abc import Sequence

from postroom.application.ports.event_log import EventLogReader
from postroom.domain.errors import NotFound
from postroom.domain.message import MessageSent
from postroom.domain.names import message_stream
from postroom.domain.record import Record


def read_message(log: EventLogReader, id_: str) -> tuple[MessageSent, Sequence[Record]]:
    """Return the `MessageSent` of a message and all of its records, oldest first.

    Raises: NotFound if the log has no such message, or retention removed its `MessageSent`.
    """
    records = log.read_stream(message_stream(log.mailbox, id_))
    sent = records[0].event if records else None
    if not isinstance(sent, MessageSent):
        raise NotFound(
            f"Mailbox {log.mailbox} has no message {id_}; check the id, and the mailbox it was sent to."
        )
    return sent, records
