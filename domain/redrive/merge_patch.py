"""JSON Merge Patch (RFC 7396) that leaves the bytes of unchanged values as they are."""

from typing import Any

import msgspec

from postroom.domain.errors import InvalidRequest

_Members = dict[str, msgspec.Raw]
_read_members = msgspec.json.Decoder(_Members).decode
_read_value = msgspec.json.Decoder(Any).decode
_write = msgspec.json.Encoder().encode
_NULL = b"null"
MAX_DEPTH = 100
"""Objects in objects of a patch."""


def check_patch(patch: str) -> None:
    """Raise InvalidRequest unless a patch is a JSON object, with objects in it up to a depth."""
    try:
        _read_value(patch)  # all of it, which reading its members does not
        members = _read_members(patch)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        members = None
    if members is None or _depth(members) > MAX_DEPTH:
        raise InvalidRequest(
            f"The merge patch is no JSON object of up to {MAX_DEPTH} levels; give one such as "
            '{"customer": {"city": "Bonn"}, "obsolete": null}.'
        )


def apply_patch(payload: bytes, patch: str) -> bytes | None:
    """Return a payload after a patch that `check_patch` accepts; None if it is no JSON object."""
    try:
        _read_value(payload)
        members = _read_members(payload)
    except (msgspec.DecodeError, RecursionError):
        return None
    return _write(_merge(members, _read_members(patch)))


def _merge(target: _Members, patch: _Members) -> _Members:
    for name, value in patch.items():
        if bytes(value) == _NULL:
            target.pop(name, None)
            continue
        inner = _members(value)
        if inner is None:
            target[name] = value
        else:
            before = _members(target[name]) if name in target else None
            target[name] = msgspec.Raw(_write(_merge(before or {}, inner)))
    return target


def _members(value: msgspec.Raw) -> _Members | None:
    """Return the members of an object; None for any other value."""
    return _read_members(value) if bytes(value).startswith(b"{") else None


def _depth(members: _Members) -> int:
    return 1 + max((_depth(each) for value in members.values() if (each := _members(value))), default=0)
