"""The form of a redrive job: its fields, and the specification that they describe."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, cast

import msgspec

from postroom.adapters.console import event_filter
from postroom.adapters.console.values import (
    MS,
    Fields,
    parse_number,
    parse_time,
    split_lines,
    split_pairs,
    text_of,
    write_time,
)
from postroom.application.masking import MASK, NO_MASK, Mask
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import DEAD, IN_FLIGHT, READY, Status
from postroom.domain.redrive.spec import Action, RedriveSpec
from postroom.domain.search import EventFilter


class Field(NamedTuple):
    """A field of the form.

    Arguments:
        kind: `text`, `number`, `time`, `lines` (a value per line), `pairs` (`NAME=VALUE` per line) or `json`.
    """

    name: str
    label: str
    kind: str = "text"
    hint: str = ""


SELECTION: Final = (
    Field("topics", "Topics", "lines", "Names or globs such as orders.*, one a line"),
    Field("keys", "Sticky keys", "lines", "One a line"),
    Field("message_ids", "Message ids", "lines", "One a line, up to 1,000"),
)
FAILURE: Final = (
    Field("fingerprints", "Fingerprints", "lines", "Of errors, one a line"),
    Field("reasons", "Reasons", "lines", "Such as max_attempts, one a line"),
    Field(
        "dead_since", "Dead-lettered since", "time", "Time such as 2026-01-31T08:00Z, or an age such as 2h"
    ),
    Field("dead_until", "Dead-lettered until", "time", "Inclusive; the preview enters its own time here"),
)
MESSAGE: Final = (
    Field("start_time", "Published since", "time"),
    Field("end_time", "Published until", "time"),
    Field("principals", "Principals", "lines", "Publishers, one a line"),
    Field("correlation_id", "Correlation id"),
    Field("trace_id", "Trace id"),
    Field("namespace", "Namespace"),
    Field("headers", "Custom headers", "pairs", "NAME=VALUE, one a line"),
    Field("text", "Text in headers", "text", "Substrings, all of which must occur"),
    Field("match", "Words", "text", "In headers and payloads; a final * is any ending"),
)
PACE: Final = (
    Field("rate", "Messages a second", "number", "No limit if empty"),
    Field("delay_ms", "Delay in ms", "number", "Until the messages may be delivered"),
    Field("limit", "Maximum number of messages", "number", "No limit if empty"),
)
WAITING: Final = (
    Field("statuses", "Statuses", "lines", "ready or in_flight, one a line; both if empty"),
    Field("at", "Deliver at", "time", "Instead of a delay, when messages are rescheduled"),
    Field("note", "Why", "text", "For the history of messages that are cancelled"),
)
COPIES: Final = (
    Field("destination", "Destination", "text", "Another topic of the mailbox, to which copies are sent"),
    Field("set_headers", "Set headers", "pairs", "NAME=VALUE, one a line"),
    Field("remove_headers", "Remove headers", "lines", "Names, one a line"),
    Field("merge_patch", "Change payloads", "json", "JSON object that is merged into payloads (RFC 7396)"),
)
CRITERIA: Final = (
    *(field.name for field in (*SELECTION, *FAILURE, *MESSAGE) if field.name != "dead_until"),
    "statuses",
)
"""Criteria; if all of them are empty, a job selects all dead letters of the mailbox, or all that waits."""
_SAME: Final = ("correlation_id", "trace_id", "namespace", "text", "match")
"""Criteria that are one text in searches and in jobs."""
_ANY_VALUE: Final = ("text", "match", "merge_patch")
"""Fields whose values may come from any header or payload."""
FIELDS: Final = (*SELECTION, *FAILURE, *MESSAGE, *PACE, *WAITING, *COPIES)
NAMES: Final = ("action", *(field.name for field in FIELDS))


def read_values(fields: Fields) -> dict[str, str]:
    """Return the text of all fields of the form."""
    return {name: text_of(fields, name) for name in NAMES}


def parse_spec(values: Mapping[str, str]) -> RedriveSpec:
    """Return the specification that the fields describe.

    Raises: InvalidRequest naming the first invalid field.
    """
    parsed: dict[str, Any] = {field.name: _parse(field, values[field.name]) for field in FIELDS}
    criteria = {name: value for name, value in parsed.items() if value is not None}
    return RedriveSpec(action=cast(Action, values["action"] or "redrive"), **criteria).validate()


ACTION_STATUSES: Final[Mapping[str, frozenset[Status]]] = {
    "redrive": frozenset({DEAD}),
    "archive": frozenset({DEAD}),
    "cancel": frozenset({READY, IN_FLIGHT}),
    "reschedule": frozenset({READY}),
}
"""Actions on the messages that a search finds, with the statuses that each action changes."""


def fields_of(action: str, filter_: EventFilter) -> dict[str, str]:
    """Return the form fields of a job on the messages that a filter selects.

    Raises: InvalidRequest for criteria that the form can't express, such as a header name with `=`, and if
        the filter excludes all that the action changes.
    """
    statuses = ACTION_STATUSES[action] & frozenset(filter_.statuses or Status)
    if not statuses:
        raise InvalidRequest(f"The search finds no messages that could be changed by the action {action}.")
    texts: dict[str, str] = {name: getattr(filter_, name) or "" for name in _SAME}
    for name in ("start_time", "end_time"):
        time = getattr(filter_, name)
        texts[name] = "" if time is None else event_filter.write_time(time)
    texts |= {name: "\n".join(getattr(filter_, name)) for name in ("topics", "principals")}
    texts["headers"] = "\n".join(f"{name}={value}" for name, value in filter_.headers.items())
    texts |= {"action": action, "message_ids": filter_.message_id or ""}
    if statuses != ACTION_STATUSES[action]:
        texts["statuses"] = "\n".join(sorted(each.name.lower() for each in statuses))
    values = dict.fromkeys(NAMES, "") | texts
    spec = parse_spec(values)
    same = event_filter.change(filter_, statuses=(), message_id=None, mailbox=None)
    ids = () if filter_.message_id is None else (filter_.message_id,)
    if event_filter.criteria(spec.filter()) != event_filter.criteria(same) or spec.message_ids != ids:
        raise InvalidRequest(
            "A job can't select by principals, headers or ids with line breaks or blanks at their ends, or "
            "by headers whose names contain =; search by other criteria."
        )
    return {name: text for name, text in values.items() if text}


def describe_spec(spec: RedriveSpec, mask: Mask = NO_MASK) -> list[tuple[str, str]]:
    """Return labels and texts of the fields of a specification that are set.

    Arguments:
        mask: headers and fields that are hidden from the reader.
    """
    facts = msgspec.structs.asdict(spec)
    for name in ("headers", "set_headers"):
        facts[name] = mask.hide_headers(facts[name])
    if spec.principals and mask.covers_header("principal"):
        facts["principals"] = (MASK,)
    for name in ("correlation_id", "trace_id", "namespace", "text", "match", "merge_patch"):
        is_hidden = mask != NO_MASK if name in _ANY_VALUE else mask.covers_header(name)
        if facts[name] is not None and is_hidden:
            facts[name] = MASK
    defaults = msgspec.structs.asdict(RedriveSpec())
    return [
        (field.label, _write(field, facts[field.name]))
        for field in FIELDS
        if facts[field.name] != defaults[field.name]
    ]


def _parse(field: Field, text: str) -> object:
    if not text.strip():
        return None
    match field.kind:
        case "number":
            return parse_number(field.label, text)
        case "time":
            time = parse_time(field.label, text)
            return None if time is None else time // MS
        case "lines":
            return split_lines(text)
        case "pairs":
            return split_pairs(field.label, text)
        case _:
            return text


def _write(field: Field, value: Any) -> str:
    match field.kind:
        case "time":
            return write_time(value * MS)
        case "lines":
            return "\n".join(value)
        case "pairs":
            return "\n".join(f"{name}={text}" for name, text in value.items())
        case _:
            return str(value)
