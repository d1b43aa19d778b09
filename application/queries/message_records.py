"""The records of one message, read from the log."""

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from postroom.application.ports.event_log import EventLogReader
from postroom.domain.errors import NotFound
from postroom.domain.message import MessageSent
from postroom.domain.names import message_stream, topic_streams
from postroom.domain.record import Record

MAX_SAME_IDS = 1_000
"""Maximum number of messages with an id of their topic that are found."""


def read_message(
    log: EventLogReader, id_: str, covers: Callable[[str], bool] = lambda topic: True
) -> tuple[MessageSent, Sequence[Record]]:
    """Return the `MessageSent` of a message and all of its records, oldest first.

    Messages of several topics may have the same id, if senders are limited to topics. Then it is the one
    whose id is unique in the mailbox, or else the first that was sent.

    Arguments:
        covers: returns whether a topic is considered.

    Raises: NotFound if the log has no such message, or retention removed its `MessageSent`.
    """
    for stream in streams_with_id(log, id_):
        records = log.read_stream(stream)
        sent = records[0].event if records else None
        if isinstance(sent, MessageSent) and covers(sent.topic):
            return sent, records
    raise NotFound(
        f"Mailbox {log.mailbox} has no message {id_}; check the id, and the mailbox it was sent to."
    )


def streams_with_id(log: EventLogReader, id_: str) -> Iterator[bytes]:
    """Yield the stream that an id has if it is unique in the mailbox, then those in which a topic has it."""
    stream = message_stream(log.mailbox, id_)
    yield stream
    others = log.replay_first(log.streams_between(*topic_streams(stream), MAX_SAME_IDS))
    same = [each for each in others if isinstance(each, MessageSent) and each.headers.message_id == id_]
    yield from (each.stream for each in sorted(same, key=attrgetter("at")))
