"""`ExportMessages`: read the messages that match a filter for a file for other tools."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from postroom.application.ports.read_models import ReadModels
from postroom.domain.envelope.build import open_envelope, without_auth_token
from postroom.domain.search import EventFilter, FoundMessage

PAGING = ("order", "limit", "offset", "cursor", "envelopes")


class ExportedMessage(NamedTuple):
    """A message to export.

    Arguments:
        envelope: without the publisher's auth token; None if envelopes are not exported.
        payload: None if payloads are not exported, or this one is encrypted.
    """

    message: FoundMessage
    envelope: bytes | None
    payload: bytes | None


class ExportSource(msgspec.Struct, frozen=True):
    """Origin of an export.

    Arguments:
        filter: the fields of the `EventFilter` that were set.
        version: version of the read models. positions: by mailbox, the last log position in them.
        messages: the number of messages.
    """

    filter: Mapping[str, Any]
    version: int
    positions: Mapping[str, int]
    messages: int


class ExportMessages:
    """An export from one version of the read models, as a consistent snapshot and page by page."""

    def __init__(self, read_models: ReadModels, *, envelope: bool = True, payload: bool = False) -> None:
        """Take the read models of a store.

        Arguments:
            envelope: include envelopes.
            payload: include payloads that are not encrypted.
        """
        self._read_models = read_models
        self._envelope = envelope
        self._payload = payload

    def __call__(
        self,
        filter_: EventFilter,
        write: Callable[[Sequence[ExportedMessage]], None],
        progress: Callable[[int], None] = lambda _: None,
    ) -> ExportSource:
        """Write every message that matches; return the source of the export.

        Arguments:
            write: writes messages, oldest first.
            progress: called with the number of messages written so far.

        Raises: NotFound before the first rebuild, Unavailable when the read models can't be read.
        """
        messages = 0
        filter_ = msgspec.structs.replace(filter_, envelopes=self._envelope or self._payload)
        with self._read_models.scan(filter_) as scan:
            for page in scan.pages:
                write([self._to_export(message) for message in page])
                messages += len(page)
                progress(messages)
        return ExportSource(_criteria(filter_), scan.version, scan.positions, messages)

    def _to_export(self, message: FoundMessage) -> ExportedMessage:
        blob = message.envelope_blob
        return ExportedMessage(
            message,
            without_auth_token(blob) if self._envelope else None,
            open_envelope(blob).payload if self._payload and message.encryption is None else None,
        )


def _criteria(filter_: EventFilter) -> Mapping[str, Any]:
    """Return the criteria of a filter that are set, without paging."""
    defaults = msgspec.structs.asdict(EventFilter())
    criteria = {
        name: value
        for name, value in msgspec.structs.asdict(filter_).items()
        if value != defaults[name] and name not in PAGING
    }
    if filter_.statuses:
        criteria["statuses"] = [status.name.lower() for status in filter_.statuses]
    return criteria
