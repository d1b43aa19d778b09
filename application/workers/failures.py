"""Tracebacks of handlers, for the log: frames and texts of errors, without what a payload or a header has."""

import json
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from postroom.application.messages import ReceivedMessage
from postroom.application.workers import handler

_PACKAGE = f"{Path(__file__).parents[2]}/"
MAX_CHARS = 16_000
"""Length of a traceback above which its middle is left out."""
MAX_PAYLOAD_BYTES = 64 << 10
"""Size of the payloads above which the log has no traceback, as a search for its values takes long."""
MIN_SECRET_CHARS = 4
"""Length of a value below which it says little, and occurs in any text."""
REDACTED = "[redacted]"


def describe_failure(error: BaseException, messages: Sequence[ReceivedMessage]) -> str | None:
    """Return the traceback of a handler's error, or None if it has none that may be logged.

    It has frames and the texts of errors, but no local variables. Values of the payload and the headers that
    a text quotes are left out. An error of validation is about the payload, so it has no traceback.
    """
    frames = _frames_of_handler(error)
    if frames is None or sum(len(message.payload) for message in messages) > MAX_PAYLOAD_BYTES:
        return None
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    for value in sorted({each for message in messages for each in _secrets(message)}, key=len, reverse=True):
        text = text.replace(value, REDACTED)
    half = MAX_CHARS // 2
    return text if len(text) <= MAX_CHARS else f"{text[:half]}\n...\n{text[-half:]}"


def _frames_of_handler(error: BaseException) -> TracebackType | None:
    """Return the traceback from the first frame of the handler; None if the error is of its arguments."""
    frames, first = error.__traceback__, None
    while frames is not None:
        file = frames.tb_frame.f_code.co_filename
        if file == handler.__file__:
            first = None
        elif first is None and not file.startswith(_PACKAGE):
            first = frames
        frames = frames.tb_next
    module = "" if first is None else str(first.tb_frame.f_globals.get("__name__", ""))
    return None if module.partition(".")[0] == "pydantic" else first


def _secrets(message: ReceivedMessage) -> Iterator[str]:
    """Yield the texts of a payload and its headers that are long enough to be told."""
    text = message.payload.decode(errors="replace")
    try:
        payload = json.loads(text)
    except (ValueError, RecursionError):
        payload = text
    values = [payload, *message.attrs.values(), message.principal]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value
        elif value is not None and len(str(value)) >= MIN_SECRET_CHARS:
            yield str(value)
