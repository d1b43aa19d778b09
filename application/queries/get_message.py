"""`GetMessage`: one message with its whole history, straight from the log."""

from collections.abc import Callable
from typing import Any

import msgspec

from postroom.application.codec import to_event
from postroom.application.fold import fold_message
from postroom.application.messages import rfc3339
from postroom.application.ports.event_log import EventLog
from postroom.domain.envelope.headers import MailboxItem
from postroom.domain.errors import NotFound
from postroom.domain.integrity import is_intact
from postroom.domain.message import READY, Message, MessageEvent, MessageSent, Status
from postroom.domain.names import message_id, message_stream
from postroom.domain.record import Record


class HistoryEntry(msgspec.Struct, frozen=True):
    """One event of a message: when it happened, its place in the log, the owner's epoch, and its facts."""

    position: int
    at: str
    event: str
    epoch: int
    facts: dict[str, Any]


class MessageDetail(msgspec.Struct, frozen=True):
    """A message as it stands now, with its headers and all that happened to it."""

    mailbox: str
    message_id: str
    topic: str
    shard: int
    status: str
    attempt: int
    redriven: int
    reason: str | None
    last_error: str | None
    intact: bool
    item: MailboxItem
    history: list[HistoryEntry]


class GetMessage:
    """Look one message up by its id; needs no ownership and no read model."""

    def __init__(self, log: EventLog, wall: Callable[[], int]) -> None:
        """Take the mailbox's log and the wall clock in µs."""
        self._log = log
        self._wall = wall

    def __call__(self, id_: str) -> MessageDetail:
        """Return the message with its history.

        Raises: NotFound when the log has no such message, or retention removed it.
        """
        records = self._log.history(message_stream(self._log.mailbox, id_))
        events = [to_event(record) for record in records]
        if not events or not isinstance(events[0], MessageSent):
            raise NotFound(
                f"Mailbox {self._log.mailbox} has no message {id_}; check the id, and the mailbox it was "
                "sent to."
            )
        sent = events[0]
        message = fold_message(records)
        assert message is not None
        return MessageDetail(
            self._log.mailbox,
            message_id(sent.stream, sent.headers.message_id),
            message.topic,
            message.shard,
            status_name(message, self._wall()),
            message.attempt,
            message.redriven,
            message.reason,
            message.last_error,
            is_intact(sent),
            _item(sent),
            [_entry(record, event) for record, event in zip(records, events, strict=True)],  # type: ignore[arg-type]
        )


def status_name(message: Message, now: int) -> str:
    """Return a message's status as users read it; a ready message is `delayed` until its `due`."""
    if message.status == READY and message.due > now:
        return "delayed"
    return Status(message.status).name.lower()


def _item(sent: MessageSent) -> MailboxItem:
    headers = msgspec.structs.asdict(sent.headers)
    headers["custom_headers"] = headers["custom_headers"] or {}
    headers["message_id"] = message_id(sent.stream, sent.headers.message_id)
    return MailboxItem(topic=sent.topic, envelope_blob=sent.envelope, **headers)


_HIDDEN = {"stream", "version", "at", "envelope", "headers", "payload_hash", "hash_chain"}


def _entry(record: Record, event: MessageEvent) -> HistoryEntry:
    facts = {
        name: value
        for name, value in msgspec.structs.asdict(event).items()
        if name not in _HIDDEN and value is not None
    }
    for name in ("due", "expires_at"):
        if name in facts:
            facts[name] = rfc3339(facts[name])
    return HistoryEntry(record.position, rfc3339(record.at) or "", type(event).__name__, record.epoch, facts)
