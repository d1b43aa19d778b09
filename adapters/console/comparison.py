"""Differences between two messages: JSON by structure, other content and histories line by line."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from difflib import SequenceMatcher
from itertools import chain, zip_longest
from typing import Any, Final, Literal, NamedTuple

from postroom.adapters.console.message_view import MessageView, TimelineEntry
from postroom.adapters.console.values import utc
from postroom.application.masking import MASK
from postroom.application.payload_preview import PREVIEW_BYTES, PREVIEW_CHARS, hex_rows, indent_json
from postroom.domain.envelope.content import DecodedPayload, PayloadFormat

MAX_DIFFERENCES: Final = 500
"""Differences that are shown."""
MAX_JSON_BYTES: Final = 1 << 20
"""Size of JSON above which its first part is compared as text."""
MAX_LINES: Final = 1_000
MAX_ALIGNED: Final = 100
"""Maximum length of lists whose elements are aligned; elements of longer lists are compared by index."""
MAX_PAIRS, MAX_CHARS = 100_000, 4 << 20
"""Limits on pairs of elements, and on their characters, beyond which lists are no longer aligned."""
CONTEXT_LINES: Final = 3
FORMATS: Final = (PayloadFormat.JSON, PayloadFormat.PROTOBUF)
"""Formats whose text is JSON."""

Kind = Literal["same", "differs", "first", "second", "hidden"]
"""Whether both have equal values, differ, only one has a value, or it is hidden from the reader."""


class Difference(NamedTuple):
    """A value that differs between two messages.

    Arguments:
        name: name of a header, or pointer to a field; two pointers if elements of a list are at different
            places.
        first, second: text of the value in each message; empty if the message lacks it.
    """

    name: str
    kind: Kind
    first: str
    second: str


class Line(NamedTuple):
    """A line of a comparison: `-` only in the first, `+` only in the second, blank in both.

    Arguments:
        text: empty where equal lines are left out.
    """

    mark: str
    text: str


class Comparison(NamedTuple):
    """The differences of two payloads.

    Arguments:
        differences: by structure, at most `MAX_DIFFERENCES`; empty if `lines` has them.
        lines: lines that differ, with the equal lines around them; empty for equal payloads.
        omitted: number of further differences, which are left out.
        is_whole: whether both payloads were compared completely.
    """

    differences: Sequence[Difference] = ()
    lines: Sequence[Line] = ()
    omitted: int = 0
    is_whole: bool = True


# -- headers and histories ---


def compare_headers(first: MessageView, second: MessageView) -> list[Difference]:
    """Return the headers and the state of two messages, in the order of the page of a message."""
    ones, others = _headers(first), _headers(second)
    names = [*ones, *(each for each in others if each not in ones)]
    return [_difference(name, ones.get(name), others.get(name)) for name in names]


def _headers(view: MessageView) -> dict[str, str]:
    facts = {
        "message id": view.id,
        "topic": view.topic,
        "shard": str(view.shard),
        "published": f"{utc(view.published_at)} UTC",
        "status": view.status.replace("_", " "),
        "attempt": str(view.attempt),
        "redriven": str(view.redriven),
        "reason": view.reason,
        "last error": view.last_error,
        "copy of": view.copy_of,
    }
    facts |= {each.name: each.value for each in view.headers}
    facts |= {f"custom header {each.name}": each.value for each in view.custom_headers}
    return {name: value for name, value in facts.items() if value}


def _difference(name: str, first: str | None, second: str | None) -> Difference:
    kind: Kind = "same" if first == second else "differs"
    if MASK in (first, second):
        kind = "hidden"
    elif first is None:
        kind = "second"
    elif second is None:
        kind = "first"
    return Difference(name, kind, first or "", second or "")


class Step(NamedTuple):
    """An event of both messages or of one, with the time in µs since the message was sent."""

    first: TimelineEntry | None
    first_after: int
    second: TimelineEntry | None
    second_after: int


def compare_histories(first: Sequence[TimelineEntry], second: Sequence[TimelineEntry]) -> list[Step]:
    """Return the events of two messages, with events of the same type side by side."""
    starts = [_time(each[0]) if each else 0 for each in (first, second)]

    def step(one: TimelineEntry | None, other: TimelineEntry | None) -> Step:
        return Step(
            one,
            0 if one is None else _time(one) - starts[0],
            other,
            0 if other is None else _time(other) - starts[1],
        )

    if max(len(first), len(second)) > MAX_ALIGNED:
        return [step(one, other) for one, other in zip_longest(first, second)]
    steps = []
    for one, other in _align([each.event for each in first], [each.event for each in second]):
        steps.append(step(None if one is None else first[one], None if other is None else second[other]))
    return steps


def _time(entry: TimelineEntry) -> int:
    try:
        return round(datetime.fromisoformat(entry.at).timestamp() * 1_000_000)
    except ValueError:
        return 0


def _align(first: Sequence[Any], second: Sequence[Any]) -> Iterator[tuple[int | None, int | None]]:
    """Yield pairs of places in two lists: of equal elements, and of elements that replace each other."""
    for tag, begin, end, start, stop in SequenceMatcher(None, first, second).get_opcodes():
        if tag == "replace" and end - begin != stop - start:
            shared = min(end - begin, stop - start)
            yield from ((begin + index, start + index) for index in range(shared))
            begin, start = begin + shared, start + shared
        yield from zip_longest(range(begin, end), range(start, stop))


# -- payloads ---


def compare_payloads(first: DecodedPayload, second: DecodedPayload) -> Comparison:
    """Compare two payloads, up to the limits of size and number."""
    if all(each.format in FORMATS and len(each.text or "") <= MAX_JSON_BYTES for each in (first, second)):
        try:
            return _JsonComparison().compare(first.text or "", second.text or "")
        except (ValueError, RecursionError):
            pass  # too deep
    (ones, is_whole), (others, are_whole) = map(_lines, (first, second))
    comparison = compare_lines(ones, others)
    return comparison._replace(is_whole=is_whole and are_whole)


def _lines(payload: DecodedPayload) -> tuple[list[str], bool]:
    """Return the first part of a payload as lines, and whether that is all of it."""
    if payload.text is None:
        rows = [
            f"{each.offset}  {each.digits:47}  {each.text}" for each in hex_rows(payload.data[:PREVIEW_BYTES])
        ]
        return rows, len(payload.data) <= PREVIEW_BYTES
    text, is_whole = payload.text[:PREVIEW_CHARS], len(payload.text) <= PREVIEW_CHARS
    if payload.format in FORMATS:
        text, is_whole = indent_json(payload.text, PREVIEW_CHARS)
    lines = text.split("\n")
    return lines[:MAX_LINES], is_whole and len(lines) <= MAX_LINES


def compare_lines(first: Sequence[str], second: Sequence[str]) -> Comparison:
    """Compare two texts line by line."""
    matcher = SequenceMatcher(None, first, second)
    lines: list[Line] = []
    for group in matcher.get_grouped_opcodes(CONTEXT_LINES):
        if lines:
            lines.append(Line("", ""))
        for tag, begin, end, start, stop in group:
            if tag == "equal":
                lines += (Line(" ", each) for each in first[begin:end])
                continue
            lines += (Line("-", each) for each in first[begin:end])
            lines += (Line("+", each) for each in second[start:stop])
    return Comparison(lines=lines[: 2 * MAX_DIFFERENCES], omitted=max(0, len(lines) - 2 * MAX_DIFFERENCES))


class _Number(str):
    """A number as it is written: 1.0 differs from 1, and no digit is lost."""

    __slots__ = ()


class _JsonComparison:
    """The comparison of two values of JSON."""

    def __init__(self) -> None:
        self._differences: list[Difference] = []
        self._omitted = 0
        self._pairs = self._chars = 0

    def compare(self, first: str, second: str) -> Comparison:
        """Compare two values; raises ValueError and RecursionError for those that can't be parsed."""
        one, other = (
            json.loads(each, parse_int=_Number, parse_float=_Number, parse_constant=_Number)
            for each in (first, second)
        )
        self._compare("", "", one, other)
        return Comparison(self._differences, omitted=self._omitted)

    def _compare(self, at: str, to: str, one: Any, other: Any) -> None:
        if isinstance(one, dict) and isinstance(other, dict):
            for name in [*one, *(each for each in other if each not in one)]:
                self._compare_members(at, to, name, one, other)
        elif isinstance(one, list) and isinstance(other, list):
            for left, right in self._places(one, other):
                self._compare_elements(at, to, left, right, one, other)
        elif type(one) is not type(other) or one != other:
            is_hidden = MASK in (one, other) and isinstance(one, str) and isinstance(other, str)
            self._add(at, to, "hidden" if is_hidden else "differs", _write(one), _write(other))
        elif one == MASK and type(one) is str:
            self._add(at, to, "hidden", _write(one), _write(other))

    def _compare_members(
        self, at: str, to: str, name: str, one: Mapping[str, Any], other: Mapping[str, Any]
    ) -> None:
        part = "/" + name.replace("~", "~0").replace("/", "~1")
        if name not in other:
            self._add(at + part, at + part, "first", _write(one[name]), "")
        elif name not in one:
            self._add(to + part, to + part, "second", "", _write(other[name]))
        else:
            self._compare(at + part, to + part, one[name], other[name])

    def _compare_elements(
        self, at: str, to: str, left: int | None, right: int | None, one: list[Any], other: list[Any]
    ) -> None:
        if left is None and right is not None:
            self._add(f"{to}/{right}", f"{to}/{right}", "second", "", _write(other[right]))
        elif right is None and left is not None:
            self._add(f"{at}/{left}", f"{at}/{left}", "first", _write(one[left]), "")
        elif left is not None and right is not None:
            self._compare(f"{at}/{left}", f"{to}/{right}", one[left], other[right])

    def _places(self, one: list[Any], other: list[Any]) -> Iterator[tuple[int | None, int | None]]:
        """Return the places of elements that are compared with each other."""
        pairs = len(one) * len(other)
        if max(len(one), len(other)) > MAX_ALIGNED or self._pairs > MAX_PAIRS or self._chars > MAX_CHARS:
            return zip_longest(range(len(one)), range(len(other)))
        texts = [[_write(each, sort=True) for each in every] for every in (one, other)]
        self._pairs += pairs
        self._chars += sum(map(len, chain(*texts)))
        return _align(*texts)

    def _add(self, at: str, to: str, kind: Kind, first: str, second: str) -> None:
        if len(self._differences) == MAX_DIFFERENCES:
            self._omitted += 1
            return
        name = at if at == to else f"{at} → {to}"
        self._differences.append(Difference(name or "/", kind, first, second))


def _write(value: Any, *, sort: bool = False) -> str:
    """Return a value as JSON.

    Arguments:
        sort: by the names of members, so that equal values have equal texts.
    """
    if isinstance(value, _Number):
        return str(value)
    if isinstance(value, dict):
        members = sorted(value.items()) if sort else value.items()
        return "{" + ", ".join(f"{_quote(name)}: {_write(each, sort=sort)}" for name, each in members) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_write(each, sort=sort) for each in value) + "]"
    return _quote(value)


def _quote(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
