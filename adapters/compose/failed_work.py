"""Wiring of `FailedWork`: operations of `postroom outbox`, `inbox dlq` and `ingest dlq` for the console."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from postroom.adapters.compose.store import JETSTREAM_SCHEME, MEMORY, Store, open_store, scheme_of
from postroom.application.extras import explain_missing_extra
from postroom.application.ports.failed_work import FailedItem, FailedKind, FailedWork, Failures, Retried
from postroom.application.ports.outbox import MessageOutbox
from postroom.application.text import pluralize
from postroom.domain.errors import InvalidRequest, PostroomError, Unavailable

if TYPE_CHECKING:  # their packages are extras
    from postroom.adapters.compose.ingest import IngestDeadLetterAdmin, MessageSource
    from postroom.adapters.compose.outbox import OutboxAdmin

ReadSection = Callable[[str, Any], Any]
"""Returns the settings of a section by its name and type; raises InvalidRequest for invalid ones."""
READ_SECONDS = 10.0
RETRY_SECONDS = 20.0
"""Time after which no more dead letters are redriven in one call."""
MAX_REDRIVES = 1_000
"""Dead letters that are redriven in one call."""


def configured_failures(
    sections: Mapping[str, Mapping[str, Any]], read_section: ReadSection
) -> list[FailedWork]:
    """Return the failures of the outbox and the inbox that `[messaging]` names, if it does."""
    messaging = sections.get("messaging", {})
    if not messaging.get("database"):
        return []
    context = str(messaging.get("context", ""))
    has_capture = bool(sections.get("capture"))
    work: list[FailedWork] = [OutboxFailures(context, read_section, has_capture=has_capture)]
    return [*work, InboxFailures(context, read_section)] if context else work


def recorded_failures(addresses: Sequence[str], mailbox: str) -> list[FailedWork]:
    """Return the failures of the messages that transactions recorded in databases for a mailbox."""
    stores: dict[str, Store] = {}
    for address in addresses:
        with suppress(PostroomError):  # the count of messages reports an unusable store
            store = open_store(address)
            if address != MEMORY and scheme_of(address) != JETSTREAM_SCHEME:
                stores.setdefault(store.identity, store)
    return [RecordedFailures(each, mailbox) for each in stores.values()]


def ingest_failures(file: str, mailbox: str) -> list[FailedWork]:
    """Return the failures of the namespaces in a file that are ingested into a mailbox from NATS or Redis."""
    with explain_missing_extra("namespaces"):
        from postroom.adapters.compose.ingest import has_dead_letters, load_namespaces
    return [
        IngestFailures(each.name, each.source)
        for each in load_namespaces(file)
        if each.mailbox == mailbox and has_dead_letters(each.source)
    ]


@asynccontextmanager
async def _within(seconds: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise Unavailable(f"{what} did not answer within {seconds:.0f} s; try again.") from None


def _text(at: datetime | None) -> str:
    return "" if at is None else at.isoformat()


class OutboxFailures:
    """The events of an outbox that were not published, and rows that a capture could not read.

    Arguments:
        has_capture: whether a table is captured.
    """

    kind: FailedKind = "outbox"

    def __init__(self, context: str, read_section: ReadSection, *, has_capture: bool) -> None:
        self.name = context
        self._read_section = read_section
        self._has_capture = has_capture

    @asynccontextmanager
    async def _open(self) -> "AsyncIterator[OutboxAdmin]":
        with explain_missing_extra("postgres"):
            from postroom.adapters.compose import outbox
        section = self._read_section
        capture = section("capture", outbox.CaptureSettings) if self._has_capture else None
        messaging = section("messaging", outbox.MessagingSettings)
        async with (
            _within(READ_SECONDS, "The outbox"),
            outbox.open_outbox(messaging, section("outbox", outbox.OutboxSettings), capture) as admin,
        ):
            yield admin

    async def read(self, limit: int) -> Failures:
        """Return the oldest events that were not published; see `FailedWork.read`."""
        async with self._open() as admin:
            backlog, events = await admin.get_backlog(), await admin.list_failed_events(limit + 1)
        items = [
            FailedItem(
                str(each.id),
                f"{each.event_type} v{each.event_version}",
                f"{each.aggregate_type} {each.aggregate_id}",
                each.attempts,
                _text(each.occurred_at),
                each.error or "",
                None if each.retry_at is None else _text(each.retry_at),
            )
            for each in events[:limit]
        ]
        details = await self._describe_slot() if self._has_capture else ()
        return Failures(items, len(events) <= limit, backlog.count, _text(backlog.oldest_at), details)

    async def _describe_slot(self) -> Sequence[tuple[str, str]]:
        from postroom.adapters.compose.outbox import CaptureSettings, MessagingSettings, get_slot_state

        section = self._read_section
        try:
            async with _within(READ_SECONDS, "The database of the capture"):
                slot = await get_slot_state(
                    section("messaging", MessagingSettings), section("capture", CaptureSettings)
                )
        except PostroomError as error:
            return [("Capture", str(error))]
        return [
            ("Capture", f"slot {slot.slot} is {'read' if slot.active else 'read by no process'}"),
            ("Write-ahead log since", f"{slot.lag_bytes:,} bytes"),
            ("Kept for it", f"{slot.retained_bytes:,} bytes"),
        ]

    async def retry(self, ids: Sequence[str] | None) -> Retried:
        """Make events due at once, with their attempts reset; see `FailedWork.retry`."""
        async with self._open() as admin:
            if ids is None:
                count = await admin.retry_events.all()
            else:
                count = await admin.retry_events([_event_id(each) for each in ids])
        return Retried(count, f"{pluralize(count, 'event')} will be retried.")


def _event_id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise InvalidRequest(f"The id of an event is a UUID; it was {text[:80]!r}.") from None


class InboxFailures:
    """The dead letters of an inbox, in NATS."""

    kind: FailedKind = "inbox"

    def __init__(self, context: str, read_section: ReadSection) -> None:
        self.name = context
        self._read_section = read_section

    async def read(self, limit: int) -> Failures:
        """Return the oldest dead letters; see `FailedWork.read`."""
        with explain_missing_extra("http,nats,postgres"):
            from postroom.adapters.compose import inbox
        section = self._read_section
        messaging = section("messaging", inbox.MessagingSettings)
        settings, nats = section("inbox", inbox.InboxSettings), section("nats", inbox.NatsSettings)
        async with (
            _within(READ_SECONDS, "The inbox"),
            inbox.open_inbox(messaging, settings) as box,
            inbox.open_dead_letters(messaging, nats, settings, can_redrive=False) as admin,
        ):
            backlog, letters = await box.get_backlog(), await admin.list()
        items = [
            FailedItem(
                each.message_id,
                each.original_subject,
                f"{each.stream} {each.consumer}",
                each.attempts,
                each.at,
                each.last_error or each.reason,
            )
            for each in (letter.record for letter in letters[:limit])
        ]
        return Failures(items, len(letters) <= limit, backlog.count, _text(backlog.oldest_at))

    async def retry(self, ids: Sequence[str] | None) -> Retried:
        """Deliver dead letters to their handler again, one after another; see `FailedWork.retry`."""
        with explain_missing_extra("http,nats,postgres"):
            from postroom.adapters.compose import inbox
        section, loop = self._read_section, asyncio.get_running_loop()
        end = loop.time() + RETRY_SECONDS
        outcomes: Counter[str] = Counter()
        reason = ""
        async with inbox.open_dead_letters(
            section("messaging", inbox.MessagingSettings),
            section("nats", inbox.NatsSettings),
            section("inbox", inbox.InboxSettings),
        ) as admin:
            async with _within(READ_SECONDS, "NATS"):
                letters = (await admin.list(ids=ids or ()))[:MAX_REDRIVES]
            async with aclosing(admin.redrive(letters)) as results:
                async for each in results:
                    outcomes[each.outcome] += 1
                    reason = reason or (each.reason if each.outcome == "failed" else "")
                    if loop.time() >= end:
                        break
        left = len(letters) - outcomes.total()
        parts = [
            f"{outcomes['processed']:,} processed",
            pluralize(outcomes["duplicate"], "duplicate"),
            f"{outcomes['failed']:,} failed{f' ({reason[:200]})' if reason else ''}",
            f"{outcomes['held']:,} held back by those",
            *([f"{left:,} not tried yet; retry again"] if left else []),
        ]
        return Retried(outcomes["processed"] + outcomes["duplicate"], f"{', '.join(parts)}.")


class RecordedFailures:
    """The messages that `MailboxOutbox` recorded in a database, and that their mailbox refused."""

    kind: FailedKind = "recorded"

    def __init__(self, store: Store, mailbox: str) -> None:
        self.name = store.where
        self._store = store
        self._mailbox = mailbox

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[MessageOutbox]:
        outbox = await asyncio.to_thread(self._store.message_outbox, self._mailbox)
        assert outbox is not None  # a store with transactions has an outbox
        try:
            async with _within(READ_SECONDS, self.name):
                yield outbox
        finally:
            await outbox.close()

    async def read(self, limit: int) -> Failures:
        """Return the first messages that were refused; see `FailedWork.read`."""
        async with self._open() as outbox:
            refused = await outbox.find_refused(limit + 1)
        items = [
            FailedItem(each.id, each.topic, self._mailbox, None, "", each.error) for each in refused[:limit]
        ]
        return Failures(items, len(refused) <= limit)

    async def retry(self, ids: Sequence[str] | None) -> Retried:
        """Have the owner of the mailbox send messages again; see `FailedWork.retry`."""
        async with self._open() as outbox:
            count = await outbox.retry(ids)
        return Retried(count, f"{pluralize(count, 'message')} will be sent again.")


class IngestFailures:
    """The messages of a namespace in NATS or Redis that could not be stored."""

    kind: FailedKind = "ingest"

    def __init__(self, namespace: str, source: "MessageSource") -> None:
        self.name = namespace
        self._source = source

    @asynccontextmanager
    async def _open(self) -> "AsyncIterator[IngestDeadLetterAdmin]":
        with explain_missing_extra("nats,redis"):
            from postroom.adapters.compose.ingest import open_ingest_dead_letters
        async with open_ingest_dead_letters(self._source) as admin:
            yield admin

    async def read(self, limit: int) -> Failures:
        """Return the oldest dead letters; see `FailedWork.read`."""
        async with _within(READ_SECONDS, "The broker"):
            async with self._open() as admin:
                letters = await admin.list(limit + 1)
            waiting = await self._count_waiting()
        items = [
            FailedItem(each.sequence, each.original_subject, each.consumer, None, "", each.reason)
            for each in letters[:limit]
        ]
        return Failures(items, len(letters) <= limit, waiting)

    async def _count_waiting(self) -> int | None:
        """Return how many messages of its consumer are not stored; None if that can't be read."""
        from postroom.adapters.compose.brokers import open_streams
        from postroom.adapters.compose.ingest import NatsSource, nats_settings

        source = self._source
        if not isinstance(source, NatsSource):  # Redis forgets its lag when entries are deleted
            return None
        with suppress(PostroomError):  # the account may lack the right to list streams
            async with open_streams(nats_settings(source)) as streams:
                progress = [
                    each.waiting + each.unsettled
                    for stream in await streams.list_streams()
                    if source.stream in (None, stream.name)
                    for each in stream.consumers
                    if each.durable == source.consumer_group
                ]
            return sum(progress) if progress else None
        return None

    async def retry(self, ids: Sequence[str] | None) -> Retried:
        """Publish dead letters to their original subjects again; see `FailedWork.retry`."""
        count, end = 0, asyncio.get_running_loop().time() + RETRY_SECONDS
        async with self._open() as admin:
            async with _within(READ_SECONDS, "The broker"):
                letters = await (admin.list(MAX_REDRIVES) if ids is None else admin.find(*ids))
            async for _ in admin.redrive(letters):
                count += 1
                if asyncio.get_running_loop().time() >= end:
                    break
        left = len(letters) - count
        rest = f" {left:,} were not tried yet; retry again." if left else ""
        return Retried(count, f"{pluralize(count, 'message')} published at the original subject again.{rest}")
