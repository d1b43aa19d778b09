"""Port: the read models that projections build from the log, for search, backlog and dead letters."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import msgspec

from postroom.domain.errors import InvalidRequest
from postroom.domain.search import EventFilter, FoundMessage, SearchPage, TableStats

DEFAULT_LIMIT = 100
MAX_LIMIT = 1_000


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


class DeadLetter(msgspec.Struct, frozen=True):
    """Describe a dead message (svc-mailbox I-4 `{reason, attempt, last_error}`).

    Arguments:
        id: its number in the read model, kept by a rebuild.
        fingerprint: the same for failures that differ only in numbers and ids.
        first_seen, last_seen: log time in µs at which it was sent, and at which it died.
        redriven, redriven_at: how often it was put back before, and when last (log time, µs).
    """

    id: int
    mailbox: str
    topic: str
    shard: int
    message_id: str
    reason: str
    attempt: int
    last_error: str | None
    fingerprint: str
    first_seen: int
    last_seen: int
    redriven: int
    redriven_at: int | None


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


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Mark the shard after which the next page of backlog begins."""

    mailbox: str
    topic: str
    shard: int

    def encode(self) -> str:
        """Return the place as opaque text that is safe in a URL."""
        return urlsafe_b64encode(msgspec.msgpack.encode(self)).decode().rstrip("=")

    @classmethod
    def decode(cls, text: str) -> "Place":
        """Return the place that `encode` wrote as `text`; raise `InvalidRequest` for any other text."""
        try:
            return msgspec.msgpack.decode(urlsafe_b64decode(text + "=" * (-len(text) % 4)), type=cls)
        except (ValueError, msgspec.MsgspecError):
            raise InvalidRequest(
                f"The cursor {text!r} is not one of ours; take next_cursor of the page before."
            ) from None


class BacklogPage(msgspec.Struct, frozen=True):
    """Hold one page of backlog, by mailbox, topic and shard; a `next_cursor` of None says it was the last."""

    items: tuple[ShardBacklog, ...]
    next_cursor: str | None = None


class DeadLetterPage(msgspec.Struct, frozen=True):
    """Hold one page of dead letters; a `next_cursor` of None says it was the last."""

    items: tuple[DeadLetter, ...]
    next_cursor: str | None = None


class MailboxLag(msgspec.Struct, frozen=True):
    """Tell how far a mailbox's read models are behind: `lag` records, from `position` to the log's `head`."""

    mailbox: str
    position: int
    head: int
    lag: int


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
    """Tell what is being served, how far behind it is, and whether a rebuild is running.

    Arguments:
        active: the version served; None before the first rebuild.
        lags: by mailbox; without an active version everything lags.
        rebuild: the version that is being built right now.
        versions: the newest ones, newest first.
    """

    active: Version | None
    lags: tuple[MailboxLag, ...]
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

    def stats(self) -> TableStats:
        """Sum the archive up (RFC-037 `GetTableStats`)."""

    def status(self) -> ProjectionStatus:
        """Tell what is served and how far behind the log it is; never raises for want of a rebuild."""

    def close(self) -> None:
        """Release what is held; closing twice is fine."""


def _check_limit(limit: int) -> None:
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidRequest(f"The limit is {limit}; give 1 to {MAX_LIMIT} rows a page.")


def views_path(store: str | Path) -> Path:
    """Return where the read models of a SQLite store are: in a file of their own beside it."""
    return Path(f"{store}-views")


def rebuild_lock_path(store: str | Path) -> Path:
    """Return the file that a rebuild of a SQLite store's read models keeps locked while it runs."""
    return Path(f"{store}-views-lock")
