"""Wiring of the relays that send what transactions recorded for a mailbox; its owner runs them."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from postroom.adapters.compose.store import MEMORY, Store, open_store
from postroom.adapters.system.clock import SystemClock
from postroom.application.outbox.events import OutboxCounter, RecordedMessages, explain_counts
from postroom.application.outbox.message_relay import MessageRelay, SendBatch
from postroom.application.ports.outbox import MessageOutbox
from postroom.application.threads import cancel_and_wait
from postroom.domain.errors import InvalidRequest, PostroomError, UnusableServer

MAX_OUTBOXES = 100
_UNREADABLE = (
    "An owner can't send its messages either. Correct the address, or grant a role what it needs: "
    "postroom migrate --messaging URL --grant-to ROLE."
)


class OutboxRelays:
    """Relays of the messages that transactions recorded for a mailbox: one for each database."""

    def __init__(self, mailbox: str, send: SendBatch) -> None:
        self._mailbox = mailbox
        self._send = send
        self._relays: dict[str, asyncio.Task[None]] = {}
        self._outboxes: list[MessageOutbox] = []

    def add(self, addresses: Sequence[str]) -> None:
        """Relay what is recorded at these addresses until `close`, as soon as they can be used.

        Arguments:
            addresses: paths of SQLite files and `postgresql://...`; those that are relayed already are
                passed over.

        Raises: InvalidRequest for a malformed address, or when there are too many.
        """
        for address in addresses:
            self.add_store(open_store(address))

    def add_store(self, store: Store) -> None:
        """Relay what is recorded in a store; see `add`."""
        outbox = store.message_outbox(self._mailbox)
        if outbox is None or store.identity in self._relays:
            return
        if len(self._relays) >= MAX_OUTBOXES:
            raise InvalidRequest(
                f"The owner of mailbox {self._mailbox} relays {MAX_OUTBOXES} outboxes, the most it may; "
                f"{store.where} is not relayed. Record messages in fewer databases."
            )
        self._outboxes.append(outbox)
        relay = MessageRelay(outbox, self._send, store.where)
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
    """Databases in which the messages that nobody reads are counted.

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
        with suppress(PostroomError):  # the count of the store says why
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
