"""The JSON event format of CloudEvents, version 1.0. JSON data is preserved byte for byte."""

from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from postroom.application.cloudevents.event import BYTES, CloudEvent
from postroom.domain.errors import InvalidRequest

BATCH = "This is a batch of CloudEvents; publish each event as a message of its own."

T = TypeVar("T")


class _Fraction(str):
    """A JSON number with a fraction or exponent, as text, because not every one is exactly a float."""

    __slots__ = ()


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(float_hook=_Fraction).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def write_json(event: CloudEvent) -> bytes:
    """Return an event as a JSON object (JSON event format, section 3).

    Data that is not JSON, whatever its media type says, is in `data_base64`.
    """
    fields: dict[str, object] = dict(event.attributes)
    if event.data is not None:
        if event.has_json and _is_json(event.data):
            fields["data"] = msgspec.Raw(event.data)
        else:
            fields["data_base64"] = b64encode(event.data).decode()
    return _encode(fields)


def read_json(document: bytes) -> CloudEvent:
    """Return the event in a JSON object (JSON event format, section 3).

    Attributes that are numbers or booleans become text; those that are null are unset. Data in `data_base64`
    without a `datacontenttype` is `application/octet-stream`.

    Raises: InvalidRequest if the document is no event of version 1.0.
    """
    if document.lstrip()[:1] == b"[":
        raise InvalidRequest(BATCH)
    fields = _parse(_decode_fields, document)
    attributes = {
        name: text
        for name, raw in fields.items()
        if name not in ("data", "data_base64") and (text := _scalar(_parse(_decode, raw), name)) is not None
    }
    if "data_base64" in fields:
        attributes.setdefault("datacontenttype", BYTES)
    event = CloudEvent(attributes)
    return msgspec.structs.replace(event, data=_data(fields, is_json=event.has_json))


def _data(fields: Mapping[str, msgspec.Raw], *, is_json: bool) -> bytes | None:
    """Return an event's data: JSON byte for byte as in the document, or the decoded text or bytes."""
    if "data_base64" in fields:
        if "data" in fields:
            raise InvalidRequest("The CloudEvent has both data and data_base64.")
        try:
            return b64decode(_decode_text(fields["data_base64"]), validate=True)
        except (Base64Error, msgspec.MsgspecError, ValueError, RecursionError):
            raise InvalidRequest("The data_base64 of the CloudEvent is not base64.") from None
    if "data" not in fields:
        return None
    raw = bytes(fields["data"])
    data = _parse(_decode, raw)
    return data.encode() if not is_json and type(data) is str else raw


def _is_json(data: bytes) -> bool:
    try:
        _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _parse(decode: Callable[[bytes | msgspec.Raw], T], text: bytes | msgspec.Raw) -> T:
    try:
        return decode(text)
    except RecursionError:
        raise InvalidRequest("The JSON of the CloudEvent is nested too deeply.") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The CloudEvent is not valid JSON: {error}.") from error


def _scalar(value: Any, name: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        return str(value)  # also of a fraction, which msgspec does not encode
    if isinstance(value, dict | list):
        kind = "an object" if isinstance(value, dict) else "an array"
        raise InvalidRequest(f"The {name[:80]} of the CloudEvent is {kind}; attributes are text or numbers.")
    return _encode(value).decode()
