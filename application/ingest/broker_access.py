"""Access to brokers (TLS, authentication, secrets in files), and the formats of their messages."""

import re
import ssl
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from postroom.domain.errors import InvalidRequest


class BrokerAccess(msgspec.Struct, frozen=True, kw_only=True):
    """TLS and authentication; all paths are of files.

    Arguments:
        user, password_file: a user, and the file with the password.
        ca: certificates, in PEM, of authorities that may sign the broker's certificate; None takes the
            system's.
        certificate, key: the client's own certificate with its chain, and its key, in PEM.

    Raises: InvalidRequest for settings that need each other.
    """

    user: str | None = None
    password_file: str | None = None
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        for one, other in (("user", "password_file"), ("certificate", "key")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise InvalidRequest(f"The settings {one} and {other} need each other; set both.")

    def read_password(self) -> str | None:
        """Return the password, or None without a user; raise InvalidRequest if its file can't be read."""
        if self.password_file is None:
            return None
        try:
            return Path(self.password_file).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(
                f"The password file {self.password_file} can't be read: {error}; make it readable text."
            ) from error


TLS_ADVICE = "Check ca, and the name and expiry of the server's certificate"
_CERTIFICATE_ADVICE = "Check certificate and key, and that the server has TLS"


def tls_advice(error: BaseException | None) -> str | None:
    """Return what to do about an error that TLS caused, directly or indirectly; None for other errors."""
    visited: set[int] = set()  # a client that raises one error again and again makes it its own context
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"{TLS_ADVICE}."
        if isinstance(error, ssl.SSLError):
            return f"{_CERTIFICATE_ADVICE}."
        error = error.__cause__ or error.__context__
    return None


class NatsAccess(msgspec.Struct, frozen=True, kw_only=True):
    """TLS and authentication of connections to NATS; all paths are of files.

    Arguments:
        credentials: user JWT and its seed, as `nsc` writes them.
        nkey: seed of an nkey.
        user, password_file: a user, and the file with the password.
        token_file: file with a token.
        ca: certificates, in PEM, of authorities that may sign the server's certificate; None takes the
            system's.
        certificate, key: the client's own certificate with its chain, and its key, in PEM.
        tls_first: begin with TLS, before the first message of a server with `handshake_first`.

    Raises: InvalidRequest for settings that exclude or need each other.
    """

    credentials: str | None = None
    nkey: str | None = None
    user: str | None = None
    password_file: str | None = None
    token_file: str | None = None
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    tls_first: bool = False

    def __post_init__(self) -> None:
        for one, other in (("user", "password_file"), ("certificate", "key")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise InvalidRequest(f"The NATS settings {one} and {other} need each other; set both.")
        ways = [
            name for name in ("credentials", "nkey", "user", "token_file") if getattr(self, name) is not None
        ]
        if len(ways) > 1:
            raise InvalidRequest(
                f"The NATS settings {' and '.join(ways)} exclude each other; leave all out but one."
            )

    def access(self) -> dict[str, str | bool | None]:
        """Return the settings by name."""
        return {name: getattr(self, name) for name in NatsAccess.__struct_fields__}


def without_secrets(url: str) -> str:
    """Return URLs, separated by commas, without user, password and token, for messages and logs."""
    return re.sub(r"//[^/,]*@", "//", url)


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


SCHEMA_ID_BYTES = 5
"""The zero byte and the id of the schema."""
MAX_INDEXES = 64
"""Maximum depth of nested message types; the index of `PrismEnvelope` has one."""


def framing_length(data: bytes) -> int:
    """Return the number of bytes before a framed protobuf message, or 0 if there is no framing.

    A protobuf message never begins with a zero byte, so the framing is unambiguous.
    """
    if len(data) < SCHEMA_ID_BYTES or data[0]:
        return 0
    count, at = _read_varint(data, SCHEMA_ID_BYTES)
    if count < 0 or count > MAX_INDEXES:
        return 0
    for _ in range(count):
        index, at = _read_varint(data, at)
        if index < 0:
            return 0
    return at


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a zigzag varint of at most five bytes and the position after it, or -1 without one."""
    number = shift = 0
    for end in range(at, min(at + 5, len(data))):
        number |= (data[end] & 0x7F) << shift
        shift += 7
        if data[end] < 0x80:
            return (number >> 1) ^ -(number & 1), end + 1
    return -1, at
