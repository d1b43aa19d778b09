"""Port: files for other tools, which hold the messages of a search."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from postroom.domain.search import FoundMessage


class ExportedMessage(NamedTuple):
    """Hold a message as it is exported.

    Arguments:
        envelope: without the publisher's auth token; None where envelopes are left out.
        payload: None where payloads are not asked for, and where this one is encrypted.
    """

    message: FoundMessage
    envelope: bytes | None
    payload: bytes | None


class Source(msgspec.Struct, frozen=True):
    """Say what was exported.

    Arguments:
        filter: the fields of the `EventFilter` that were given.
        version: of the read models. positions: by mailbox, how far its log had been read.
        messages: how many there are.
    """

    filter: Mapping[str, Any]
    version: int
    positions: Mapping[str, int]
    messages: int


class Written(msgspec.Struct, frozen=True):
    """Say what an export amounts to."""

    files: int
    bytes: int


class Export(Protocol):
    """An export that is being written; it is whole, or it is not there.

    All calls raise Unavailable when the files can't be written.
    """

    def write(self, messages: Sequence[ExportedMessage]) -> None:
        """Add messages, which come oldest first."""

    def complete(self, source: Source) -> Written:
        """Finish the export, which says what it was made from; nothing is added any more."""
