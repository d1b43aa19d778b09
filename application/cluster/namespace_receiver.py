"""Receives from the mailboxes of a namespace: fairly, in the order of keys, never more than was asked for."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec

from postroom.application.cluster.members_history import is_drained, record_drained
from postroom.application.cluster.namespace_members import Members, use_generation
from postroom.application.mailbox.receive import make_receive
from postroom.application.message_stream import MAX_WAIT_MS
from postroom.application.operations.mailbox import Mailbox
from postroom.application.ports.control_plane import NamespaceDirectory
from postroom.application.received_messages import DeliverySettler, ReceivedMessage
from postroom.application.threads import cancel_and_wait
from postroom.domain.arguments import check_int, check_items
from postroom.domain.errors import PostroomError, Saturated, StaleMembers, Unavailable
from postroom.domain.mailbox.commands import Receive
from postroom.domain.message import Receipt
from postroom.domain.namespace import undrained_topics
from postroom.domain.policy import DEFAULT_MAX_BYTES, DEFAULT_MAX_MESSAGES

MAX_RECEIPTS = 100_000


class ReceiptHomes:
    """The mailboxes that made the latest deliveries to this process.

    Arguments:
        settler: settles received messages.
    """

    def __init__(self, settler: DeliverySettler) -> None:
        self.settler = settler
        self._homes: dict[bytes, str] = {}

    async def receive(self, mailbox: Mailbox, command: Receive, wait_ms: int) -> list[ReceivedMessage]:
        """Receive messages from a mailbox, and remember that it delivered them."""
        received = await mailbox.receive_messages(
            command.topics,
            max_messages=command.max_messages,
            max_bytes=command.max_bytes,
            visibility_ms=command.visibility_ms,
            consumer=command.consumer,
            wait_ms=wait_ms,
        )
        for each in received:
            self._homes.pop(each.receipt.message, None)
            self._homes[each.receipt.message] = mailbox.name
        while len(self._homes) > MAX_RECEIPTS:
            del self._homes[next(iter(self._homes))]
        return [ReceivedMessage(each.delivery, self.settler) for each in received]

    def get(self, receipt: Receipt) -> str | None:
        """Return the mailbox that delivered a message, if it is known."""
        return self._homes.get(receipt.message)


MIN_POLL_MS, MAX_POLL_MS = 20, 250
"""Bounds of a wait at several mailboxes at once, which ends together: a message waits for the other
mailboxes."""
SINGLE_POLL_MS = 2_000
"""Wait at a single mailbox, after which new members are looked for."""
CHECK_SECONDS = 0.1
PROBE_SECONDS = 0.5


class _Source(NamedTuple):
    mailbox: str
    topics: tuple[str, ...]


class NamespaceReceiver:
    """Receives messages of the members of a namespace.

    A member that fails is left out until it answers again, so that the others need not wait for it. A topic
    of a newer member is left out until the messages that older members have in it, up to their cut-offs, are
    delivered.

    Arguments:
        get_members: returns the members, or raises Unavailable when they can't be found in time.
        refresh: makes the next call of `get_members` look for more.
        timeout: seconds for which a receive waits for one of the members to answer.
    """

    def __init__(
        self,
        directory: NamespaceDirectory,
        get_members: Callable[[], Awaitable[Members]],
        refresh: Callable[[], None],
        homes: ReceiptHomes,
        timeout: float,
    ) -> None:
        self._directory = directory
        self._get_members = get_members
        self._refresh = refresh
        self._timeout = timeout
        self._homes = homes
        self._turn = 0
        self._drained: dict[str, set[str]] = {}
        """Topics that need not wait for older members, by newer member."""
        self._check_at: dict[str, float] = {}
        self._failing: dict[str, PostroomError] = {}
        self._probes: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """End the probes of members that fail."""
        if self._probes:
            await cancel_and_wait(*self._probes)

    async def receive_messages(
        self,
        topic: str | Sequence[str],
        /,
        *,
        max_messages: int = DEFAULT_MAX_MESSAGES,
        max_bytes: int = DEFAULT_MAX_BYTES,
        visibility_ms: int | None = None,
        consumer: str | None = None,
        wait_ms: int = 0,
        is_stream: bool = False,
    ) -> list[ReceivedMessage]:
        """Receive messages; see `Mailbox.receive_messages`."""
        loop = asyncio.get_running_loop()
        end = loop.time() + check_int("wait_ms", wait_ms, 0, MAX_WAIT_MS) / 1_000
        topics = (topic,) if isinstance(topic, str) else tuple(check_items("topic", topic))
        command = make_receive(topics, max_messages, max_bytes, visibility_ms, consumer)
        give_up = end + self._timeout
        poll_ms = 0
        while True:
            members = await self._get_members()
            if members.refusal is not None and len(members.names) > 1:
                raise members.refusal
            sources = await self._find_sources(members, command.topics)
            remaining_ms = max(0, int((end - loop.time()) * 1_000))
            if len(members.names) == 1:
                received = await self._receive_alone(members, command, min(remaining_ms, SINGLE_POLL_MS))
            elif poll_ms and sources:
                received = await self._wait(sources, command, min(poll_ms, remaining_ms))
            else:
                received = await self._take(sources, command)
            remaining_ms = max(0, int((end - loop.time()) * 1_000))
            are_all_failing = len(self._failing) == len(members.names)
            if received or not (remaining_ms or are_all_failing):
                return received
            if are_all_failing and loop.time() >= give_up:
                raise next(iter(self._failing.values()))
            poll_ms = min(max(MIN_POLL_MS, 2 * poll_ms), MAX_POLL_MS)
            if not sources:
                await asyncio.sleep(poll_ms / 1_000)

    async def _receive_alone(self, members: Members, command: Receive, wait_ms: int) -> list[ReceivedMessage]:
        """Receive from the only member, unless it has learned of others."""
        try:
            with use_generation(members.generation):
                return await self._homes.receive(self._directory.mailbox(members.names[0]), command, wait_ms)
        except StaleMembers:
            self._refresh()
            await asyncio.sleep(MIN_POLL_MS / 1_000)
            return []

    async def _take(self, sources: Sequence[_Source], command: Receive) -> list[ReceivedMessage]:
        """Receive ready messages from one member after the other, beginning with another one each time."""
        received: list[ReceivedMessage] = []
        count, size = command.max_messages, command.max_bytes
        for source in self._rotate(sources):
            some = await self._poll(source, command, count, size, 0)
            received += some
            count -= len(some)
            size -= sum(len(each.payload) for each in some)
            if count <= 0 or size <= 0:
                break
        return received

    async def _wait(
        self, sources: Sequence[_Source], command: Receive, wait_ms: int
    ) -> list[ReceivedMessage]:
        """Wait for messages of several members at once, which together deliver no more than was asked for."""
        asked = self._rotate(sources)[: command.max_messages]
        share, rest = divmod(command.max_messages, len(asked))
        size = command.max_bytes // len(asked)
        polls = (
            self._poll(source, command, share + (number < rest), size, wait_ms)
            for number, source in enumerate(asked)
        )
        return [message for some in await asyncio.gather(*polls) for message in some]

    async def _poll(
        self, source: _Source, command: Receive, count: int, size: int, wait_ms: int
    ) -> list[ReceivedMessage]:
        some = msgspec.structs.replace(
            command, topics=source.topics, max_messages=count, max_bytes=max(1, size)
        )
        try:
            return await self._homes.receive(self._directory.poller(source.mailbox), some, wait_ms)
        except (Saturated, Unavailable) as error:
            self._avoid(source.mailbox, error)
            return []

    def _rotate(self, sources: Sequence[_Source]) -> list[_Source]:
        self._turn += 1
        start = self._turn % len(sources) if sources else 0
        return [*sources[start:], *sources[:start]]

    def _avoid(self, mailbox: str, error: PostroomError) -> None:
        """Leave a member out until it answers again."""
        if mailbox in self._failing:
            return
        self._failing[mailbox] = error
        probe = asyncio.create_task(self._probe(mailbox))
        self._probes.add(probe)
        probe.add_done_callback(self._probes.discard)

    async def _probe(self, mailbox: str) -> None:
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            try:
                await self._directory.poller(mailbox).list_topics()
            except Unavailable:
                continue
            except PostroomError:
                pass  # a refusal is an answer, and receives report it
            del self._failing[mailbox]
            return

    # -- order ---

    async def _find_sources(self, members: Members, topics: tuple[str, ...]) -> list[_Source]:
        """Return the members to ask, and for which topics."""
        sources = []
        for name in members.names:
            if name in self._failing:
                continue
            if drained := await self._drained_topics(name, members, topics):
                sources.append(_Source(name, drained))
        return sources

    async def _drained_topics(self, name: str, members: Members, topics: tuple[str, ...]) -> tuple[str, ...]:
        """Return the topics of a member that need not wait for older members."""
        if not members.cutoffs.get(name):
            return topics
        # What was drained once stays so: an older member gets no more messages from before the cut-off.
        drained = self._drained.setdefault(name, set())
        waiting = [topic for topic in topics if topic not in drained]
        now = asyncio.get_running_loop().time()
        if waiting and now >= self._check_at.get(name, 0):
            self._check_at[name] = now + CHECK_SECONDS
            answers = await asyncio.gather(*(self._is_drained(name, members, each) for each in waiting))
            drained |= {topic for topic, answer in zip(waiting, answers, strict=True) if answer}
        return tuple(topic for topic in topics if topic in drained)

    async def _is_drained(self, name: str, members: Members, topic: str) -> bool:
        mailbox = self._directory.poller(name)
        try:
            if await is_drained(mailbox, members.generation, topic):
                return True
            for older, cutoff in members.cutoffs[name].items():
                # Of a topic that the token does not cover, this raises Forbidden, and nothing is recorded.
                if undrained_topics((await self._directory.poller(older).get_backlog(topic)).shards, cutoff):
                    return False
            await record_drained(mailbox, members.generation, topic)
        except (Saturated, Unavailable):
            return False
        return True
