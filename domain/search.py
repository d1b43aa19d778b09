"""Message search: filters and results (RFC-037 `EventFilter`).

Backends translate an `EventFilter` into their own query language; `EventFilter.matches` defines the result.
"""

import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator, Sequence
from enum import StrEnum

import msgspec

from postroom.domain.arguments import MAX_PAGE, check_type
from postroom.domain.envelope.content import payload_text
from postroom.domain.envelope.headers import MailboxItem
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import Headers, Status
from postroom.domain.tokenizer import MAX_CHARS, Word, has_words, parse_words, tokenize

__all__ = [
    "NO_BODIES",
    "TEXT_HEADERS",
    "WORD_HEADERS",
    "BodyRules",
    "Cursor",
    "EventFilter",
    "FoundMessage",
    "Order",
    "TableStats",
    "body_words",
    "filter_of_mailbox",
    "parse_status",
    "searchable_text",
    "searchable_words",
    "topic_matches",
]

DEFAULT_LIMIT = 100
MAX_VALUES = 100
MAX_TEXT_CHARS = 1_000
TEXT_HEADERS = (
    "message_id",
    "topic",
    *(
        each
        for each in Headers.__struct_fields__
        if each not in ("timestamp", "message_id", "custom_headers")
    ),
)
"""The headers that substring search (`text`) covers, before the custom headers."""
IDS = ("message_id", "correlation_id", "trace_id", "span_id")
"""Headers that word search leaves out: parts of ids would fill the index without being useful."""
WORD_HEADERS = tuple(name for name in TEXT_HEADERS if name not in IDS)
"""The headers that word search (`match`) covers, before the custom headers."""
# Databases store 64-bit integers.
MAX_INTEGER = (1 << 63) - 1


class Order(StrEnum):
    """The order of results by timestamp; messages with equal timestamps are ordered by row id."""

    NEWEST_FIRST = "newest"
    OLDEST_FIRST = "oldest"


class Cursor(msgspec.Struct, frozen=True):
    """Row after which the next page begins (keyset pagination).

    Rows inserted between two pages cause no page to skip or repeat a row.

    Arguments:
        timestamp: of the row, in ms.
        id: the row's id, unique in the read model and stable across rebuilds.
    """

    timestamp: int
    id: int

    def encode(self) -> str:
        """Return the cursor as opaque text that is safe in a URL."""
        return urlsafe_b64encode(struct.pack(">qq", self.timestamp, self.id)).decode().rstrip("=")

    @classmethod
    def decode(cls, text: str) -> "Cursor":
        """Parse the output of `encode`; raise `InvalidRequest` for any other text."""
        try:
            cursor = cls(*struct.unpack(">qq", urlsafe_b64decode(text + "==")))
        except (ValueError, struct.error):
            cursor = None
        # The decoder ignores invalid characters, so only the canonical encoding is accepted.
        if cursor is None or cursor.encode() != text:
            raise InvalidRequest(f"Invalid cursor {text!r}; use next_cursor of the previous page.")
        return cursor


class FoundMessage(MailboxItem, frozen=True, kw_only=True):
    """A search result: a message's headers, its envelope, and its state in the mailbox.

    Arguments:
        status: ready, delayed, in_flight, acked, dead, expired or archived.
        position: of its `MessageSent` in the mailbox's log.
        attempts: number of deliveries so far.
    """

    mailbox: str
    position: int
    status: Status
    attempts: int
    shard: int


class BodyRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Topics whose bodies are included in word searches.

    Arguments:
        topics: exact names or globs (see `topic_matches`); when empty, no body is searched.
    """

    topics: tuple[str, ...] = ()

    def cover(self, topic: str) -> bool:
        """Tell whether the bodies of a topic are searched; only text is (see `payload_text`)."""
        return any(topic_matches(pattern, topic) for pattern in self.topics)


NO_BODIES = BodyRules()


class EventFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Criteria that a message must all meet; an empty filter matches every message.

    Implements RFC-037 `EventFilter`. Raises `InvalidRequest` when constructed with invalid values.

    Arguments:
        message_id, correlation_id, trace_id: of the message.
        namespace, mailbox: of the mailbox that has it.
        order: newest first, or oldest first.
        start_time, end_time: ms since 1970, UTC, both inclusive as in SQL's BETWEEN.
        topics: exact names or globs; one must match (see `topic_matches`).
        principals: publishers; one must match.
        statuses: of the message; one must match.
        headers: custom headers that a message must have with exactly these values.
        text: substrings, separated by blanks; each must occur in some header, ignoring case (see
            `searchable_text`).
        match: words that must all occur as whole words in headers other than ids, or in searched bodies;
            `pay*` matches every word with that prefix (see `searchable_words`).
        limit: maximum number of messages on a page, 1 to 1,000.
        offset: number of messages to skip (RFC-037); takes time in proportion, so prefer `cursor`.
        cursor: `next_cursor` of the previous page of the same filter.
        envelopes: whether results have their envelopes, which are read from the log; else these are empty.
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
    envelopes: bool = True

    def __post_init__(self) -> None:
        self._check_times()
        self._check_values()
        self._check_page()

    @property
    def parts(self) -> tuple[str, ...]:
        """The blank-separated parts of `text`, in lower case like `searchable_text`."""
        return tuple(self.text.lower().split()) if self.text else ()

    @property
    def words(self) -> tuple[Word, ...]:
        """The words of `match`."""
        return parse_words(self.match) if self.match is not None else ()

    @property
    def after(self) -> Cursor | None:
        """The decoded cursor; None for the first page."""
        return Cursor.decode(self.cursor) if self.cursor is not None else None

    def matches(self, message: FoundMessage, bodies: BodyRules = NO_BODIES) -> bool:
        """Tell whether a message matches, regardless of paging.

        Arguments:
            bodies: topics whose bodies are searched for words; none by default.
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
        if not 1 <= self.limit <= MAX_PAGE:
            raise InvalidRequest(f"The limit is {self.limit}; give 1 to {MAX_PAGE} messages a page.")
        if not 0 <= self.offset <= MAX_INTEGER:
            raise InvalidRequest(f"The offset is {self.offset}; give 0 or more messages to skip.")
        if self.cursor is not None:
            if self.offset:
                raise InvalidRequest("The filter has both a cursor and an offset; give only the cursor.")
            Cursor.decode(self.cursor)


def filter_of_mailbox(filter_: object, mailbox: str) -> EventFilter:
    """Return a filter limited to one mailbox.

    Raises: InvalidRequest if it is not a filter, or names another mailbox.
    """
    checked = check_type("The filter", filter_, EventFilter)
    if checked.mailbox not in (None, mailbox):
        raise InvalidRequest(
            f"The filter names the mailbox {str(checked.mailbox)[:80]!r}, but this one is {mailbox}; leave "
            "it out."
        )
    return msgspec.structs.replace(checked, mailbox=mailbox)


class TableStats(msgspec.Struct, frozen=True):
    """Totals of the archive (RFC-037 `TableStats`): messages, bytes on disk, and `timestamp`s in ms.

    The times are None while the archive is empty.
    """

    total_events: int
    total_size_bytes: int
    oldest_event: int | None = None
    newest_event: int | None = None


def topic_matches(pattern: str, topic: str) -> bool:
    """Return whether a topic matches an exact name or a glob such as `admin.users.*`.

    `*` matches any sequence of characters, including dots and the empty one, like `%` in RFC-037's queries
    (`LIKE 'admin.users.%'`). No other character is special; matching is case-sensitive.
    """
    # A regular expression could take exponential time for a hostile pattern with many *.
    first, *others = pattern.split("*")
    if not others:
        return pattern == topic
    *middle, last = others
    start, end = len(first), len(topic) - len(last)
    if start > end or not topic.startswith(first) or not topic.endswith(last):
        return False
    for piece in middle:
        index = topic.find(piece, start, end)
        if index < 0:
            return False
        start = index + len(piece)
    return True


def searchable_text(item: MailboxItem) -> str:
    """Return the text of substring search: header values and custom header names, one a line, in lower case.

    It does not include the payload, which may be encrypted (RFC-037).
    """
    return "\n".join(filter(None, _header_values(item, TEXT_HEADERS))).lower()


def searchable_words(item: MailboxItem, bodies: BodyRules = NO_BODIES) -> list[str]:
    """Return the words of all headers except ids, and of the body if its topic is covered."""
    words = tokenize("\n".join(filter(None, _header_values(item, WORD_HEADERS))))
    if bodies.cover(item.topic):
        words += body_words(item.envelope_blob)
    return words


def body_words(envelope_blob: bytes) -> list[str]:
    """Return the words of an envelope's payload; none when it is encrypted or not text."""
    return tokenize(payload_text(envelope_blob, MAX_CHARS) or "")


def parse_status(text: str) -> Status:
    """Return the status with a name such as `in_flight`; raise `InvalidRequest` for any other text."""
    try:
        return Status[text.upper()]
    except KeyError:
        names = ", ".join(status.name.lower() for status in Status)
        raise InvalidRequest(f"Unknown status {text!r}; expected one of {names}.") from None


def _header_values(item: MailboxItem, names: Sequence[str]) -> Iterator[str | None]:
    yield from (getattr(item, name) for name in names)
    yield from item.custom_headers.keys()
    yield from item.custom_headers.values()


def _has_parts(item: MailboxItem, parts: tuple[str, ...]) -> bool:
    if not parts:
        return True
    text = searchable_text(item)
    return all(part in text for part in parts)
