"""Wiring of the messages that an owner sends by itself: periodic messages, and messages of outboxes."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import NamedTuple

import msgspec
from uuid_utils.compat import uuid7

from postroom.adapters.compose.store import MEMORY, Store, open_store
from postroom.adapters.system.clock import SystemClock
from postroom.application.extras import explain_missing_extra
from postroom.application.mailbox.message_factory import MessageFactory
from postroom.application.messages import NewMessage
from postroom.application.operations.mailbox import Mailbox
from postroom.application.outbox.events import OutboxCounter, RecordedMessages, explain_counts
from postroom.application.outbox.message_relay import MessageRelay, SendBatch
from postroom.application.ports.outbox import MessageOutbox
from postroom.application.schedule import Missed, Schedule, Scheduler
from postroom.application.threads import cancel_and_wait
from postroom.domain.arguments import check_text
from postroom.domain.errors import InvalidRequest, PostroomError, UnusableServer
from postroom.domain.names import DEFAULT_MAILBOX

MAX_NAME_CHARS = 200


class ScheduleSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Configuration of a schedule: `[schedules.NAME]` of the settings file.

    Arguments:
        cron: five fields (minute, hour, day, month, day of the week), or six with seconds first.
        topic, payload: topic and payload (text) of the message that each tick sends.
        timezone: IANA name of the zone in which `cron` is read.
        content_type: media type of the payload.
        attrs: custom headers.
        sticky_key: up to 255 characters; messages with the same key keep their order.
        ttl_seconds: age at which a message is dead-lettered if undelivered; 0 uses the topic's retention.
        missed: what is sent for ticks that passed while the process was suspended or the mailbox could not be
            used: the last one, all, or none.
    """

    cron: str
    topic: str
    payload: str = ""
    timezone: str = "UTC"
    content_type: str | None = None
    attrs: Mapping[str, str] = {}
    sticky_key: str | None = None
    ttl_seconds: int = 0
    missed: Missed = "last"


def make_schedules(schedules: Mapping[str, ScheduleSettings]) -> list[Schedule]:
    """Return schedules from their settings, by name.

    Raises: InvalidRequest naming the schedule that is invalid, MissingExtra when cronsim is not installed.
    """
    with explain_missing_extra():
        from postroom.application.cron import cron_ticks

    factory = MessageFactory(DEFAULT_MAILBOX, SystemClock().wall, uuid7)
    made = []
    for name, settings in schedules.items():
        check_text("The name of a schedule", name, 1, MAX_NAME_CHARS)
        message = NewMessage(
            topic=settings.topic,
            payload=settings.payload.encode(),
            content_type=settings.content_type,
            attrs=settings.attrs,
            sticky_key=settings.sticky_key,
            ttl_seconds=settings.ttl_seconds,
        )
        try:
            next_tick = cron_ticks(settings.cron, settings.timezone)
            factory.from_message(message)  # an invalid message would be refused at every tick
        except InvalidRequest as error:
            raise InvalidRequest(f"Schedule {name}: {error}") from error
        made.append(Schedule(name, next_tick, message, settings.missed))
    return made


def make_scheduler(mailbox: Mailbox, schedules: Sequence[Schedule]) -> Scheduler:
    """Return a scheduler that sends the messages of schedules to a mailbox."""

    async def now() -> datetime:
        return datetime.fromisoformat((await mailbox.get_backlog()).as_of)

    return Scheduler(mailbox.send_message, schedules, now=now)


MAX_OUTBOXES = 100
_UNREADABLE = (
    "An owner can't send its messages either. Correct the address, or grant a role what it needs: "
    "postroom migrate --messaging URL --grant-to ROLE."
)


class OutboxRelays:
    """Relays of the messages that transactions recorded for a mailbox: one for each database.

    Arguments:
        now: returns the log time of the mailbox, µs since 1970 UTC.
    """

    def __init__(self, mailbox: str, send: SendBatch, now: Callable[[], int]) -> None:
        self._mailbox = mailbox
        self._send = send
        self._now = now
        self._relays: dict[str, asyncio.Task[None]] = {}
        self._outboxes: list[MessageOutbox] = []

    def add(self, addresses: Sequence[str]) -> None:
        """Relay the messages recorded at these addresses until `close`, as soon as they can be used.

        Arguments:
            addresses: paths of SQLite files and `postgresql://...`; addresses that are relayed already are
                skipped.

        Raises: InvalidRequest for a malformed address, or when there are too many.
        """
        for address in addresses:
            self.add_store(open_store(address))

    def add_store(self, store: Store) -> None:
        """Relay the messages recorded in a store; see `add`."""
        outbox = store.message_outbox(self._mailbox)
        if outbox is None or store.identity in self._relays:
            return
        if len(self._relays) >= MAX_OUTBOXES:
            raise InvalidRequest(
                f"The owner of mailbox {self._mailbox} relays {MAX_OUTBOXES} outboxes, the most it may; "
                f"{store.where} is not relayed. Record messages in fewer databases."
            )
        self._outboxes.append(outbox)
        relay = MessageRelay(outbox, self._send, store.where, self._now)
        self._relays[store.identity] = asyncio.create_task(relay.run(), name=f"relay of {store.where}")

    async def close(self) -> None:
        """End all relays."""
        await cancel_and_wait(*self._relays.values())
        for outbox in self._outboxes:
            await outbox.close()


async def check_outboxes(addresses: Sequence[str]) -> None:
    """Raise Unavailable unless messages can be recorded at all addresses."""
    for store in map(open_store, addresses):
        if not await asyncio.to_thread(store.has_message_outbox):
            raise UnusableServer(
                f"{store.where} has no table outbox_messages; run `postroom migrate --messaging URL` once."
            )


class OutboxDatabases(NamedTuple):
    """The databases in which the caller counts recorded messages, to find messages that no owner reads.

    Arguments:
        store: the store of the mailboxes that read messages.
        relayed: databases that the settings of its owners name.
        others: further databases, which no owner reads as far as these settings say.
    """

    store: str
    relayed: Sequence[str] = ()
    others: Sequence[str] = ()

    def count_messages(self) -> list[RecordedMessages]:
        """Return the counts of recorded messages, with the reason where an owner is late to read them.

        Empty tables are left out.

        A database that can't be read is in the result, with the error as its problem.
        """
        home = open_store(self.store)
        now = SystemClock().wall()
        mailboxes: list[str] = []
        with suppress(PostroomError):  # the count of the store reports the reason
            mailboxes = [] if self.store == MEMORY else home.mailboxes()
        relayed, seen, counted = len(self.relayed) + 1, set(), []
        for number, address in enumerate((self.store, *self.relayed, *self.others)):
            where = "malformed address"
            try:
                database = open_store(address)
                where = database.where
                if database.identity in seen:
                    continue
                seen.add(database.identity)
                counts = database.count_messages()
            except PostroomError as error:
                counted.append(RecordedMessages(where, problem=str(error).rstrip("."), advice=_UNREADABLE))
                continue
            counted += explain_counts(
                database.where,
                counts,
                is_relayed=number < relayed,
                store=home.where,
                mailboxes=mailboxes,
                now=now,
            ) or [RecordedMessages(database.where)]
        return counted

    def counter(self) -> OutboxCounter:
        """Return the counter of the messages for metrics."""
        return OutboxCounter(self.count_messages, SystemClock().wall)
