"""Search: what may be asked of the message archive, and what it answers (RFC-037 `EventFilter`).

Backends translate an `EventFilter` into their own query language; `EventFilter.matches` says what every
one of them has to find.
"""

import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator, Sequence
from enum import StrEnum

import msgspec

from postroom.domain.envelope.headers import MailboxItem
from postroom.domain.envelope.text import payload_text
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import Status
from postroom.domain.words import MAX_CHARS, Word, has_words, parse_words, words_of

__all__ = [
    "NO_BODIES",
    "SEARCHED_HEADERS",
    "WORDED_HEADERS",
    "BodyRules",
    "Cursor",
    "EventFilter",
    "FoundMessage",
    "Order",
    "SearchPage",
    "TableStats",
    "body_words",
    "parse_status",
    "searchable_text",
    "searchable_words",
    "topic_matches",
]

MAX_LIMIT = 1_000
DEFAULT_LIMIT = 100
MAX_VALUES = 100
MAX_TEXT_CHARS = 1_000
SEARCHED_HEADERS = (
    "message_id",
    "topic",
    "content_type",
    "schema_url",
    "schema_version",
    "encryption",
    "correlation_id",
    "principal",
    "namespace",
    "trace_id",
    "span_id",
)
"""The headers that free text is searched in before the custom ones, in their order there."""
IDS = ("message_id", "correlation_id", "trace_id", "span_id")
"""Headers without words: pieces of ids would be most of a word index, and nobody asks for a piece."""
WORDED_HEADERS = tuple(name for name in SEARCHED_HEADERS if name not in IDS)
"""The headers whose words are searched before those of the custom ones."""
# Databases hold 64-bit integers.
MAX_INTEGER = (1 << 63) - 1


class Order(StrEnum):
    """Say which end of the archive a search starts from; equal timestamps are ordered by row."""

    NEWEST_FIRST = "newest"
    OLDEST_FIRST = "oldest"


class Cursor(msgspec.Struct, frozen=True):
    """Mark the row after which the next page begins (keyset pagination).

    timestamp: the row's `timestamp` in ms. id: the row's number, unique in the read model and kept by a
    rebuild. A page that begins after a row, not at a count, neither skips nor repeats while rows arrive.
    """

    timestamp: int
    id: int

    def encode(self) -> str:
        """Return the cursor as opaque text that is safe in a URL."""
        return urlsafe_b64encode(struct.pack(">qq", self.timestamp, self.id)).decode().rstrip("=")

    @classmethod
    def decode(cls, text: str) -> "Cursor":
        """Return the cursor that `encode` wrote as `text`; raise `InvalidRequest` for any other text."""
        try:
            cursor = cls(*struct.unpack(">qq", urlsafe_b64decode(text + "==")))
        except (ValueError, struct.error):
            cursor = None
        # The decoder skips characters that don't belong, so only the spelling we wrote is taken.
        if cursor is None or cursor.encode() != text:
            raise InvalidRequest(
                f"The cursor {text!r} is not one of ours; take next_cursor of the page before."
            )
        return cursor


class FoundMessage(MailboxItem, frozen=True, kw_only=True):
    """Hold a message that a search found: its headers and envelope, and how it fares in its mailbox.

    position: of its `MessageSent` in the mailbox's log. attempts: deliveries so far.
    """

    mailbox: str
    position: int
    status: Status
    attempts: int
    shard: int


class BodyRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Say whose bodies are searched for words, beside the headers: those of topics that were opted in.

    Arguments:
        topics: exact names or globs (see `topic_matches`); without any, no body is searched.
    """

    topics: tuple[str, ...] = ()

    def cover(self, topic: str) -> bool:
        """Tell whether the bodies of a topic are searched, as far as they are text (see `payload_text`)."""
        return any(topic_matches(pattern, topic) for pattern in self.topics)


NO_BODIES = BodyRules()


class EventFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Say which messages a search is for; every field given narrows it, an empty filter finds all.

    Implements RFC-037 `EventFilter`. Raises `InvalidRequest` when made with values that make no sense.

    Arguments:
        start_time, end_time: ms since 1970, UTC, both inclusive as in SQL's BETWEEN.
        topics: exact names or globs, any of which may match (see `topic_matches`).
        principals: publishers, any of which may match.
        statuses: where the message stands, any of which may match.
        headers: custom headers that must all be there with exactly these values.
        text: parts of text, each of which must occur in some header, ignoring case (see `searchable_text`).
        match: words that must all occur, as whole words, in headers that are no ids, or in a body that was
            opted in; `pay*` stands for every word that begins so (see `searchable_words`).
        limit: most messages on a page, 1 to 1,000.
        offset: messages to skip, as RFC-037 has it; costs time in proportion, so prefer `cursor`.
        cursor: `next_cursor` of the page before, asked with the same filter.
    """

    start_time: int | None = None
    end_time: int | None = None
    topics: tuple[str, ...] = ()
    principals: tuple[str, ...] = ()
    statuses: tuple[Status, ...] = ()
    message_id: str | None = None
    correlation_id: str | None = None
    trace_id: str | None = None
    namespace: str | None = None
    mailbox: str | None = None
    headers: dict[str, str] = {}
    text: str | None = None
    match: str | None = None
    order: Order = Order.NEWEST_FIRST
    limit: int = DEFAULT_LIMIT
    offset: int = 0
    cursor: str | None = None

    def __post_init__(self) -> None:
        self._check_times()
        self._check_values()
        self._check_page()

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of `text`, which blanks separate, in lower case as `searchable_text` is."""
        return tuple(self.text.lower().split()) if self.text else ()

    @property
    def words(self) -> tuple[Word, ...]:
        """The words of `match`."""
        return parse_words(self.match) if self.match is not None else ()

    @property
    def after(self) -> Cursor | None:
        """The row after which the page begins; None for the first page."""
        return Cursor.decode(self.cursor) if self.cursor is not None else None

    def matches(self, message: FoundMessage, bodies: BodyRules = NO_BODIES) -> bool:
        """Tell whether a message is one of those the search is for, whichever page it comes on.

        Arguments:
            bodies: whose bodies are searched for words; none are unless given.
        """
        return (
            (self.start_time is None or message.timestamp >= self.start_time)
            and (self.end_time is None or message.timestamp <= self.end_time)
            and (not self.topics or any(topic_matches(topic, message.topic) for topic in self.topics))
            and (not self.principals or message.principal in self.principals)
            and (not self.statuses or message.status in self.statuses)
            and self.message_id in (None, message.message_id)
            and self.correlation_id in (None, message.correlation_id)
            and self.trace_id in (None, message.trace_id)
            and self.namespace in (None, message.namespace)
            and self.mailbox in (None, message.mailbox)
            and self.headers.items() <= message.custom_headers.items()
            and _has_parts(message, self.parts)
            and (not self.words or has_words(set(searchable_words(message, bodies)), self.words))
        )

    def _check_times(self) -> None:
        for name, time in (("start_time", self.start_time), ("end_time", self.end_time)):
            if time is not None and abs(time) > MAX_INTEGER:
                raise InvalidRequest(f"The {name} {time} is too large; give ms since 1970-01-01 UTC.")
        if self.start_time is not None and self.end_time is not None and self.start_time > self.end_time:
            raise InvalidRequest(
                f"The start_time {self.start_time} is later than the end_time {self.end_time}; swap them."
            )

    def _check_values(self) -> None:
        for name in ("topics", "principals", "statuses", "headers"):
            count = len(getattr(self, name))
            if count > MAX_VALUES:
                raise InvalidRequest(f"The filter has {count} {name}; give at most {MAX_VALUES}.")
        for name in ("topics", "principals"):
            if "" in getattr(self, name):
                raise InvalidRequest(f"One of the {name} is empty; leave it out to search all.")
        for name in ("message_id", "correlation_id", "trace_id", "namespace", "mailbox"):
            if getattr(self, name) == "":
                raise InvalidRequest(f"The {name} is empty; leave it out to search all.")
        if self.text is not None and not self.text.strip():
            raise InvalidRequest("The text to search for is blank; leave it out to search all.")
        if self.text is not None and len(self.text) > MAX_TEXT_CHARS:
            raise InvalidRequest(
                f"The text to search for has {len(self.text)} characters; give at most {MAX_TEXT_CHARS}."
            )
        if self.match is not None:
            parse_words(self.match)

    def _check_page(self) -> None:
        if not 1 <= self.limit <= MAX_LIMIT:
            raise InvalidRequest(f"The limit is {self.limit}; give 1 to {MAX_LIMIT} messages a page.")
        if not 0 <= self.offset <= MAX_INTEGER:
            raise InvalidRequest(f"The offset is {self.offset}; give 0 or more messages to skip.")
        if self.cursor is not None:
            if self.offset:
                raise InvalidRequest("The filter has both a cursor and an offset; give only the cursor.")
            Cursor.decode(self.cursor)


class SearchPage(msgspec.Struct, frozen=True):
    """Hold one page of a search; `next_cursor` asks for the next one, and None says it was the last."""

    items: tuple[FoundMessage, ...]
    next_cursor: str | None = None


class TableStats(msgspec.Struct, frozen=True):
    """Sum up the archive (RFC-037 `TableStats`): messages, bytes on disk, first and last `timestamp` in ms.

    The times are None while the archive is empty.
    """

    total_events: int
    total_size_bytes: int
    oldest_event: int | None = None
    newest_event: int | None = None


def topic_matches(pattern: str, topic: str) -> bool:
    """Tell whether a topic matches an exact name or a glob such as `admin.users.*`.

    `*` stands for any run of characters, dots and none included, as `%` does in RFC-037's own queries
    (`LIKE 'admin.users.%'`). Nothing else is special, and case counts.
    """
    # Not a regular expression: a hostile pattern of many * would take one for ever.
    first, *others = pattern.split("*")
    if not others:
        return pattern == topic
    *middle, last = others
    start, end = len(first), len(topic) - len(last)
    if start > end or not topic.startswith(first) or not topic.endswith(last):
        return False
    for piece in middle:
        found = topic.find(piece, start, end)
        if found < 0:
            return False
        start = found + len(piece)
    return True


def searchable_text(item: MailboxItem) -> str:
    """Return what free text searches: header values and names of custom headers, in lower case, a line each.

    The envelope's payload is no part of it (RFC-037: bodies may be encrypted).
    """
    return "\n".join(filter(None, _header_values(item, SEARCHED_HEADERS))).lower()


def searchable_words(item: MailboxItem, bodies: BodyRules = NO_BODIES) -> list[str]:
    """Return the words a message is found by: of its headers but for ids, then of its body if opted in."""
    words = words_of("\n".join(filter(None, _header_values(item, WORDED_HEADERS))))
    if bodies.cover(item.topic):
        words += body_words(item.envelope_blob)
    return words


def body_words(envelope_blob: bytes) -> list[str]:
    """Return the words of an envelope's payload; none where that is no text that anybody may read."""
    return words_of(payload_text(envelope_blob, MAX_CHARS) or "")


def parse_status(text: str) -> Status:
    """Return the status that users call `text`, such as `in_flight`; raise `InvalidRequest` if none is."""
    try:
        return Status[text.upper()]
    except KeyError:
        known = ", ".join(status.name.lower() for status in Status)
        raise InvalidRequest(f"There is no status {text!r}; give one of {known}.") from None


def _header_values(item: MailboxItem, names: Sequence[str]) -> Iterator[str | None]:
    yield from (getattr(item, name) for name in names)
    yield from item.custom_headers.keys()
    yield from item.custom_headers.values()


def _has_parts(item: MailboxItem, parts: tuple[str, ...]) -> bool:
    if not parts:
        return True
    text = searchable_text(item)
    return all(part in text for part in parts)
