"""Lineage of messages: the redrive jobs that changed them."""

from postroom.application.mailbox.codec import to_records
from postroom.application.ports.event_log import EventLogReader
from postroom.domain.message import MessageDeadLettered, MessageExpired, MessageRedriven
from postroom.domain.names import message_id
from postroom.domain.record import Record
from postroom.domain.redrive.events import RedriveAdvanced, RedriveUndoAdvanced


def find_job(log: EventLogReader, record: Record) -> str | None:
    """Return the id of the job that caused an event of a message; None if it was no job.

    The events of a job stand before its progress, in the same commit.
    """
    if not isinstance(record.event, MessageRedriven | MessageExpired | MessageDeadLettered):
        return None
    for commit in log.commits_of([record.position], envelopes=False):
        for later in to_records(commit):
            if later.position > record.position and isinstance(
                later.event, RedriveAdvanced | RedriveUndoAdvanced
            ):
                event = later.event
                count = event.moved if isinstance(event, RedriveAdvanced) else event.restored
                return message_id(event.stream) if later.position - count <= record.position else None
    return None
