"""Port: exports of the messages of a search to files for other tools."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from postroom.domain.search import FoundMessage


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


class ExportSize(msgspec.Struct, frozen=True):
    """The size of an export."""

    files: int
    bytes: int


class Export(Protocol):
    """An export that is being written; only a complete one becomes visible.

    All calls raise Unavailable when the files can't be written.
    """

    def write(self, messages: Sequence[ExportedMessage]) -> None:
        """Write messages, oldest first."""

    def complete(self, source: ExportSource) -> ExportSize:
        """Finish the export, and store its origin."""
