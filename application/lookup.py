"""What commands need to know of messages that a mailbox does not hold in memory."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from postroom.application.codec import to_event
from postroom.application.envelope_cache import EnvelopeCache
from postroom.application.fold import fold_message
from postroom.application.ports.event_log import EventLog
from postroom.domain.integrity import is_intact
from postroom.domain.mailbox.commands import Ack, Command, Extend, Nack, Receive, Send
from postroom.domain.mailbox.decide import deliverable
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.message import Message, MessageSent
from postroom.domain.record import Record

_SETTLING = (Ack, Nack, Extend)

RECENT_GROUPS = 8
"""Groups whose outside ids are remembered: more than the engine ever has appends under way."""


class Lookup:
    """Complete commands with what the log knows, and with what their own group did before them."""

    def __init__(self, log: EventLog, cache: EnvelopeCache, durable: Callable[[], Awaitable[None]]) -> None:
        """Take the log, the cache of messages just sent, and how to wait until the log holds all of it."""
        self._log = log
        self._cache = cache
        self._durable = durable
        self._sent: set[bytes] = set()
        self._recent: deque[set[bytes]] = deque(maxlen=RECENT_GROUPS)
        self._mailbox: Mailbox | None = None
        self._left: dict[bytes, Message] = {}

    def begin_group(self) -> None:
        """Forget what the group before did, but for outside ids it sent: the log may not show them yet."""
        self._recent.append(self._sent)
        self._sent = set()
        self._left.clear()

    def note_sent(self, stream: bytes) -> None:
        """Remember that the group sent a message with an outside id."""
        self._sent.add(stream)

    def note_left(self, message: Message) -> None:
        """Remember a message that the group settled or expired."""
        self._left[message.stream] = message

    def within_group(self, command: Command) -> Command:
        """Complete a command with what its group did before it."""
        if type(command) is Send:
            if command.message in self._sent:
                return msgspec.structs.replace(command, known=True)
        elif self._left and isinstance(command, _SETTLING) and command.receipt.message in self._left:
            return msgspec.structs.replace(command, settled=self._left[command.receipt.message])
        return command

    async def in_log(self, commands: Sequence[Command], mailbox: Mailbox) -> Sequence[Command]:
        """Complete commands with what the log knows of outside ids, and of messages that are over."""
        settling: list[tuple[int, Ack | Nack | Extend]] = []
        outside: list[tuple[int, Send]] = []
        for index, command in enumerate(commands):
            if type(command) is Send:
                if command.outside_id:
                    outside.append((index, command))
            elif isinstance(command, _SETTLING) and command.receipt.message not in mailbox.messages:
                settling.append((index, command))
        if mailbox is not self._mailbox:  # what was sent before was dropped with the memory, or is in the log
            self._mailbox = mailbox
            self._recent.clear()
        if not settling and not outside:
            return commands
        found = list(commands)
        if settling:
            await self._durable()
        for index, settle in settling:
            message = fold_message(await asyncio.to_thread(self._log.history, settle.receipt.message))
            found[index] = msgspec.structs.replace(settle, settled=message)
        if outside:
            known = await asyncio.to_thread(self._log.known, [send.message for _, send in outside])
            # Answers wait for the appends before them: should one fail, nobody was told of a duplicate.
            known = known.union(*self._recent)
            for index, send in outside:
                if send.message in known:
                    found[index] = msgspec.structs.replace(send, known=True)
        return found

    async def bodies(
        self, command: Receive, mailbox: Mailbox, now: int, unwritten: Sequence[Record]
    ) -> tuple[Receive, dict[bytes, MessageSent]]:
        """Fetch what `command` would deliver, and name the messages whose stored bytes were altered.

        What is still in the cache never left memory; what comes from the log is checked (svc-mailbox I-12).

        Arguments:
            unwritten: the records of the command's own group.
        """
        bodies: dict[bytes, MessageSent] = {}
        corrupt: set[bytes] = set()
        while True:
            missing = []
            for message in deliverable(command, mailbox, now):
                if message.stream not in bodies and message.stream not in corrupt:
                    sent = self._cache.pop(message.position)
                    if sent is not None:
                        bodies[message.stream] = sent
                    else:
                        missing.append(message)
            if not missing:
                return command, bodies
            await self._durable()
            stored = await asyncio.to_thread(self._log.at_positions, [m.position for m in missing])
            stored |= {record.position: record for record in unwritten}
            for message in missing:
                record = stored.get(message.position)
                read = to_event(record) if record is not None else None
                if isinstance(read, MessageSent) and read.stream == message.stream and is_intact(read):
                    bodies[message.stream] = read
                else:
                    corrupt.add(message.stream)
            if corrupt:
                command = msgspec.structs.replace(command, corrupt=frozenset(corrupt))
