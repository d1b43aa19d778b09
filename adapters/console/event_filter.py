"""Filters of messages in the URLs of the console."""

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import msgspec

from postroom.adapters.console.values import MS as US_PER_MS
from postroom.adapters.console.values import read_time
from postroom.domain.arguments import check_text
from postroom.domain.errors import InvalidRequest
from postroom.domain.search import EventFilter, FoundMessage, Order, parse_status

LISTS: Final = ("topics", "principals", "statuses")
TEXTS: Final = ("message_id", "correlation_id", "trace_id", "namespace", "text", "match")
TIMES: Final = ("start_time", "end_time")
CRITERIA: Final = {
    "topics": "Topic",
    "principals": "Principal",
    "statuses": "Status",
    "start_time": "From",
    "end_time": "To",
    "message_id": "Message id",
    "correlation_id": "Correlation id",
    "trace_id": "Trace id",
    "namespace": "Namespace",
    "text": "Text in headers",
    "match": "Words",
}
"""Labels of criteria."""
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


def write_header(name: str, value: str) -> str:
    """Return a custom header as text."""
    escaped = name.replace("\\", "\\\\").replace("=", "\\=")
    return f"{escaped}={value}"


def write_time(ms: int) -> str:
    """Return a time as RFC 3339 with milliseconds, or as a number if RFC 3339 can't express it."""
    try:
        moment = EPOCH + ms * MS
    except OverflowError:
        return str(ms)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_time(name: str, text: str) -> int:
    """Return a time in ms since 1970 UTC.

    Arguments:
        text: RFC 3339, in UTC without an offset; a date alone is its midnight; an age such as `2h`; digits
            are ms.

    Raises: InvalidRequest for anything else.
    """
    if _INTEGER.match(text):
        return int(text)
    return read_time(f"The {name}", text, datetime.now(UTC)) // US_PER_MS


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


COLUMN: Final = "columns"
"""Parameter of a column; one of `COLUMNS`, or `header:NAME` of a custom header."""
AT: Final = "at"
OF_HEADER: Final = "header:"
MAX_COLUMNS: Final = 20
KEPT: Final = (COLUMN, AT)
"""Parameters that the page's links to other results keep."""
COLUMNS: Final[Mapping[str, tuple[str, Callable[[FoundMessage], object]]]] = {
    "time": ("Time (UTC)", lambda each: each.timestamp),
    "topic": ("Topic", lambda each: each.topic),
    "status": ("Status", lambda each: each.status.name.lower()),
    "attempts": ("Attempts", lambda each: each.attempts),
    "principal": ("Principal", lambda each: each.principal),
    "content_type": ("Content type", lambda each: each.content_type),
    "correlation_id": ("Correlation id", lambda each: each.correlation_id),
    "trace_id": ("Trace id", lambda each: each.trace_id),
    "namespace": ("Namespace", lambda each: each.namespace),
    "schema_url": ("Schema", lambda each: each.schema_url),
    "position": ("Position", lambda each: each.position),
    "shard": ("Shard", lambda each: each.shard),
}
"""Heading and value of each column, except for the column of the message."""
NUMBERS: Final = ("attempts", "position", "shard")


class Columns(NamedTuple):
    """The columns of the table that follow the column of the message.

    Arguments:
        names: names as in `COLUMN`; empty for the usual columns, some of which share a cell.
        headings: headings by name.
    """

    names: tuple[str, ...] = ()

    @property
    def headings(self) -> list[str]:
        """Return the headings."""
        return [
            name.removeprefix(OF_HEADER) if name.startswith(OF_HEADER) else COLUMNS[name][0]
            for name in self.names
        ]

    @property
    def numbers(self) -> list[int]:
        """Return the indexes of columns of numbers; the column of the message has the index 0."""
        return [index for index, name in enumerate(self.names, 1) if name in NUMBERS]

    def cells(self, message: FoundMessage) -> list[tuple[str, Any]]:
        """Return the name and the value of each column."""
        return [
            (name, message.custom_headers.get(name.removeprefix(OF_HEADER)))
            if name.startswith(OF_HEADER)
            else (name, COLUMNS[name][1](message))
            for name in self.names
        ]


def parse_columns(values: Iterable[str]) -> Columns:
    """Return the columns in the order of `COLUMNS`, followed by the custom headers.

    Raises: InvalidRequest for an unknown column, and for too many.
    """
    typed = [*dict.fromkeys(each for each in values if each)]
    headers = [each for each in typed if each.startswith(OF_HEADER)]
    unknown = [each for each in typed if each not in COLUMNS and each not in headers]
    if unknown or OF_HEADER in headers:
        raise InvalidRequest(
            f"There is no column {(unknown or headers)[0][:80]!r}; choose from {', '.join(COLUMNS)}, or "
            "header:NAME for a custom header."
        )
    if len(typed) > MAX_COLUMNS:
        raise InvalidRequest(f"{len(typed)} columns are too many; choose up to {MAX_COLUMNS}.")
    return Columns((*(each for each in COLUMNS if each in typed), *headers))


def group_values(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the values of each parameter of a URL."""
    grouped: dict[str, list[str]] = {}
    for name, value in pairs:
        grouped.setdefault(name, []).append(value)
    return grouped
