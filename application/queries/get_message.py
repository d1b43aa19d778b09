"""`GetMessage`: one message with its history, from the log."""

from collections.abc import Callable

import msgspec

from postroom.application.erasure.protection import Protection
from postroom.application.mailbox.codec import is_intact
from postroom.application.mailbox.stored_snapshots import fold_message, refuse_altered_records
from postroom.application.messages import rfc3339
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.message_records import read_message
from postroom.application.queries.redrive_lineage import RedriveLink, find_redrive
from postroom.application.query_results import HistoryEntry, MessageDetail
from postroom.domain.envelope.headers import MailboxItem
from postroom.domain.errors import NotFound
from postroom.domain.integrity import has_intact_headers
from postroom.domain.message import READY, Message, MessageSent, Status
from postroom.domain.names import message_id
from postroom.domain.record import Record


class GetMessage:
    """A query for one message by its id; needs no ownership and no read model."""

    def __init__(
        self, log: EventLogReader, now: Callable[[], int], protection: Protection | None = None
    ) -> None:
        """Take the mailbox's log, its log time now in µs, and what decrypts messages."""
        self._log = log
        self._now = now
        self._protection = protection

    @refuse_altered_records
    def __call__(self, id_: str, covers: Callable[[str], bool] = lambda topic: True) -> MessageDetail:
        """Return the message with its history; `intact` says whether headers and payload match the envelope.

        Arguments:
            covers: returns whether a topic is considered; see `read_message`.

        Raises: NotFound when the log has no such message, or retention removed it; Unavailable when it is
            encrypted and the key store can't be used.
        """
        sent, records = read_message(self._log, id_, covers)
        if not records[0].envelope_hash:
            raise NotFound(
                f"Message {id_} of mailbox {self._log.mailbox} is settled; in amnesia mode the content of "
                "settled messages is forgotten."
            )
        message = fold_message(records)
        assert message is not None
        is_whole = is_intact(records[0]) and has_intact_headers(sent)
        content = self._protection.read_message(sent) if self._protection and is_whole else sent
        return MessageDetail(
            self._log.mailbox,
            message_id(sent.stream, sent.headers.message_id),
            message.topic,
            message.shard,
            status_name(message, self._now()),
            message.attempt,
            message.redriven,
            message.reason,
            message.last_error,
            is_whole and content != "altered",
            message_item(content if isinstance(content, MessageSent) else sent),
            [_entry(record, find_redrive(self._log, record)) for record in records],
            content == "erased",
            message_id(sent.stream),
        )


def status_name(message: Message, now: int) -> str:
    """Return the name of a message's status; a ready message is `delayed` until its `due`."""
    if message.status == READY and message.due > now:
        return "delayed"
    return Status(message.status).name.lower()


def message_item(sent: MessageSent) -> MailboxItem:
    """Return the headers and the envelope of a message."""
    headers = msgspec.structs.asdict(sent.headers)
    headers["custom_headers"] = headers["custom_headers"] or {}
    headers["message_id"] = message_id(sent.stream, sent.headers.message_id)
    return MailboxItem(topic=sent.topic, envelope_blob=sent.envelope, **headers)


NEVER = ("expires_at", 0)
"""The field of a message that doesn't expire, as in an archive."""
_HIDDEN = {"stream", "version", "at", "envelope", "headers", "payload_hash", "hash_chain"}


def _entry(record: Record, redrive: RedriveLink | None) -> HistoryEntry:
    facts = {
        name: value
        for name, value in msgspec.structs.asdict(record.event).items()
        if name not in _HIDDEN and value is not None and (name, value) != NEVER
    }
    if redrive is not None:
        links = {"redrive_job": redrive.job, "copy": redrive.copy, "original": redrive.original}
        facts |= {name: id_ for name, id_ in links.items() if id_ is not None}
    for name in ("due", "expires_at"):
        if name in facts:
            facts[name] = rfc3339(facts[name])
    return HistoryEntry(record.position, rfc3339(record.at) or "", record.type, record.epoch, facts)
