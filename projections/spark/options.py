"""Options of the data sources, as text."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from typing import TYPE_CHECKING

import msgspec

from postroom.application.mailbox.event_columns import RUNS
from postroom.application.queries.mailbox_past import to_us
from postroom.domain.errors import InvalidRequest
from postroom.projections.log_reader import LogExtent, LogReader, Range
from postroom.projections.spark.event_rows import EventFilter

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


STORE = ("path", "url", "archive", "driver", "allow_gaps")
"""Options that name the store and how to read it."""
RANGE = ("mailbox", "since", "until", "from_position", "to_position", "ranges")
"""Options that select the ranges of logs to read."""

Offset = dict[str, int]
"""The last position that a stream has read, by mailbox name."""

Ranges = dict[str, list[tuple[int, int]]]
"""First and last positions of the ranges to read, by mailbox name."""


@dataclass(frozen=True)
class Options:
    """The options of a data source.

    Arguments:
        source: name of the data source, for errors.
        values: values by lower-case name.
    """

    source: str
    values: Mapping[str, str]

    def check_names(self, allowed: Sequence[str]) -> None:
        """Raise InvalidRequest for an option that the data source does not have."""
        for name in sorted(self.values):
            if name not in allowed:
                close = get_close_matches(name, allowed, 1)
                hint = f" (did you mean {close[0]}?)" if close else ""
                raise InvalidRequest(
                    f"{self.source} has no option {name}{hint}; it has {', '.join(allowed)}."
                )

    def text(self, name: str) -> str | None:
        """Return an option's text, or None if it is not set; raise InvalidRequest if it is blank."""
        text = self.values.get(name)
        if text is not None and not text.strip():
            raise self._invalid(name, "a text that is not blank")
        return text

    def choice(self, name: str, *choices: str) -> str:
        """Return an option's value, the first choice by default; raise InvalidRequest for any other."""
        choice = self.values.get(name, choices[0]).lower()
        if choice not in choices:
            raise self._invalid(name, " or ".join(choices))
        return choice

    @property
    def allow_gaps(self) -> bool:
        """Return whether missing log records are ignored."""
        return self.choice("allow_gaps", "false", "true") == "true"

    def number(self, name: str) -> int | None:
        """Return a number of 1 or more, or None if it is not set; raise InvalidRequest for other text."""
        text = self.values.get(name)
        if text is None:
            return None
        if not (text.isascii() and text.isdecimal() and len(text) < 19 and int(text) >= 1):
            raise self._invalid(name, "1 or more")
        return int(text)

    def time(self, name: str) -> int | None:
        """Return a time in µs since 1970, or None if it is not set; raise InvalidRequest for other text."""
        text = self.values.get(name)
        if text is None:
            return None
        try:
            return to_us(datetime.fromisoformat(text))
        except (ValueError, InvalidRequest):
            raise self._invalid(name, "a time with its offset, such as 2026-11-23T04:00:00Z") from None

    def offset(self, name: str) -> Offset:
        """Return positions by mailbox, empty if it is not set; raise InvalidRequest for other text."""
        try:
            return msgspec.json.decode(self.values.get(name, "{}"), type=Offset)
        except (msgspec.DecodeError, UnicodeError):
            raise self._invalid(name, 'a JSON object of positions, such as {"main@local": 120}') from None

    def ranges(self, name: str) -> Ranges | None:
        """Return ranges by mailbox, or None if it is not set; raise InvalidRequest for other text."""
        text = self.values.get(name)
        try:
            return None if text is None else msgspec.json.decode(text, type=Ranges)
        except (msgspec.DecodeError, UnicodeError):
            expectation = 'a JSON object of ranges of positions, such as {"main@local": [[1, 120]]}'
            raise self._invalid(name, expectation) from None

    def moment(self, name: str) -> tuple[int | None, int | None]:
        """Return a position or a time in µs since 1970; raise InvalidRequest if it is neither."""
        if self.values.get(name, "").isdecimal():
            return self.number(name), None
        return None, self.time(name)

    def names(self, name: str, choices: Sequence[str]) -> tuple[str, ...]:
        """Return names separated by commas, empty if it is not set; raise InvalidRequest for unknown ones."""
        names = tuple(each.strip() for each in (self.text(name) or "").split(",") if each.strip())
        if not set(names) <= set(choices):
            raise self._invalid(name, f"names separated by commas, from {', '.join(choices)}")
        return names

    def event_filter(self) -> EventFilter:
        """Return the filter of the options `event` and `topic`; raise InvalidRequest for an unknown event."""
        types = sorted(event.__name__ for event in RUNS)
        return EventFilter(self.names("event", types), self.text("topic"))

    def _invalid(self, name: str, expectation: str) -> InvalidRequest:
        return InvalidRequest(
            f"The option {name} of {self.source} is {self.values[name]!r}; expected {expectation}."
        )


