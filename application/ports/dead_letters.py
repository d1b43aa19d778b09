"""Ports: dead letters in the read models, one by one and in groups; dead letters of an inbox."""

from collections.abc import Sequence
from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta

from postroom.application.page import Page, PageCursor, check_limit
from postroom.application.ports.source import SourceMessage
from postroom.domain.arguments import MAX_INT, check_any_text, check_int
from postroom.domain.errors import InvalidRequest
from postroom.domain.search import DEFAULT_LIMIT

MAX_GROUPED = 20_000
"""Number of dead letters, the latest ones, that are read to be grouped."""
MAX_TEXT_CHARS = 1_000
MAX_TIME = MAX_INT // 4
"""Bound of times, whose differences must be integers of a database."""
BARS = 24
MAX_BARS = 200
GroupField = Literal["fingerprint", "topic", "reason"]
GROUP_FIELDS: tuple[GroupField, ...] = ("fingerprint", "topic", "reason")
DEFAULT_GROUP: tuple[GroupField, ...] = ("fingerprint", "topic")
GroupOrder = Literal["latest", "largest"]
GROUP_ORDERS: tuple[GroupOrder, ...] = ("latest", "largest")


class DeadLettering(msgspec.Struct, frozen=True, kw_only=True):
    """An earlier dead-lettering of a message, and the redrive after it (log time, µs)."""

    at: int
    reason: str
    attempt: int
    last_error: str | None = None
    redriven_at: int | None = None


class DeadLetter(msgspec.Struct, frozen=True):
    """A dead letter (svc-mailbox I-4 `{reason, attempt, last_error}`).

    Arguments:
        id: number in the read model; a rebuild preserves it.
        original_subject: the subject from which the message was ingested; the topic if it was sent directly.
        fingerprint: equal for failures that differ only in numbers and ids.
        first_seen, last_seen: log time in µs at which it was sent, and last dead-lettered.
        redriven, redriven_at: how often it was redriven, and when last (log time, µs).
        lineage: earlier dead-letterings, oldest first.
    """

    id: int
    mailbox: str
    topic: str
    shard: int
    message_id: str
    original_subject: str
    reason: str
    attempt: int
    last_error: str | None
    fingerprint: str
    first_seen: int
    last_seen: int
    redriven: int
    redriven_at: int | None
    lineage: tuple[DeadLettering, ...] = ()


class DeadLetterFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of dead letters, returned latest first; a dead letter must match every field.

    Arguments:
        topics: exact names or globs; one must match.
        since, until: log time in µs; dead-lettered at or after `since`, and before `until`.
        text: part of the last error; the case of ASCII letters does not matter.
        cursor: `next_cursor` of the previous page.
    """

    mailbox: str | None = None
    topics: tuple[str, ...] = ()
    reason: str | None = None
    fingerprint: str | None = None
    since: int | None = None
    until: int | None = None
    text: str | None = None
    limit: int = DEFAULT_LIMIT
    cursor: str | None = None

    def __post_init__(self) -> None:
        check_limit(self.limit)
        for name in ("since", "until"):
            if (time := getattr(self, name)) is not None:
                check_int(name, time, -MAX_TIME, MAX_TIME)
        if self.text is not None and not 1 <= len(check_any_text("text", self.text)) <= MAX_TEXT_CHARS:
            raise InvalidRequest(f"The text has {len(self.text):,} characters; give 1 to {MAX_TEXT_CHARS:,}.")


class DeadLetterGroup(msgspec.Struct, frozen=True):
    """Dead letters that are alike; `topic`, `reason` and `fingerprint` are None where they differ.

    Arguments:
        count: number of them among those that were read.
        first_seen, last_seen: log time in µs of the first and the last of their dead-letterings.
        trend: how many of them were dead-lettered in each bar of the page.
        sample: the one that was sent last.
    """

    topic: str | None
    reason: str | None
    fingerprint: str | None
    count: int
    first_seen: int
    last_seen: int
    trend: tuple[int, ...]
    sample: DeadLetter


class DeadLetterGroupFilter(DeadLetterFilter, frozen=True, kw_only=True):
    """Filter of the dead letters that are grouped.

    Arguments:
        by: fields whose values the dead letters of a group have in common.
        order: `latest`: the group with the last dead-lettering first; `largest`: the one with the most.
        bars: number of bars of the trends; 0 for none.
        limit: maximum number of groups on a page.
    """

    by: tuple[GroupField, ...] = DEFAULT_GROUP
    order: GroupOrder = "latest"
    bars: int = BARS

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.by or len(set(self.by)) < len(self.by) or not set(self.by) <= set(GROUP_FIELDS):
            raise InvalidRequest(f"Dead letters are grouped by some of {', '.join(GROUP_FIELDS)}, each once.")
        if self.order not in GROUP_ORDERS:
            raise InvalidRequest(f"Unknown order {self.order!r}; expected {' or '.join(GROUP_ORDERS)}.")
        check_int("bars", self.bars, 0, MAX_BARS)


class DeadLetterGroupPage(Page[DeadLetterGroup], frozen=True):
    """Page of groups.

    Arguments:
        letters, groups: number of the dead letters that match and were read, and of their groups, on all
            pages.
        since: log time in µs of the first dead-lettering that was read, if there are too many to read all;
            None if all were read.
        start, width: log time in µs at which the first bar of the trends begins, and the µs of each bar.
    """

    letters: int = 0
    groups: int = 0
    since: int | None = None
    start: int = 0
    width: int = 1


class GroupCursor(PageCursor, frozen=True, array_like=True):
    """The group after which the next page begins: its sort key, and the id of its sample."""

    rank: Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)]
    sample: Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)]


class DeadLetters(Protocol):
    """Queries on the dead letters in the read models; part of `ReadModels`."""

    def dead_letters(self, filter_: DeadLetterFilter) -> Page[DeadLetter]:
        """Return a page of the dead letters."""

    def dead_letter_groups(self, filter_: DeadLetterGroupFilter) -> DeadLetterGroupPage:
        """Return a page of groups of dead letters.

        At most `MAX_GROUPED` dead letters are read, the latest within the times of the filter; if there are
        more, all counts are since the time that the page says. As messages are dead-lettered between two
        pages, a group may be on both.
        """


class DeadLetterQueue(Protocol):
    """A stream of dead letters; every adapter passes `tests/conformance/dead_letter_queue.py`.

    Raises: Unavailable when the stream can't be reached, NotFound when it does not exist.
    """

    async def read(self, subject: str, limit: int) -> Sequence[SourceMessage]:
        """Return the oldest messages at a subject, `*` and `>` allowed, without settling them."""

    async def find(self, subject: str, sequence: str) -> SourceMessage | None:
        """Return a message by its sequence in the stream, or None when `subject` has no such message."""

    async def remove(self, message: SourceMessage) -> None:
        """Remove a message permanently; removing it twice is fine."""
