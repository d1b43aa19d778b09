"""`ExportMessages`: write all that a search finds to files for other tools."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from postroom.application.ports.export import Export, ExportedMessage, Source, Written
from postroom.application.ports.read_models import ReadModels
from postroom.domain.envelope.build import open_envelope, without_auth_token
from postroom.domain.search import EventFilter, FoundMessage

PAGING = ("order", "limit", "offset", "cursor")


class ExportMessages:
    """Export from the archive as it stood at the last rebuild, all at one moment and little at a time."""

    def __init__(self, read_models: ReadModels, *, envelope: bool = True, payload: bool = False) -> None:
        """Take the read models of a store.

        Arguments:
            envelope: export whole envelopes. payload: export payloads that are not encrypted.
        """
        self._read_models = read_models
        self._envelope = envelope
        self._payload = payload

    def __call__(
        self, wanted: EventFilter, export: Export, progress: Callable[[int], None] = lambda _: None
    ) -> tuple[Source, Written]:
        """Write every message that matches, and return what was exported and what that amounts to.

        Arguments:
            progress: called with the number of messages so far, as the work goes on.

        Raises: NotFound before the first rebuild, Unavailable when the read models can't be read or the files
            can't be written.
        """
        messages = 0
        with self._read_models.scan(wanted) as scan:
            for page in scan.pages:
                export.write([self._exported(found) for found in page])
                messages += len(page)
                progress(messages)
        source = Source(_given(wanted), scan.version, scan.positions, messages)
        return source, export.complete(source)

    def _exported(self, found: FoundMessage) -> ExportedMessage:
        blob = found.envelope_blob
        return ExportedMessage(
            found,
            without_auth_token(blob) if self._envelope else None,
            open_envelope(blob).payload if self._payload and found.encryption is None else None,
        )


def _given(wanted: EventFilter) -> Mapping[str, Any]:
    """Return the fields of a filter that narrow it; pages are none of an export's business."""
    anything = msgspec.structs.asdict(EventFilter())
    given = {
        name: value
        for name, value in msgspec.structs.asdict(wanted).items()
        if value != anything[name] and name not in PAGING
    }
    if wanted.statuses:
        given["statuses"] = [status.name.lower() for status in wanted.statuses]
    return given
