"""Parameters and answers of queries over HTTP, and of the calls for operators; OpenAPI is made from them."""

from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from postroom.application.messages import MessageResult
from postroom.application.operations.contract import Name
from postroom.application.operations.mailbox import Limit, Position, Text
from postroom.application.page import Page
from postroom.application.query_results import DeadLetter, DlqProfile, HistoryEntry, MessageDetail
from postroom.domain.envelope.headers import MailboxItem
from postroom.domain.mailbox.counts import TopicSummary
from postroom.domain.message import Status
from postroom.domain.search import FoundMessage


class MessagesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of a search: RFC-037's `EventFilter`. Lists are repeated parameters.

    Arguments:
        start_time, end_time: RFC 3339, or ms since 1970 UTC; both inclusive.
        topics: names or globs such as `orders.*`.
        headers: custom headers, as `headers[name]=value`.
        text: substrings of headers.
        match: words of headers and of searched bodies.
        cursor: `next_cursor` of the previous page.
    """

    start_time: int | datetime | None = None
    end_time: int | datetime | None = None
    topics: list[Name] = []
    principals: list[Name] = []
    statuses: list[Name] = []
    message_id: Name | None = None
    correlation_id: Name | None = None
    trace_id: Name | None = None
    namespace: Name | None = None
    headers: dict[str, str] = {}
    text: Annotated[str, Meta(min_length=1, max_length=1_000)] | None = None
    match: Annotated[str, Meta(min_length=1, max_length=1_000)] | None = None
    order: Annotated[str, Meta(pattern="^(newest|oldest)$")] = "newest"
    limit: Limit = 100
    offset: Position = 0
    cursor: Name | None = None


class Item(msgspec.Struct, frozen=True):
    """Headers of a message (RFC-037 `MailboxItem`), and its state."""

    message_id: str
    timestamp: int
    topic: str
    content_type: str | None
    schema_url: str | None
    schema_version: str | None
    encryption: str | None
    correlation_id: str | None
    principal: str | None
    namespace: str | None
    trace_id: str | None
    span_id: str | None
    custom_headers: dict[str, str]
    mailbox: str
    position: int
    status: str
    attempts: int
    shard: int


class FoundMessages(Page[dict[str, Any]], frozen=True):
    """Fields of a page of a search that a client needs."""

    def to_page(self) -> Page[FoundMessage]:
        """Return it as `Mailbox.search_messages` does; raises ValidationError for an invalid item."""
        items = (
            msgspec.convert(item | {"status": _status(item), "envelope_blob": b""}, FoundMessage)
            for item in self.items
        )
        return Page(tuple(items), self.next_cursor)


class Items(msgspec.Struct, frozen=True):
    """Page of a search; `next_cursor` is null on the last page."""

    items: list[Item]
    next_cursor: str | None


class ReadDetail(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a message with its history that a client needs, from servers of any version."""

    mailbox: str
    message_id: str
    topic: str
    shard: int
    status: str
    attempt: int
    redriven: int
    reason: str | None
    last_error: str | None
    intact: bool
    item: dict[str, Any]
    envelope_b64: bytes
    history: list[HistoryEntry]
    erased: bool = False
    stream_id: str = ""
    result: MessageResult | None = None
    copy_of: str | None = None
    traceback: str | None = None

    def to_detail(self) -> MessageDetail:
        """Return it as `Mailbox.get_message` does; raises ValidationError for an invalid item."""
        values = {name: getattr(self, name) for name in MessageDetail.__struct_fields__}
        item = msgspec.convert(self.item | {"envelope_blob": self.envelope_b64}, MailboxItem)
        return MessageDetail(**values | {"item": item})


class Detail(ReadDetail, frozen=True, kw_only=True):
    """A message with its headers, envelope, state and history."""

    erased: bool
    stream_id: str


class DeadLetters(msgspec.Struct, frozen=True):
    """Page of dead letters; `next_cursor` is null on the last page."""

    items: list[DeadLetter]
    next_cursor: int | None
    dlq_profile: DlqProfile


class DeadLetterGroupsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of the groups of dead letters. Lists are repeated parameters.

    Arguments:
        topics: names or globs such as `orders.*`.
        since, until: RFC 3339, or ms since 1970 UTC; dead-lettered at or after `since`, and before `until`.
        text: part of the last error; the case of ASCII letters does not matter.
        by: fields that the dead letters of a group have in common: fingerprint, topic, reason.
        order: `latest`: the group with the last dead-lettering first; `largest`: the one with the most.
        bars: number of bars of the trends; 0 for none.
        cursor: `next_cursor` of the previous page.
    """

    topics: list[Name] = []
    reason: Text | None = None
    fingerprint: Text | None = None
    since: int | datetime | None = None
    until: int | datetime | None = None
    text: Annotated[str, Meta(min_length=1, max_length=1_000)] | None = None
    by: list[Name] = []
    order: Annotated[str, Meta(pattern="^(latest|largest)$")] = "latest"
    bars: Annotated[int, Meta(ge=0, le=200)] = 24
    limit: Limit = 100
    cursor: Name | None = None


class DeadLetterSample(msgspec.Struct, frozen=True):
    """One dead letter of a group; times are RFC 3339."""

    message_id: str
    topic: str
    shard: int
    reason: str
    attempt: int
    last_error: str | None
    first_seen: str
    last_seen: str
    redriven: int


class DeadLetterGroup(msgspec.Struct, frozen=True):
    """Dead letters that are alike; `topic`, `reason` and `fingerprint` are null where they differ.

    Arguments:
        count: number of them, since the `since` of the page.
        first_seen, last_seen: when the first and the last of them was dead-lettered.
        trend: how many of them were dead-lettered in each bar.
        sample: the one that was sent last.
    """

    topic: str | None
    reason: str | None
    fingerprint: str | None
    count: int
    first_seen: str
    last_seen: str
    trend: list[int]
    sample: DeadLetterSample


class DeadLetterGroups(msgspec.Struct, frozen=True):
    """Page of groups; `next_cursor` is null on the last page.

    Arguments:
        letters, groups: number of dead letters that match, and of their groups, on all pages.
        since: if there are too many dead letters, only those since this time are counted; else null.
        trend_start: start of the first bar; null without bars.
        bar_us: the time that each bar covers, in µs.
    """

    items: list[DeadLetterGroup]
    letters: int
    groups: int
    since: str | None
    trend_start: str | None
    bar_us: int
    next_cursor: str | None


class Topics(msgspec.Struct, frozen=True):
    """Topics that hold messages or idempotency keys, have a policy, or are paused."""

    topics: list[TopicSummary]
    dlq_profile: DlqProfile


class Ready(msgspec.Struct, frozen=True):
    """Whether requests are served, and which parts are missing.

    Arguments:
        degraded: something is missing, or sends are refused.
        writes: sends are accepted; they are refused before reads are.
    """

    degraded: bool
    missing: list[str]
    writes: bool


class ReadInfo(msgspec.Struct, frozen=True):
    """Fields about the served mailbox that a client needs, from servers of any version."""

    mailbox: str


class Info(ReadInfo, frozen=True):
    """The mailbox that is served, and whether its dead letters survive a restart."""

    dlq_profile: DlqProfile


def _status(item: dict[str, Any]) -> int:
    try:
        return Status[str(item.get("status")).upper()].value
    except KeyError:
        raise ValueError("unknown status") from None
