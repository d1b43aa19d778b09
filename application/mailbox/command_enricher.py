"""Enrichment of commands with facts from the log that deciding them requires."""

import asyncio
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from postroom.application.erasure.protection import MessageEncryption
from postroom.application.mailbox.codec import is_intact
from postroom.application.mailbox.groups import Group
from postroom.application.mailbox.log_writer import Committer
from postroom.application.mailbox.records import TAIL, find_sent
from postroom.application.mailbox.stored_snapshots import fold_message
from postroom.application.ports.event_log import EventLog
from postroom.domain.commit import EventColumns
from postroom.domain.errors import BrokenLog, Saturated, Unavailable
from postroom.domain.mailbox.commands import Ack, Command, Extend, Nack, Receive, Send
from postroom.domain.mailbox.decide import deliverable
from postroom.domain.message import Message, MessageSent
from postroom.domain.record import Record
from postroom.domain.subject import is_encrypted
from postroom.domain.subscription import AdvanceSubscription

Content = MessageSent | Send
"""A message with its content: as the log has it, or as it was sent to this owner."""

CACHE_BYTES = 64 << 20
READ_AHEAD_RATIO = 16
"""Share of the capacity, as a divisor, that is read ahead at a time."""


class EnvelopeCache:
    """Cache of messages by position, bounded by envelope bytes; the oldest are evicted first."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._size = 0
        # Of a dict, the first key is found by a search over all that were removed before it.
        self._messages: OrderedDict[int, Content] = OrderedDict()

    @property
    def read_ahead_bytes(self) -> int:
        """Return how many bytes may be read ahead at a time, so that few others are evicted."""
        return self._capacity // READ_AHEAD_RATIO

    def __contains__(self, position: int) -> bool:
        """Return whether the cache has the message of a position."""
        return position in self._messages

    def put(self, position: int, message: Content) -> None:
        """Add a message; its own size does not evict it."""
        self._messages[position] = message
        self._size += len(message.envelope)
        if self._size > self._capacity:
            self._shrink()

    def put_all(self, first: int, messages: Sequence[Content]) -> None:
        """Add messages of consecutive positions."""
        self._messages.update(enumerate(messages, first))
        self._size += sum([len(message.envelope) for message in messages])
        if self._size > self._capacity:
            self._shrink()

    def pop(self, position: int) -> Content | None:
        """Remove a message and return it, or None; redeliveries read it from the log."""
        message = self._messages.pop(position, None)
        if message is not None:
            self._size -= len(message.envelope)
        return message

    def take(self, positions: Sequence[int]) -> list[Content] | None:
        """Remove and return the messages of these positions; None, removing none, if one is missing."""
        messages = self._messages
        if not messages.keys() >= set(positions):
            return None
        taken = list(map(messages.pop, positions))
        self._size -= sum([len(each.envelope) for each in taken])
        return taken

    def drop(self, positions: Sequence[int]) -> None:
        """Remove the messages of these positions."""
        for position in positions:
            if position in self._messages:
                self.pop(position)

    def clear(self) -> None:
        """Remove all messages."""
        self._messages.clear()
        self._size = 0

    def _shrink(self) -> None:
        while self._size > self._capacity and len(self._messages) > 1:
            _, message = self._messages.popitem(last=False)
            self._size -= len(message.envelope)


SETTLING = (Ack, Nack, Extend)
"""Commands that end or extend a delivery."""

READ_AHEAD = 1_000
"""Maximum number of messages for the next receives that are cached if a receive decodes their commits anyway.

