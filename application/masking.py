"""Masks over headers and fields of payloads, for those who may not see them in the console."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from postroom.domain.arguments import check_items, check_text
from postroom.domain.envelope.content import DecodedPayload, PayloadFormat
from postroom.domain.envelope.headers import MailboxItem
from postroom.domain.errors import Forbidden, InvalidRequest
from postroom.domain.search import EventFilter

__all__ = ["MASK", "NO_MASK", "Mask"]

MASK = "[masked]"
"""Text in the place of a hidden value."""
ANY = "*"
"""Part of a pointer that stands for every member of an object and every element of an array."""
ALWAYS_SHOWN = frozenset(("message_id", "timestamp", "topic"))
MAX_RULES = 100
MAX_POINTER_CHARS = 1_000
T = TypeVar("T", bound=MailboxItem)


class Mask(msgspec.Struct, frozen=True):
    """Headers and fields of payloads whose values are not shown.

    Arguments:
        headers: names of headers, custom ones or fields of `MailboxItem`; case does not count, and neither
            does whether words are joined by `_`, `-` or a space.
        payload_fields: JSON pointers (RFC 6901) into payloads, such as `/card/number`; a part `*` stands for
            every member or element.
    """

    headers: tuple[str, ...] = ()
    payload_fields: tuple[str, ...] = ()

    def validate(self) -> "Mask":
        """Return the mask, or raise InvalidRequest naming the first rule that is malformed."""
        for name in ("headers", "payload_fields"):
            rules = check_items(f"mask_{name}", getattr(self, name))
            if len(rules) > MAX_RULES:
                raise InvalidRequest(f"mask_{name} must have up to {MAX_RULES} rules; it had {len(rules)}.")
            for each in rules:
                check_text(f"One of mask_{name}", each, 1, MAX_POINTER_CHARS)
        for each in self.headers:
            if _key(each) in ALWAYS_SHOWN:
                raise InvalidRequest(
                    f"{each} of mask_headers can't be hidden, as messages are listed by it; remove it, and "
                    "limit tokens to topics."
                )
        for pointer in self.payload_fields:
            _parse(pointer)
        return self

    def covers_header(self, name: str) -> bool:
        """Return whether the value of a header is hidden."""
        return _key(name) in set(map(_key, self.headers))

    def hide_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return custom headers without the values that are hidden."""
        hidden = set(map(_key, self.headers))
        return {name: MASK if _key(name) in hidden else value for name, value in headers.items()}

    def hide_item(self, item: T) -> T:
        """Return the headers of a message without the values that are hidden; its envelope is not changed."""
        changes: dict[str, Any] = {
            name: MASK
            for name in _TEXT_HEADERS
            if getattr(item, name) is not None and self.covers_header(name)
        }
        custom = self.hide_headers(item.custom_headers)
        if custom != item.custom_headers:
            changes["custom_headers"] = custom
        return msgspec.structs.replace(item, **changes) if changes else item

    def hide_sender(self, text: str, principal: str | None) -> str:
        """Return a sentence of a message's history without the principal who sent it, if that is hidden."""
        if not principal or not self.covers_header("principal"):
            return text
        return text.replace(f"Sent by {principal} to", f"Sent by {MASK} to")

    def hide_members(self, value: Any) -> Any:
        """Return a JSON value without the values of members that have the names of hidden headers.

        The principals of a filter are hidden if the header `principal` is. If anything is hidden, the words
        and texts that the `spec` of a redrive job searches for, and its patch, are hidden, too: they may
        quote it.
        """
        if isinstance(value, dict):
            return {name: self._hide_member(name, each) for name, each in value.items()}
        return [self.hide_members(each) for each in value] if isinstance(value, list) else value

    def _hide_member(self, name: str, value: Any) -> Any:
        if value in (None, [], {}, "") or name in ALWAYS_SHOWN:
            return value
        if self.covers_header("principal" if name == "principals" else name):
            return [MASK] if isinstance(value, list) else MASK
        if name == "spec" and isinstance(value, dict) and self != NO_MASK:
            value = {each: MASK if each in _QUOTES else field for each, field in value.items()}
        return self.hide_members(value)

    def check_criteria(
        self, filter_: EventFilter, advice: str = "it needs a token with the right admin"
    ) -> None:
        """Raise Forbidden, with an advice, for a criterion whose matches would disclose hidden values."""
        names = [name for name in ("correlation_id", "trace_id", "namespace") if getattr(filter_, name)]
        names += [*["principal"] * bool(filter_.principals), *filter_.headers]
        hidden = [name for name in names if self.covers_header(name)]
        if filter_.text is not None and self.headers:
            hidden.append("text")
        if filter_.match is not None and self != NO_MASK:
            hidden.append("words")
        if hidden:
            raise Forbidden(f"A search by {hidden[0]} would disclose values that are hidden here; {advice}.")

    def hide_fields(self, payload: DecodedPayload) -> DecodedPayload | None:
        """Return a payload without the fields that are hidden; None if its fields are unknown.

        Fields are known of JSON that can be parsed, and of Protobuf that was decoded to JSON.
        """
        if not self.payload_fields or payload.format == PayloadFormat.ENCRYPTED or not payload.data:
            return payload
        if payload.text is None or payload.format not in (PayloadFormat.JSON, PayloadFormat.PROTOBUF):
            return None
        try:
            masked, repeats_names = _decode(payload.text)
        except (ValueError, RecursionError):
            return None
        count = 0
        for pointer in self.payload_fields:
            masked, changes = _hide(masked, _parse(pointer))
            count += changes
        # The first member of two with one name was not decoded, and so not masked.
        if not count and not repeats_names:
            return payload
        data = msgspec.json.encode(masked)
        return DecodedPayload(PayloadFormat.JSON, data, data.decode(), payload.problems)


