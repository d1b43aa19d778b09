"""Documents in the lines of a file: JSON on several lines, and arrays of CloudEvents."""

import re
from collections.abc import Iterable, Iterator

import msgspec

from postroom.domain.errors import InvalidRequest

MAX_DOCUMENT_BYTES = 256 << 20
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_decode = msgspec.json.Decoder(list[msgspec.Raw]).decode

Line = tuple[int, bytes]


def split_documents(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield the documents of a file with the numbers of their first lines.

    A line that is not JSON is a document. A JSON object may extend over several lines; one that is not
    complete before the next line that begins with a brace is malformed, and each of its lines is yielded, so
    that the documents after it are read. The elements of an array are documents.

    Raises: InvalidRequest for a document that is too large or has no end.
    """
    parts: list[Line] = []
    depth = size = 0
    for number, line in lines:
        if parts and line[:1] == b"{" and parts[0][1].lstrip()[:1] == b"{":
            yield from parts
            parts, depth, size = [], 0, 0
        if not parts and line.lstrip()[:1] not in (b"{", b"["):
            yield number, line
            continue
        parts.append((number, line))
        size += len(line)
        depth += _open_brackets(line)
        if size > MAX_DOCUMENT_BYTES:
            raise InvalidRequest(
                f"The JSON from line {parts[0][0]} on exceeds {MAX_DOCUMENT_BYTES} bytes; split it."
            )
        if depth <= 0:
            yield from _elements(parts)
            parts, depth, size = [], 0, 0
    yield from parts


def _open_brackets(line: bytes) -> int:
    """Return how many more brackets a line opens than it closes; a string of JSON ends in its line."""
    difference = line.count(b"{") + line.count(b"[") - line.count(b"}") - line.count(b"]")
    if not difference:
        return 0
    line = _STRING.sub(b"", line)
    return line.count(b"{") + line.count(b"[") - line.count(b"}") - line.count(b"]")


def _elements(parts: list[Line]) -> Iterator[Line]:
    """Yield a document, or the elements of one that is an array."""
    number = parts[0][0]
    document = parts[0][1] if len(parts) == 1 else b"\n".join(part for _, part in parts)
    if document.lstrip()[:1] != b"[":
        yield number, document
        return
    try:
        elements = _decode(document)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        yield number, document  # which is refused with the reason
    else:
        yield from ((number, bytes(element)) for element in elements)