A commit has at most as many messages.
"""
LEAST_READ_AHEAD = 10
"""The same after a read whose commits had no such messages."""


class _Existing(NamedTuple):
    """An existing message: its payload's hash, empty if it can't be read any more, and its topic."""

    payload_hash: bytes
    topic: str | None


class CommandEnricher:
    """Enricher of commands with facts from the log."""

    def __init__(
        self,
        log: EventLog,
        cache: EnvelopeCache,
        committer: Committer,
        protection: MessageEncryption | None = None,
    ) -> None:
        """Initialise with the log, the cache of recent messages, the committer, and the encryption if any."""
        self._log = log
        self._protection = protection
        self.cache = cache
        self._committer = committer
        # Adapts to how many such messages the commits had: searching for more would slow each receive of
        # small commits.
        self._read_ahead = READ_AHEAD

    async def from_log(self, commands: Sequence[Command], group: Group) -> Sequence[Command]:
        """Enrich commands with the log's records of ids that are not new, and of settled messages."""
        messages = group.state.mailbox.messages
        if type(commands[0]) is AdvanceSubscription:
            return [await self._with_newest(commands[0], group)]
        settling: list[tuple[int, Ack | Nack | Extend]] = []
        sends: list[tuple[int, Send]] = []
        for index, command in enumerate(commands):
            if type(command) is Send:
                if command.has_external_id or command.message in messages:
                    sends.append((index, command))
            elif isinstance(command, SETTLING) and command.receipt.message not in messages:
                settling.append((index, command))
        enriched = list(commands)
        if settling:
            await self._committer.wait_until_durable()
            streams = {settle.receipt.message for _, settle in settling}
            stored = await asyncio.to_thread(self._log.read_streams, streams)
            for index, settle in settling:
                message = fold_message(stored.get(settle.receipt.message, ()))
                enriched[index] = msgspec.structs.replace(settle, stored_message=message)
        if sends:
            earlier = self._committer.groups  # whose messages the log may lack
            existing: dict[bytes, _Existing | Send] = {}
            existing |= await asyncio.to_thread(self._stored, _streams_of([send for _, send in sends]))
            # Answers wait for earlier appends: if one fails, no caller has been sent a duplicate answer.
            for each in earlier:
                existing |= each.sent
            for index, send in sends:
                enriched[index] = _with_existing(send, existing)
        return enriched

    async def _with_newest(self, command: AdvanceSubscription, group: Group) -> AdvanceSubscription:
        """Add the messages that were sent since the copier read the log.

        Then the subscription has all messages up to this command, and may be live from here on.
        """
        mailbox = group.state.mailbox
        subscription = mailbox.subscriptions.get(command.subscription)
        if not command.is_last or subscription is None or mailbox.position - command.through > TAIL:
            return command
        await self._committer.wait_until_durable()
        filter_ = subscription.filter
        try:
            newest = await asyncio.to_thread(find_sent, self._log, filter_, command.through)
        except BrokenLog:  # what was read before it is copied all the same
            return command
        sent, through = [*command.sent, *newest.sent], newest.through
        if through == group.state.position:  # all of the log was read; the group's own events follow
            own = group.events.sent(through + 1).items()
            sent += [(position, each) for position, each in own if filter_.covers(each)]
            through = mailbox.position
        altered = (*command.altered, *newest.altered)
        return msgspec.structs.replace(command, sent=tuple(sent), through=through, altered=altered)

    def _stored(self, streams: Sequence[bytes]) -> dict[bytes, _Existing]:
        """Return the messages that are stored; without what retention removed of them."""
        messages = dict.fromkeys(self._log.existing_streams(streams), _Existing(b"", None))
        for event in self._log.replay_first(messages):
            if type(event) is MessageSent:
                messages[event.stream] = _Existing(event.payload_hash, event.topic)
        return messages

    def put_sent(self, first: int, events: EventColumns, sends: Sequence[Send]) -> None:
        """Add sent messages to the cache: their commands, or their events if the mailbox encrypts messages.

        Arguments:
            first: position of the first event.
            sends: the commands that caused the events; empty if other commands did.
        """
        is_plain = sends and self._protection is None
        self.cache.put_all(
            first, sends if is_plain else [each for each in events if type(each) is MessageSent]
        )

    async def take(
        self, messages: Sequence[Message], commands: Sequence[Receive], group: Group, now: int
    ) -> Sequence[Content] | None:
        """Take messages from the cache, and those that it lacks from the log.

        Arguments:
            commands: the receives of one topic that would deliver the messages.

        Returns: None if the bytes of one were altered, or messages may be encrypted; see `load_payloads`.
        """
        if self._protection is not None:
            return None
        cached = self.cache.take([each.position for each in messages])
        if cached is not None:
            return cached
        by_stream = {each.stream: self.cache.pop(each.position) for each in messages}
        whole = msgspec.structs.replace(
            commands[0],
            max_messages=sum([each.max_messages for each in commands]),
            max_bytes=sum([each.max_bytes for each in commands]),
        )
        missing = [each for each in messages if by_stream[each.stream] is None]
        by_stream |= await self._load(missing, self._next(whole, group, now, by_stream), set(), group)
        contents = [content for content in by_stream.values() if content is not None]
        return contents if len(contents) == len(messages) else None

    async def load_payloads(
        self, command: Receive, group: Group, now: int
    ) -> tuple[Receive, dict[bytes, Content]]:
        """Load the messages that `command` would deliver, and mark those that can't be delivered.

        Messages from the log are verified (svc-mailbox I-12); cached ones never left memory. Those that are
        encrypted are decrypted.

        Raises: Saturated when the key store can't be used, NotFound when it is another one.
        """
        messages: dict[bytes, Content] = {}
        corrupt: set[bytes] = set()
        erased: set[bytes] = set()
        while True:
            missing: list[Message] = []
            loaded: dict[bytes, Content] = {}
            for message in deliverable(command, group.state.mailbox, now):
                stream = message.stream
                if stream not in messages and stream not in corrupt and stream not in erased:
                    sent = self.cache.pop(message.position)
                    if sent is not None:
                        loaded[stream] = sent
                    else:
                        missing.append(message)
            if not missing and not loaded:
                return command, messages
            if missing:
                taken = {*messages, *corrupt, *erased, *loaded, *(each.stream for each in missing)}
                following = self._next(command, group, now, taken)
                loaded |= await self._load(missing, following, corrupt, group)
            if self._protection is not None:
                loaded = await self._decrypt(self._protection, loaded, corrupt, erased)
            messages |= loaded
            if corrupt or erased:
                marks = {"corrupt": frozenset(corrupt), "erased": frozenset(erased)}
                command = msgspec.structs.replace(command, **marks)
            elif not missing:
                return command, messages

    def _next(self, command: Receive, group: Group, now: int, taken: Container[bytes]) -> list[Message]:
        """Return messages that the next receives would deliver and the cache lacks.

        Arguments:
            taken: streams of the messages that this receive delivers or removes.
        """
        room = self.cache.read_ahead_bytes
        later = msgspec.structs.replace(
            command, max_messages=command.max_messages + self._read_ahead, max_bytes=command.max_bytes + room
        )
        following: list[Message] = []
        for message in deliverable(later, group.state.mailbox, now) if room else ():
            if message.stream not in taken:
                room -= message.size
                if room < 0:
                    break
                if message.position not in self.cache:
                    following.append(message)
        return following

    async def _load(
        self, missing: Sequence[Message], following: Sequence[Message], corrupt: set[bytes], group: Group
    ) -> dict[bytes, Content]:
        """Return messages from the log by stream; those whose bytes were altered are added to `corrupt`.

        Arguments:
            following: messages that are added to the cache if they are in the same commits and intact.
        """
        await self._committer.wait_until_durable()
        positions = [each.position for each in missing]
        ahead = [each.position for each in following]
        intact = await asyncio.to_thread(self._intact_messages, positions, ahead)
        cached = 0
        for message in following:
            event = intact.get(message.position)
            if event is not None and event.stream == message.stream:
                self.cache.put(message.position, event)
                cached += 1
        self._read_ahead = min(READ_AHEAD, LEAST_READ_AHEAD + 2 * cached)
        intact.update(group.events.sent(group.state.position + 1))
        loaded: dict[bytes, Content] = {}
        for message in missing:
            event = intact.get(message.position)
            if event is not None and event.stream == message.stream:
                loaded[message.stream] = event
            else:
                corrupt.add(message.stream)
        return loaded

    async def _decrypt(
        self,
        protection: MessageEncryption,
        loaded: dict[bytes, Content],
        corrupt: set[bytes],
        erased: set[bytes],
    ) -> dict[bytes, Content]:
        """Return messages as they were sent; the others are added to `corrupt` or `erased`."""
        if not any(is_encrypted(each.headers) for each in loaded.values()):
            return loaded
        events = [each for each in loaded.values() if isinstance(each, MessageSent)]  # see `put_sent`
        try:
            results = await asyncio.to_thread(protection.read_messages, events)
        except Unavailable as error:  # the rest of the group continues
            raise Saturated(str(error), error.retry_after_ms) from error
        for stream, result in results.items():
            if result == "altered":
                corrupt.add(stream)
            elif result == "erased":
                erased.add(stream)
        return {stream: each for stream, each in results.items() if isinstance(each, MessageSent)}

    def _intact_messages(self, positions: Sequence[int], following: Sequence[int]) -> dict[int, MessageSent]:
        """Return the messages at these positions, without those that were altered (svc-mailbox I-12).

        The mailbox is open in spite of a commit that can't be decoded if a snapshot covers it. Then nothing
        is read ahead.
        """
        records: dict[int, Record] = {}
        try:
            records = self._log.at_positions(positions, following)
        except BrokenLog:
            for position in positions:
                with suppress(BrokenLog):
                    records |= self._log.at_positions([position])
        return {
            position: each.event
            for position, each in records.items()
            if isinstance(each.event, MessageSent) and is_intact(each)
        }


