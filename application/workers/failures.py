"""Tracebacks of handlers for log and dead letters, in which values of payloads and headers are redacted."""

import json
import re
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
MAX_SEARCH = 200_000_000
"""Characters of a traceback times values above which it is not logged, for the same reason."""
MIN_SECRET_CHARS = 4
"""Length of a value below which it is not redacted: shorter ones occur in any text."""
REDACTED = "[redacted]"
_INPUT = re.compile("(?<=input_value=).*(?=, input_type=)")
"""Input that an error of pydantic quotes, shortened in its middle."""


def describe_failure(error: BaseException, messages: Sequence[ReceivedMessage]) -> str | None:
    """Return the traceback of a handler's error, or None if it has none that may be logged.

    It has no local variables, and values of the payload and the headers are redacted in the texts of errors.
    An error of validation has no traceback, as it is about the payload.
    """
    frames = _frames_of_handler(error)
    if frames is None or sum(len(message.payload) for message in messages) > MAX_PAYLOAD_BYTES:
        return None
    try:
        text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    except Exception:  # whatever an attribute of the error raises
        return None
    secrets = {form for message in messages for value in _secrets(message) for form in _forms(value)}
    if len(text) * len(secrets) > MAX_SEARCH:
        return None
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    text = _INPUT.sub(REDACTED, text).encode(errors="backslashreplace").decode().replace("\0", "\\x00")
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
    """Yield the values of a payload and its headers, as text, that are long enough to be redacted."""
    text = message.payload.decode(errors="replace")
    try:
        payload = json.loads(text)
    except (ValueError, RecursionError):
        payload = text
    values = [payload, repr(message.payload)[2:-1], *message.attrs.values(), message.principal]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value
        elif value is not None and len(str(value)) >= MIN_SECRET_CHARS:
            yield str(value)
            if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):  # JSON in JSON
                try:
                    values.append(json.loads(value))
                except (ValueError, RecursionError):
                    continue


def _forms(value: str) -> Iterator[str]:
    """Yield the forms in which an error may quote a value: plain, by line, in JSON, and by `repr`."""
    for line in (value, *value.splitlines()):
        if line.isalnum() and line.isascii():
            forms = {line}
        else:
            texts = {line, json.dumps(line)[1:-1], json.dumps(line, ensure_ascii=False)[1:-1]}
            raw = {repr(text.encode(errors="backslashreplace"))[2:-1] for text in texts}
            forms = texts | raw | {repr(text)[1:-1] for text in texts}
        yield from (form for form in forms if len(form) >= MIN_SECRET_CHARS)