@dataclass(frozen=True)
class LogSelection:
    """The part of each log to read.

    Arguments:
        mailbox: a name, or a prefix followed by `*`; None for all.
        since, until: log times in µs, inclusive and exclusive.
        first, last: positions, both inclusive.
        within: ranges of positions, by mailbox; None for all.
    """

    mailbox: str | None = None
    since: int | None = None
    until: int | None = None
    first: int | None = None
    last: int | None = None
    within: Ranges | None = None

    @classmethod
    def of(cls, options: Options) -> "LogSelection":
        """Return the selection of the options `RANGE`."""
        return cls(
            options.text("mailbox"),
            options.time("since"),
            options.time("until"),
            options.number("from_position"),
            options.number("to_position"),
            options.ranges("ranges"),
        )

    def includes(self, mailbox: str) -> bool:
        """Return whether a mailbox is selected."""
        if self.mailbox is None or self.mailbox == mailbox:
            return True
        return self.mailbox.endswith("*") and mailbox.startswith(self.mailbox[:-1])

    def ranges(self, log: LogReader, extents: Iterable[LogExtent]) -> Iterator[Range]:
        """Yield the selected ranges of logs.

        Arguments:
            log: reader of the logs, to find the positions of times.
        """
        for extent in extents:
            if not self.includes(extent.name):
                continue
            first, last = max(extent.first, self.first or 0), min(extent.last, self.last or extent.last)
            if self.since is not None:
                first = max(first, position_of(log, extent, self.since))
            if self.until is not None:
                last = min(last, position_of(log, extent, self.until) - 1)
            for low, high in [(first, last)] if self.within is None else self.within.get(extent.name, []):
                if max(first, low) <= min(last, high):
                    yield Range(extent, max(first, low), min(last, high))


WHOLE_LOG = LogSelection()


def position_of(log: LogReader, extent: LogExtent, time: int) -> int:
    """Return the first position with a log time of `time` (µs) or later, or else the one after the end."""
    if extent.at < time:
        return extent.last + 1
    low, high = extent.first, extent.last
    while low < high:
        middle = (low + high) // 2
        # If retention has removed the commit meanwhile, its events were earlier than the remaining ones.
        commit = next(iter(log.commits(Range(extent, middle, middle), envelopes=False)), None)
        if commit is None or commit.at < time:
            low = middle + 1 if commit is None else commit.last + 1
        elif commit.first <= low:
            return low
        else:
            high = commit.first
    return low


METADATA = "postroom.options"
"""Key in the metadata of a table's first column."""
_OPTION = "option."
"""Prefix of options among the properties of a table."""
_PASSWORD = re.compile(r"//[^/]*:[^/]*@|^nats://[^/]*@|[?&](ssl)?password=")
_STORE = ("path", "url")


def table_options(values: Mapping[str, str]) -> dict[str, str] | None:
    """Return the options of a table while Spark creates it, or None at other times.

    Arguments:
        values: options and properties of the table, by name.
    """
    if "provider" not in values:
        return None
    options = {name.removeprefix(_OPTION): values[name] for name in values if name.startswith(_OPTION)}
    return options | {name: values[name] for name in values if name == "path"}


def store_options(source: str, schema: "StructType", options: Mapping[str, str]) -> None:
    """Store the options of a table in its schema.

    Arguments:
        source: name of the data source, for errors.

    Raises: InvalidRequest for a password, as every user of the table could read it.
    """
    for name in _STORE:
        if _PASSWORD.search(options.get(name, "")):
            raise InvalidRequest(
                f"The option {name} of {source} has a password, which a table would store in clear text; "
                "remove it and put it into a file of every node, as ~/.pgpass is, or create a temporary view."
            )
    schema.fields[0].metadata[METADATA] = msgspec.json.encode(options).decode()


def stored_options(schema: "StructType", values: Mapping[str, str]) -> dict[str, str]:
    """Return the options of a query together with its table's, unless the query names another store."""
    if any(name in values for name in _STORE):
        return dict(values)
    for field in schema.fields:
        if METADATA in (field.metadata or {}):
            stored = msgspec.json.decode(field.metadata[METADATA], type=dict[str, str])
            return {**stored, **values}
    return dict(values)
