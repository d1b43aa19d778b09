"""Port: the read models that projections build, for search, backlog, dead letters and activity."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, Self

import msgspec

from postroom.domain.errors import InvalidRequest
from postroom.domain.search import EventFilter, FoundMessage, SearchPage, TableStats

DEFAULT_LIMIT = 100
MAX_LIMIT = 1_000
SHOWN_PARKED = 5
"""Parked records that a status names unless more are asked for."""
PERIODS = ("hour", "day")


class ShardBacklog(msgspec.Struct, frozen=True):
    """Count the unsettled messages of one shard (SDS-047 QRY-050, QRY-051).

    Arguments:
        oldest_at: log time in µs at which the oldest message that is not dead was sent; None when all are
            dead.
    """

    mailbox: str
    topic: str
    shard: int
    ready: int
    in_flight: int
    delayed: int
    dead: int
    oldest_at: int | None


class ContextBacklog(msgspec.Struct, frozen=True):
    """Count what waits in the outbox or the inbox of a bounded context (SDS-047 QRY-050, QRY-051).

    Arguments:
        box: `outbox` or `inbox`.
        count: events that are not published, or messages that are neither processed nor dead letters.
        parked: events, among them, that are not tried again by themselves; or messages that are dead letters.
        oldest_at: when the oldest that counts occurred or was received, µs UTC.
        as_of: when they were counted, µs UTC.
    """

    context: str
    box: str
    count: int
    parked: int
    oldest_at: int | None
    as_of: int


class EarlierDeath(msgspec.Struct, frozen=True, kw_only=True):
    """Tell of a death before the last: when and of what, and when the message was put back (log time, µs)."""

    at: int
    reason: str
    attempt: int
    last_error: str | None = None
    redriven_at: int | None = None


class DeadLetter(msgspec.Struct, frozen=True):
    """Describe a dead message (svc-mailbox I-4 `{reason, attempt, last_error}`).

    Arguments:
        id: its number in the read model, kept by a rebuild.
        original_subject: where it was published before it was ingested; its topic where it was sent itself.
        fingerprint: the same for failures that differ only in numbers and ids.
        first_seen, last_seen: log time in µs at which it was sent, and at which it died.
        redriven, redriven_at: how often it was put back before, and when last (log time, µs).
        lineage: its deaths before this one, the first one first.
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
    lineage: tuple[EarlierDeath, ...] = ()


class ActivityCount(msgspec.Struct, frozen=True):
    """Count the events of one type that happened to a topic in an hour or a day (RFC-037 phase 7).

    Arguments:
        starts_at: when the hour or the day (UTC) began, µs of log time.
        topic: empty for what happened to a mailbox itself.
        event: such as `MessageSent`.
        first_at, last_at: log time in µs of the first and the last of them.
    """

    starts_at: int
    topic: str
    event: str
    events: int
    first_at: int
    last_at: int


class BacklogFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Say which shards' backlog is asked for.

    Arguments:
        topics: exact names or globs, any of which may match.
        cursor: `next_cursor` of the page before.
    """

    mailbox: str | None = None
    topics: tuple[str, ...] = ()
    limit: int = DEFAULT_LIMIT
    cursor: str | None = None

    def __post_init__(self) -> None:
        _check_limit(self.limit)


class DeadLetterFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Say which dead letters are asked for, those that died last first; every field given narrows it.

    Arguments:
        topics: exact names or globs, any of which may match.
        cursor: `next_cursor` of the page before.
    """

    mailbox: str | None = None
    topics: tuple[str, ...] = ()
    reason: str | None = None
    fingerprint: str | None = None
    limit: int = DEFAULT_LIMIT
    cursor: str | None = None

    def __post_init__(self) -> None:
        _check_limit(self.limit)


class ActivityFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Say which activity is asked for, the latest hours or days first.

    Arguments:
        period: `hour` or `day`.
        topics: exact names or globs, any of which may match; what has no topic matches none.
        since, until: log time in µs; hours or days that began at or after, and before.
        cursor: `next_cursor` of the page before.
    """

    period: str = "day"
    mailbox: str | None = None
    topics: tuple[str, ...] = ()
    since: int | None = None
    until: int | None = None
    limit: int = DEFAULT_LIMIT
    cursor: str | None = None

    def __post_init__(self) -> None:
        _check_limit(self.limit)
        if self.period not in PERIODS:
            raise InvalidRequest(f"The period {self.period!r} is none; give one of {', '.join(PERIODS)}.")


class _Mark(msgspec.Struct, frozen=True, array_like=True):
    """Mark the row after which the next page begins."""

    def encode(self) -> str:
        """Return the mark as opaque text that is safe in a URL."""
        return urlsafe_b64encode(msgspec.msgpack.encode(self)).decode().rstrip("=")

    @classmethod
    def decode(cls, text: str) -> Self:
        """Return the mark that `encode` wrote as `text`; raise `InvalidRequest` for any other text."""
        try:
            return msgspec.msgpack.decode(urlsafe_b64decode(text + "=" * (-len(text) % 4)), type=cls)
        except (ValueError, msgspec.MsgspecError):
            raise InvalidRequest(
                f"The cursor {text!r} is not one of ours; take next_cursor of the page before."
            ) from None


class Place(_Mark, frozen=True, array_like=True):
    """Mark the shard after which the next page of backlog begins."""

    mailbox: str
    topic: str
    shard: int


class ActivityPlace(_Mark, frozen=True, array_like=True):
    """Mark the count after which the next page of activity begins."""

    starts_at: int
    topic: str
    event: str


class BacklogPage(msgspec.Struct, frozen=True):
    """Hold one page of backlog, by mailbox, topic and shard; a `next_cursor` of None says it was the last."""

    items: tuple[ShardBacklog, ...]
    next_cursor: str | None = None


class DeadLetterPage(msgspec.Struct, frozen=True):
    """Hold one page of dead letters; a `next_cursor` of None says it was the last."""

    items: tuple[DeadLetter, ...]
    next_cursor: str | None = None


class ActivityPage(msgspec.Struct, frozen=True):
    """Hold one page of activity, by time, topic and event; a `next_cursor` of None says it was the last."""

    items: tuple[ActivityCount, ...]
    next_cursor: str | None = None


class MailboxLag(msgspec.Struct, frozen=True):
    """Tell how far a mailbox's read models are behind: `lag` records, from `position` to the log's `head`.

    Arguments:
        seconds: how long the oldest of those records has been waiting.
    """

    mailbox: str
    position: int
    head: int
    lag: int
    seconds: float


class ParkedRecord(msgspec.Struct, frozen=True):
    """Describe a log record that could not be folded into the read models, and was left out.

    Arguments:
        type: the event's type and schema version. parked_at: wall clock, µs since 1970 UTC.
    """

    mailbox: str
    position: int
    type: str
    error: str
    parked_at: int


class Version(msgspec.Struct, frozen=True):
    """Describe one version of the read models.

    Arguments:
        status: building, active, retired (can be gone back to), failed or dropped.
        owner: who built it. started_at, finished_at: wall clock, µs since 1970 UTC.
        counts: records read and rows built. seconds: how long each phase took.
    """

    version: int
    status: str
    owner: str
    started_at: int
    finished_at: int | None
    counts: dict[str, int]
    seconds: dict[str, float]
    error: str | None


class ProjectionStatus(msgspec.Struct, frozen=True):
    """Tell what is being served, how far behind it is, and who is at work on it.

    Arguments:
        active: the version served; None before the first rebuild.
        lags: by mailbox; without an active version everything lags.
        is_following: whether a process keeps the read models up to date.
        parked: how many records could not be folded. parked_records: the first of them.
        rebuild: the version that is being built right now.
        versions: the newest ones, newest first.
    """

    active: Version | None
    lags: tuple[MailboxLag, ...]
    is_following: bool
    parked: int
    parked_records: tuple[ParkedRecord, ...]
    rebuild: Version | None
    versions: tuple[Version, ...]


class Scan(msgspec.Struct, frozen=True):
    """Hold all messages that a filter matches, as they stood at one moment, to be read once.

    Arguments:
        version: of the read models.
        positions: by mailbox, how far its log had been read.
        pages: the messages, oldest first, fetched as they are asked for.
    """

    version: int
    positions: Mapping[str, int]
    pages: Iterator[Sequence[FoundMessage]]


class ReadModels(Protocol):
    """Answer from the read models; every adapter passes `tests/conformance/read_models.py`.

    All calls block, may come from any thread, and raise NotFound, saying what to run, before the first
    rebuild, and Unavailable when the read models can't be read.
    """

    def search(self, wanted: EventFilter) -> SearchPage:
        """Return one page of the messages that `wanted.matches`, as they stood at the last rebuild.

        A cursor stays good while messages arrive and when another version becomes active: pages go on after
            the
        same row, showing what the version now active holds.
        """

    def scan(self, wanted: EventFilter) -> AbstractContextManager[Scan]:
        """Read all messages that `wanted.matches`, whatever it says of order and pages.

        What is scanned does not change while the context lasts, and little of it is in memory at a time.
        """

    def get(self, message_id: str, mailbox: str | None = None) -> FoundMessage:
        """Return one message by its id (RFC-037 `GetEvent`); raise NotFound when there is none."""

    def backlog(self, wanted: BacklogFilter) -> BacklogPage:
        """Return one page of the backlog (SDS-047 QRY-050)."""

    def dead_letters(self, wanted: DeadLetterFilter) -> DeadLetterPage:
        """Return one page of the dead letters."""

    def activity(self, wanted: ActivityFilter) -> ActivityPage:
        """Return one page of how many events happened, by hour or day, topic and type, over all mailboxes."""

    def contexts(self) -> tuple[ContextBacklog, ...]:
        """Return what waited in outbox and inbox of each context when it was last counted; never NotFound."""

    def stats(self) -> TableStats:
        """Sum the archive up (RFC-037 `GetTableStats`)."""

    def status(self, shown_parked: int = SHOWN_PARKED) -> ProjectionStatus:
        """Tell what is served and how far behind the log it is; never raises for want of a rebuild.

        Arguments:
            shown_parked: how many of the parked records to name.
        """

    def close(self) -> None:
        """Release what is held; closing twice is fine."""


def _check_limit(limit: int) -> None:
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidRequest(f"The limit is {limit}; give 1 to {MAX_LIMIT} rows a page.")


def views_path(store: str | Path) -> Path:
    """Return where the read models of a SQLite store are: in a file of their own beside it."""
    return Path(f"{store}-views")


def follow_lock_path(store: str | Path) -> Path:
    """Return the file that the one process that follows a SQLite store keeps locked."""
    return Path(f"{store}-views-follow-lock")


def rebuild_lock_path(store: str | Path) -> Path:
    """Return the file that a rebuild of a SQLite store's read models keeps locked while it runs."""
    return Path(f"{store}-views-lock")
