"""Port: facets, timeline and suggestions of a search in the read models."""

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Literal, Protocol

import msgspec

from postroom.domain.arguments import check_int
from postroom.domain.search import EventFilter

CAP = 10_000
"""How many messages are counted for facets and timeline."""
MAX_CAP = 100_000
FACET_VALUES = 10
"""How many values of a field are returned, the most frequent first."""
BARS = 60
"""Maximum number of bars of a timeline."""
MAX_BARS = 1_000
SUGGESTIONS = 12
MAX_SUGGESTIONS = 100


class FacetField(StrEnum):
    """A field by whose values the messages of a search are counted."""

    TOPIC = "topic"
    STATUS = "status"
    PRINCIPAL = "principal"
    CONTENT_TYPE = "content_type"
    NAMESPACE = "namespace"
    REASON = "reason"
    """Why a message is a dead letter."""


class SuggestionField(StrEnum):
    """A field whose values are suggested."""

    TOPIC = "topic"
    PRINCIPAL = "principal"
    NAMESPACE = "namespace"
    HEADER = "header"
    """Name of a custom header."""


class FacetValue(msgspec.Struct, frozen=True):
    """A value and the number of messages that have it.

    Arguments:
        is_exact: whether there are no more than `count`.
    """

    value: str
    count: int
    is_exact: bool


class Facet(msgspec.Struct, frozen=True):
    """The most frequent values of a field.

    Arguments:
        others: how many further values there are among the messages that were counted.
    """

    field: FacetField
    values: tuple[FacetValue, ...]
    others: int = 0


class Facets(msgspec.Struct, frozen=True):
    """The messages of a search, counted by the values of fields.

    Arguments:
        messages: number of matching messages that were counted.
        is_exact: whether these are all; otherwise they are the first of the search's order.
    """

    messages: int
    is_exact: bool
    facets: tuple[Facet, ...]


Basis = Literal["messages", "events", "sample"]


class Timeline(msgspec.Struct, frozen=True):
    """The messages of a search, counted by time.

    Arguments:
        basis: `messages`: all of them are counted, by `timestamp`. `events`: the sends that the log recorded,
            by log time. `sample`: the matches among messages at equal distances in the log.
        start: when the first bar begins, ms since 1970 UTC; a multiple of the width.
        width: of a bar, ms.
        counts: one per bar; empty if nothing matches.
        sample: number of messages in the sample.
    """

    basis: Basis
    start: int
    width: int
    counts: tuple[int, ...]
    sample: int = 0


class SearchStatistics(Protocol):
    """Queries about the messages of a search; each reads a bounded number of rows.

    They ignore the paging of their filter. All calls block, may come from any thread, and raise NotFound
    before the first rebuild, and Unavailable when the read models can't be read.
    """

    def facets(
        self, filter_: EventFilter, fields: Sequence[FacetField] = tuple(FacetField), *, cap: int = CAP
    ) -> Facets:
        """Count the messages that `filter_.matches` by the values of fields.

        Arguments:
            cap: maximum number of messages that are counted, 1 to 100,000. If one condition of the filter has
                as few messages, the counts are exact.
        """

    def timeline(self, filter_: EventFilter, bars: int = BARS, *, cap: int = CAP) -> Timeline:
        """Count the messages that `filter_.matches` by time.

        Arguments:
            bars: maximum number of bars, 2 to 1,000.
            cap: as of `facets`; more messages are counted from events or a sample.
        """

    def suggest(
        self,
        field: SuggestionField,
        start: str,
        limit: int = SUGGESTIONS,
        *,
        mailbox: str | None = None,
        covers: Callable[[str], bool] = lambda value: True,
    ) -> tuple[str, ...]:
        """Return values of a field that begin with a text, sorted.

        Arguments:
            limit: maximum number of values, 1 to 100.
            mailbox: only values of its messages. Of a store with several mailboxes, these are the values of
                its newest 10,000 messages, and no header names.
            covers: returns whether a value may be suggested.
        """


def check_cap(cap: object) -> int:
    """Return the cap; raise InvalidRequest for one out of bounds."""
    return check_int("cap", cap, 1, MAX_CAP)


def check_bars(bars: object) -> int:
    """Return the number of bars; raise InvalidRequest for one out of bounds."""
    return check_int("bars", bars, 2, MAX_BARS)


def check_suggestions(limit: object) -> int:
    """Return the number of suggestions; raise InvalidRequest for one out of bounds."""
    return check_int("limit", limit, 1, MAX_SUGGESTIONS)


HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
WIDTHS = (
    *(1, 5, 10, 50, 100, 500),
    *(seconds * 1_000 for seconds in (1, 5, 15, 30, 60, 300, 900, 1_800)),
    *(hours * HOUR_MS for hours in (1, 3, 6, 12)),
    *(days * DAY_MS for days in (1, 7, 28, 91, 364)),
)
"""Widths of bars in ms; wider ones are ten, hundred … times the last."""


def bar_width(first: int, last: int, bars: int) -> int:
    """Return the least width with which times from `first` to `last` fit into so many bars.

    Arguments:
        first, last: ms since 1970 UTC. bars: at least 2.
    """
    for width in WIDTHS:
        if last // width - first // width < bars:
            return width
    width = WIDTHS[-1]
    while last // width - first // width >= bars:
        width *= 10
    return width


def make_timeline(
    times: Iterable[tuple[int, int]], bars: int, basis: Basis, *, width: int = 0, sample: int = 0
) -> Timeline:
    """Return the timeline of times in ms, each with the number of its messages.

    Arguments:
        width: of a bar in ms; 0 is the least that is possible.
    """
    counted = list(times)
    if not counted:
        return Timeline(basis, 0, width or WIDTHS[0], (), sample)
    first, last = min(time for time, _ in counted), max(time for time, _ in counted)
    width = width or bar_width(first, last, bars)
    counts = [0] * (last // width - first // width + 1)
    for time, count in counted:
        counts[time // width - first // width] += count
    return Timeline(basis, first // width * width, width, tuple(counts), sample)