def from_group(command: Command, group: Group) -> Command:
    """Enrich a command with the effects of earlier commands of its group."""
    if type(command) is Send:
        return _with_existing(command, group.sent)
    if isinstance(command, SETTLING) and command.receipt.message in group.removed:
        return msgspec.structs.replace(command, stored_message=group.removed[command.receipt.message])
    return command


def has_sent(group: Group, commands: Sequence[Command]) -> bool:
    """Return whether a group already sent messages with the ids of these sends; see `from_group`."""
    return not group.sent.keys().isdisjoint(_streams_of(commands))


def _streams_of(commands: Sequence[Command]) -> list[bytes]:
    """Return the streams that messages with the ids of sends may have."""
    sends = [each for each in commands if type(each) is Send]
    others = [each.other_stream for each in sends if each.other_stream is not None]
    return [each.message for each in sends] + others


def _with_existing(
    send: Send, messages: Mapping[bytes, _Existing] | Mapping[bytes, Send] | Mapping[bytes, _Existing | Send]
) -> Send:
    """Return a send with the payload hash of the message that has its id, if there is one."""
    existing = messages.get(send.message)
    if existing is None and send.other_stream is not None:
        other = messages.get(send.other_stream)
        # An id of a topic says nothing about other topics, not even that they have it.
        existing = other if other is not None and other.topic == send.topic else None
    return send if existing is None else msgspec.structs.replace(send, existing_hash=existing.payload_hash)
