"""What the server accepts of requests: hosts, origins, bodies within bounds, and strict parameters."""

import json
import re
from collections.abc import Coroutine, Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import parse_qsl

import msgspec

from postroom.adapters.http_server.problems import ForeignHost, ForeignOrigin, UnsupportedMediaType
from postroom.adapters.http_server.settings import HttpSettings
from postroom.adapters.sockets.address import ANY_HOST, is_loopback_name
from postroom.domain.errors import FrameTooLarge, InvalidRequest, Unavailable

RETRY_MS = 1_000
DISCARD_FRAMES: Final = 4
"""Number of frames to discard of a chunked body that is too large, so that its sender sees the answer."""


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


class Holder(Protocol):
    """A request, with the bytes of its body that count to the budget of all bodies."""

    held: int


class Bodies:
    """Reader of bodies: each has at most the frame limit, and all together a budget (svc-mailbox I-5).

    Attributes:
        used: bytes that requests hold; a request's bytes are subtracted when it ends.
    """

    def __init__(self, limits: HttpSettings) -> None:
        self._frame_bytes = limits.frame_bytes
        self._capacity = limits.buffer_bytes
        self.used = 0

    def check(self, headers: dict[bytes, bytes]) -> None:
        """Check what a header says about the body, before anything of it is read.

        Raises: FrameTooLarge for a declared length, UnsupportedMediaType for a content coding.
        """
        if int(headers.get(b"content-length", b"0")) > self._frame_bytes:  # the parser accepts digits only
            raise self._too_large()
        if b"content-encoding" not in headers:
            return
        coding = headers[b"content-encoding"].strip().lower()
        if coding not in (b"", b"identity"):
            raise UnsupportedMediaType(
                f"The body has the Content-Encoding {coding.decode('latin-1')!r}; send it without one."
            )

    def take(self, holder: Holder, count: int) -> None:
        """Count bytes of a request's body.

        Raises: FrameTooLarge, Unavailable when the budget is used up.
        """
        if holder.held + count > self._frame_bytes:
            raise self._too_large()
        if self.used + count > self._capacity:
            raise Unavailable("The server holds its limit of request bodies; retry shortly.", RETRY_MS)
        self.used += count
        holder.held += count

    async def read(self, holder: Holder, receive: Any) -> bytes:
        """Return a body by the messages of ASGI; a body that is too large is never held in memory.

        Raises: as `take`; ClientGone.
        """
        limit, size, pieces = self._frame_bytes, 0, []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            size += len(message["body"])
            if size <= limit:
                self.take(holder, len(message["body"]))
                pieces.append(message["body"])
            else:
                pieces.clear()
            if not message["more_body"] or size > DISCARD_FRAMES * limit:
                break
        if size > limit:
            raise self._too_large()
        return b"".join(pieces)

    def _too_large(self) -> FrameTooLarge:
        return FrameTooLarge(
            f"The body exceeds the frame limit of {self._frame_bytes} bytes; send a reference to the data."
        )


T = TypeVar("T")

MAX_DETAIL_CHARS = 300
"""Maximum length of the decoder's message, which may quote a name of any length from the body."""


def decode(body: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    """Return a JSON body as the decoder's type.

    Raises: InvalidRequest when it is not JSON, has fields that are unknown, missing, duplicate, of a wrong
        type or out of range, or text with NUL characters.
    """
    try:
        value = decoder.decode(body)
        # The decoder has checked structure and depth, so this pass can't recurse far.
        if not _is_flat(body):
            _CHECKER.decode(body.decode())
    except InvalidRequest:
        raise
    except (ValueError, RecursionError, MemoryError) as error:
        raise InvalidRequest(f"The body is invalid: {describe(error)}.") from None
    return value


def describe(error: Exception) -> str:
    """Return the error of a decoder as one line of bounded length, without a full stop."""
    detail = (str(error) or type(error).__name__)[:MAX_DETAIL_CHARS].rstrip(".")
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in detail)


def _is_flat(body: bytes) -> bool:
    """Return whether valid JSON is an object that evidently has no repeated name and no NUL.

    Each member has a colon, so an object with as many colons as distinct names has no repeated name.
    """
    if b"\\u0000" in body:
        return False
    plain = _UNTYPED.decode(body)
    return type(plain) is dict and len(plain) == body.count(b":")


def _check_object(pairs: Sequence[tuple[str, Any]]) -> None:
    """Check the members of an object; its value is not needed."""
    names = set()
    for name, value in pairs:
        if name in names:
            raise InvalidRequest(f"The body is invalid: the name {name[:80]!r} occurs twice in an object.")
        names.add(name)
        _check_text(name)
        for text in value if type(value) is list else (value,):
            if type(text) is str:
                _check_text(text)


def _check_text(text: str) -> None:
    if "\0" in text:
        raise InvalidRequest("The body is invalid: text contains a NUL character.")


_CHECKER = json.JSONDecoder(object_pairs_hook=_check_object)
_UNTYPED = msgspec.json.Decoder()


MAX_PARAMETERS = 1_000
_DEEP = re.compile(r"(\w+)\[([^\[\]]+)\]\Z")