NO_MASK = Mask()
_QUOTES = ("text", "match", "merge_patch")
_TEXT_HEADERS = tuple(
    name
    for name in MailboxItem.__struct_fields__
    if name not in ("message_id", "timestamp", "topic", "custom_headers", "envelope_blob")
)


def _key(name: str) -> str:
    """Return the canonical name of a header: pages write `correlation id`, and HTTP `X-Card`."""
    return name.casefold().replace("-", "_").replace(" ", "_")


def _parse(pointer: str) -> list[str]:
    """Return the parts of a JSON pointer; raise InvalidRequest for other text."""
    if not pointer.startswith("/") or "~" in pointer.replace("~0", "").replace("~1", ""):
        raise InvalidRequest(
            f"{pointer[:80]!r} of mask_payload_fields is not a JSON pointer; write one such as /card/number, "
            "with ~1 for a slash and ~0 for a tilde in a name."
        )
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]


def _hide(value: Any, parts: Sequence[str]) -> tuple[Any, int]:
    """Return a value without a pointer's targets, and their number; containers change in place."""
    if not parts:
        return MASK, 1
    first, rest = parts[0], parts[1:]
    keys: Iterable[Any] = ()
    if isinstance(value, dict):
        keys = list(value) if first == ANY else [first] if first in value else []
    elif isinstance(value, list):
        keys = range(len(value)) if first == ANY else _index(first, len(value))
    count = 0
    for key in keys:
        value[key], changes = _hide(value[key], rest)
        count += changes
    return value, count


def _index(part: str, length: int) -> list[int]:
    is_index = part.isascii() and part.isdecimal() and len(part) < 10 and int(part) < length
    return [int(part)] if is_index else []


def _decode(text: str) -> tuple[Any, bool]:
    """Return the value of JSON, and whether any of its objects repeats a name."""
    repeats_names = False

    def to_object(members: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal repeats_names
        members_by_name = dict(members)
        repeats_names = repeats_names or len(members_by_name) < len(members)
        return members_by_name

    return json.loads(text, object_pairs_hook=to_object), repeats_names
