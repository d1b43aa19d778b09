"""Filters of messages in the URLs of the console."""

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

from postroom.application.masking import NO_MASK, Mask
from postroom.application.text import from_rfc3339
from postroom.domain.arguments import check_text
from postroom.domain.errors import Forbidden, InvalidRequest
from postroom.domain.search import EventFilter, Order, parse_status

LISTS: Final = ("topics", "principals", "statuses")
TEXTS: Final = ("message_id", "correlation_id", "trace_id", "namespace", "text", "match")
TIMES: Final = ("start_time", "end_time")
PAGING: Final = ("order", "limit", "cursor")
HEADER: Final = "header"
"""Parameter of a custom header, as `name=value`; a backslash escapes = and \\ in the name."""
PARAMETERS: Final = frozenset((*LISTS, *TEXTS, *TIMES, *PAGING, HEADER))
DEFAULT_LIMIT: Final = 50
MAX_VALUE_CHARS: Final = 8_000
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
MS: Final = timedelta(milliseconds=1)
_INTEGER: Final = re.compile(r"-?\d{1,19}\Z", re.ASCII)

Pairs = list[tuple[str, str]]


def parse_filter(pairs: Iterable[tuple[str, str]]) -> EventFilter:
    """Return the filter of a URL's parameters; empty values and other parameters are ignored.

    Raises: InvalidRequest naming the parameter that is malformed or repeated.
    """
    lists: dict[str, list[str]] = {name: [] for name in LISTS}
    headers: dict[str, str] = {}
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name not in PARAMETERS or not value:
            continue
        check_text(name, value, 0, MAX_VALUE_CHARS)
        if name in lists:
            if value not in lists[name]:
                lists[name].append(value)
        elif name == HEADER:
            header, text = _parse_header(value)
            if headers.setdefault(header, text) != text:
                raise InvalidRequest(f"The header {header[:80]!r} has two values; give one.")
        elif name in fields:
            raise InvalidRequest(f"The parameter {name} occurs twice; give one value.")
        else:
            fields[name] = _parse_value(name, value)
    statuses = tuple(parse_status(each) for each in lists["statuses"])
    return EventFilter(
        **{"limit": DEFAULT_LIMIT} | fields,
        topics=tuple(lists["topics"]),
        principals=tuple(lists["principals"]),
        statuses=statuses,
        headers=headers,
    )


def write_filter(filter_: EventFilter) -> Pairs:
    """Return the parameters that `parse_filter` parses to the same filter, except its mailbox."""
    pairs: Pairs = []
    for name in ("topics", "principals"):
        pairs += [(name, each) for each in getattr(filter_, name)]
    pairs += [("statuses", each.name.lower()) for each in filter_.statuses]
    for name, time in (("start_time", filter_.start_time), ("end_time", filter_.end_time)):
        if time is not None:
            pairs.append((name, write_time(time)))
    pairs += [(name, value) for name in TEXTS if (value := getattr(filter_, name)) is not None]
    pairs += [(HEADER, write_header(*each)) for each in filter_.headers.items()]
    if filter_.order != Order.NEWEST_FIRST:
        pairs.append(("order", filter_.order.value))
    if filter_.limit != DEFAULT_LIMIT:
        pairs.append(("limit", str(filter_.limit)))
    if filter_.cursor is not None:
        pairs.append(("cursor", filter_.cursor))
    return pairs


def change(filter_: EventFilter, **changes: Any) -> EventFilter:
    """Return a copy of a filter with changed criteria, at the first page."""
    return msgspec.structs.replace(filter_, **{"cursor": None} | changes)


def criteria(filter_: EventFilter) -> Mapping[str, Any]:
    """Return the fields of a filter that are set, without paging."""
    names = ("topics", "principals", "statuses", *TIMES, *TEXTS, "headers")
    return {name: value for name in names if (value := getattr(filter_, name)) not in (None, (), {})}


def check_mask(filter_: EventFilter, mask: Mask) -> None:
    """Raise Forbidden for a criterion whose matches would disclose hidden values."""
    names = [name for name in ("correlation_id", "trace_id", "namespace") if getattr(filter_, name)]
    names += [*["principal"] * bool(filter_.principals), *filter_.headers]
    hidden = [name for name in names if mask.covers_header(name)]
    if filter_.text is not None and mask.headers:
        hidden.append("text")
    if filter_.match is not None and mask != NO_MASK:
        hidden.append("words")
    if hidden:
        raise Forbidden(
            f"A search by {hidden[0]} would disclose values that are hidden here; it needs a token with the "
            "right admin."
        )


def write_header(name: str, value: str) -> str:
    """Return a custom header as text."""
    escaped = name.replace("\\", "\\\\").replace("=", "\\=")
    return f"{escaped}={value}"


def write_time(ms: int) -> str:
    """Return a time as RFC 3339 with milliseconds, or as a number where that can't express it."""
    try:
        moment = EPOCH + ms * MS
    except OverflowError:
        return str(ms)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_time(name: str, text: str) -> int:
    """Return a time in ms since 1970 UTC.

    Arguments:
        text: RFC 3339, in UTC without an offset; a date alone is its midnight; digits are ms.

    Raises: InvalidRequest for anything else.
    """
    if _INTEGER.match(text):
        return int(text)
    try:
        return (from_rfc3339(text) - EPOCH) // MS
    except (OverflowError, ValueError):
        raise InvalidRequest(
            f"The {name} {text[:80]!r} is not a time; write it as 2026-01-31T08:00:00Z, or in ms since 1970."
        ) from None


def _parse_header(text: str) -> tuple[str, str]:
    match = re.match(r"((?:[^=\\]|\\.)*)=(.*)\Z", text, re.DOTALL)
    if match is None:
        raise InvalidRequest(f"The header {text[:80]!r} has no value; write it as name=value.")
    return re.sub(r"\\(.)", r"\1", match[1], flags=re.DOTALL), match[2]


def _parse_value(name: str, value: str) -> Any:
    match name:
        case "start_time" | "end_time":
            return parse_time(name, value)
        case "order":
            try:
                return Order(value)
            except ValueError:
                raise InvalidRequest(f"Unknown order {value[:80]!r}; expected newest or oldest.") from None
        case "limit":
            if not _INTEGER.match(value):
                raise InvalidRequest(f"The limit {value[:80]!r} is not a number; give 1 to 1,000.")
            return int(value)
        case _:
            return value