def parse_query(query: bytes, kind: Any) -> Any:
    """Return the query string as a struct.

    Lists are repeated parameters, and mappings have the form `name[key]=value`.

    Arguments:
        kind: the struct; None if the route takes no parameters.

    Raises: InvalidRequest naming the parameter that is unknown, repeated, of a wrong type or out of range.
    """
    if kind is None and not query:
        return None
    try:
        pairs = parse_qsl(
            query.decode("ascii"),
            keep_blank_values=True,
            strict_parsing=bool(query),
            errors="strict",
            max_num_fields=MAX_PARAMETERS,
        )
    except ValueError:
        raise InvalidRequest("The query string is malformed; write name=value&name=value.") from None
    if kind is None:
        if pairs:
            raise InvalidRequest(f"Unknown parameter {pairs[0][0][:80]!r}; this call takes none.")
        return None
    fields = {each.name: each for each in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {}
    for name, value in pairs:
        if "\0" in name + value:
            raise InvalidRequest(f"Parameter {name[:80]!r} contains a NUL character.")
        deep = _DEEP.match(name)
        if deep and isinstance(_default(fields.get(deep[1])), dict):
            target = values.setdefault(deep[1], {})
            if deep[2] in target:
                raise InvalidRequest(f"Parameter {name[:80]!r} occurs twice.")
            target[deep[2]] = value
        elif name not in fields or isinstance(_default(fields[name]), dict):
            raise InvalidRequest(f"Unknown parameter {name[:80]!r}; known are {', '.join(fields)}.")
        elif isinstance(_default(fields[name]), list):
            values.setdefault(name, []).append(value)
        elif name in values:
            raise InvalidRequest(f"Parameter {name[:80]!r} occurs twice.")
        else:
            values[name] = value
    try:
        return msgspec.convert(values, kind, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise InvalidRequest(f"A parameter is invalid: {describe(error)}.") from None


def _default(field: Any) -> Any:
    """Return the default of a field: a new list or mapping if it may occur several times."""
    if field is None or field.default_factory is msgspec.NODEFAULT:
        return None
    return field.default_factory()


MAX_HOST_CHARS: Final = 256
Headers = list[tuple[bytes, bytes]]


class Site:
    """Names under which clients may reach the server.

    Arguments:
        any_host: whether to accept any `Host`, as on a Unix socket; otherwise loopback names only.
    """

    def __init__(self, *, any_host: bool) -> None:
        self.any_host = any_host
        self._names: frozenset[str] = frozenset()

    def allow(self, names: Iterable[str]) -> None:
        """Accept requests whose `Host` is one of these, too; `*` is any."""
        self._names = frozenset(each.lower() for each in names)

    def check_host(self, headers: Headers) -> bytes:
        """Return the `Host` of a request; raise ForeignHost unless it is a name of the server.

        A web page may have bound its name to this machine (DNS rebinding).
        """
        hosts = [value for name, value in headers if name == b"host"]
        if self.any_host:
            return hosts[0] if hosts else b""
        if not (len(hosts) == 1 and self._is_own(hosts[0])):
            raise ForeignHost(
                "The Host header must name this machine, such as localhost, or one of its allowed_hosts."
            )
        return hosts[0]

    def check_api(self, headers: Headers, fields: dict[bytes, bytes], scheme: str) -> None:
        """Refuse requests that a web page sends from a browser on this machine.

        Besides rebinding names, a page may send forms and requests without a body, for which browsers don't
        ask the server first; such requests name the page's origin.

        Arguments:
            fields: headers by name; if a name occurs several times, its last value.
        """
        if self.any_host:
            return
        if len(fields) == len(headers) and b"origin" not in fields:  # the common case
            host = fields.get(b"host")
            if host is not None and self._is_own(host):
                return
        host = self.check_host(headers)
        own = scheme.encode() + b"://" + host
        if any(name == b"origin" and value != own for name, value in headers):
            raise ForeignOrigin("Web pages may not use the service; a proxy for them must remove Origin.")

    def check_form(self, headers: Headers) -> None:
        """Refuse a form that a page of another site sent, according to the headers of its browser.

        A proxy may have replaced `Host`; then the origin must be one of the server's names.
        """
        sites = [value for name, value in headers if name == b"sec-fetch-site"]
        if sites:
            is_own = sites == [b"same-origin"]
        else:
            host = self.check_host(headers)
            origins = [value for name, value in headers if name == b"origin"]
            is_own = all(self._is_origin(each, host) for each in origins)
        if not is_own:
            raise ForeignOrigin("The form was sent by a page of another site; open the console itself.")

    def _is_own(self, host: bytes) -> bool:
        return _is_this_machine(host) or bool(self._names & {ANY_HOST, _name(host)})

    def _is_origin(self, origin: bytes, host: bytes) -> bool:
        scheme, separator, place = origin.partition(b"://")
        if not separator or scheme not in (b"http", b"https"):
            return False
        return place == host or _name(place) in self._names - {ANY_HOST}


@lru_cache(1_024)
def _is_this_machine(host: bytes) -> bool:
    return len(host) < MAX_HOST_CHARS and is_loopback_name(host.decode("latin-1"))


def _name(host: bytes) -> str:
    """Return the name in the value of a `Host` header, without the port."""
    name, _, port = host.decode("latin-1").lower().rpartition(":")
    return name if port.isdecimal() else host.decode("latin-1").lower()


class WholeRequests(Protocol):
    """An application that also answers requests which came in one piece.

    Attributes:
        whole_targets: pattern of the targets of POST requests whose answer is not a stream.
    """

    whole_targets: re.Pattern[bytes]

    def begin(
        self, connection: Any, target: bytes, headers: Headers, body: bytes, *, keep_alive: bool
    ) -> tuple[Any, Coroutine[Any, Any, None]]:
        """Return a request as the cycle of its connection, and the work that answers it."""
