"""An event with the context attributes of the CloudEvents specification, version 1.0."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import msgspec

from postroom.domain.errors import InvalidRequest

SPECVERSION = "1.0"
REQUIRED = ("id", "source", "type")
"""Attributes that every event has, besides `specversion`."""
ATTRIBUTES = frozenset({*REQUIRED, "specversion", "datacontenttype", "dataschema", "subject", "time"})
"""Attributes that the specification defines; all others are extensions."""
JSON = "application/json"
BYTES = "application/octet-stream"

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NAME = re.compile(r"[a-z0-9]+\Z")
_VALUE = re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]*\Z")
_JSON_TYPE = re.compile(r"[^/;]+/(?:[^;]+\+)?json\s*(?:;|\Z)", re.IGNORECASE)


class NotACloudEvent(InvalidRequest):
    """The attributes are those of something else."""


class CloudEvent(msgspec.Struct, frozen=True):
    """A CloudEvent (CloudEvents 1.0, section 3).

    Arguments:
        attributes: context attributes and extensions by name, in their canonical string form.
        data: bytes of the media type `datacontenttype`; None if the event has no data.

    Raises: InvalidRequest if an attribute is missing, or has an invalid name or value.
    """

    attributes: Mapping[str, str]
    data: bytes | None = None

    def __post_init__(self) -> None:
        if "specversion" not in self.attributes:
            raise NotACloudEvent("This is not a CloudEvent: it has no specversion.")
        version = self.attributes["specversion"]
        if version != SPECVERSION:
            raise InvalidRequest(f"The CloudEvent is of version {version[:20]!r}; only 1.0 can be read.")
        for name in REQUIRED:
            if not self.attributes.get(name):
                raise InvalidRequest(f"The CloudEvent has no {name}.")
        for name, value in self.attributes.items():
            if not is_attribute_name(name):
                raise InvalidRequest(
                    f"The CloudEvent has an attribute {name[:80]!r}; names are lower-case letters and digits."
                )
            if not _VALUE.match(value):
                raise InvalidRequest(f"The {name[:80]} of the CloudEvent has control characters.")
            if not value and name in ATTRIBUTES:
                raise InvalidRequest(f"The {name} of the CloudEvent is empty; omit it.")

    @property
    def time_us(self) -> int | None:
        """Return the `time` in µs since 1970 UTC; None without one.

        Raises: InvalidRequest if it is not RFC 3339.
        """
        text = self.attributes.get("time")
        if text is None:
            return None
        try:
            time = datetime.fromisoformat(text.upper())
            if time.tzinfo is not None:
                return (time.astimezone(UTC) - _EPOCH) // timedelta(microseconds=1)
        except (ValueError, OverflowError):
            pass
        raise InvalidRequest(f"The time {text[:80]!r} of the CloudEvent is not a time in RFC 3339.")

    @property
    def media_type(self) -> str:
        """Return the media type of the data; JSON if the event has none (JSON event format, section 3.1)."""
        return self.attributes.get("datacontenttype", JSON)

    @property
    def has_json(self) -> bool:
        """Return whether the data is JSON according to its media type."""
        return is_json_type(self.media_type)


def is_json_type(media_type: str) -> bool:
    """Return whether content of a media type is JSON, such as `application/vnd.shop+json; charset=utf-8`."""
    return _JSON_TYPE.match(media_type) is not None


def is_attribute_name(name: str) -> bool:
    """Return whether an attribute may have this name (CloudEvents 1.0, section 3.1)."""
    return name != "data" and _NAME.match(name) is not None
