"""The mailbox engine: the one writer of a mailbox, deciding in memory and appending in groups."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from postroom.application.archiving import archive_records
from postroom.application.codec import to_record
from postroom.application.envelope_cache import EnvelopeCache
from postroom.application.fold import fold_from
from postroom.application.log_writer import LogWriter
from postroom.application.lookup import Lookup
from postroom.application.ports.clock import Clock
from postroom.application.ports.event_log import EventLog, Seal, StoredSnapshot
from postroom.application.ports.log_archive import LogArchive
from postroom.application.telemetry import logger
from postroom.application.waiters import Waiters
from postroom.domain.errors import Fenced, PostroomError, Rejected, Saturated, Unavailable, WrongPosition
from postroom.domain.event import Event
from postroom.domain.mailbox.commands import Command, Receive, Send, Sweep, TakeOwnership, Truncate
from postroom.domain.mailbox.decide import decide
from postroom.domain.mailbox.events import MailboxMode
from postroom.domain.mailbox.logtime import anchor
from postroom.domain.mailbox.snapshot import take_snapshot
from postroom.domain.mailbox.state import Mailbox, evolve
from postroom.domain.message import MS, MessageAcked, MessageExpired, MessageReceived, MessageSent
from postroom.domain.policy import MailboxLimits, TopicPolicy
from postroom.domain.record import GENESIS, Record

GROUP_COMMANDS = 400
"""Commands decided into one append: enough to share a sync, few enough to decide while another is written."""
APPENDS_AHEAD = 2
"""Appends handed to the log before the first is done, so that the log never waits for the next decision."""
PENDING_COMMANDS = 50_000
SNAPSHOT_EVENTS = 100_000
CLOSING_SNAPSHOT_EVENTS = 1_000
SNAPSHOT_TRIES = 5
RECOVERY_SECONDS = 1.0
"""How long to wait before the log is folded again, when that failed and nobody asks."""
OWNERSHIP_TRIES = 5
"""How often a new owner reads the log again when the old owner's last group lands first."""


class Accepted(msgspec.Struct, frozen=True, gc=False):
    """Answer to `Send`: the message's stream id, and whether it was sent before (svc-mailbox I-2)."""

    message: bytes
    duplicate: bool


class Delivered(msgspec.Struct, frozen=True, gc=False):
    """One message of the answer to `Receive`."""

    received: MessageReceived
    sent: MessageSent
    epoch: int


Answer = Accepted | list[Delivered] | Sequence[Event] | Rejected


class _Work(NamedTuple):
    commands: Sequence[Command]
    answers: "asyncio.Future[list[Answer]]"


class _Group(NamedTuple):
    """Works decided together: their answers are given when the append of their records is durable.

    Arguments:
        memory: number of the memory they were decided on; void when that was dropped meanwhile.
    """

    works: list[_Work]
    answers: list[list[Answer]]
    records: list[Record]
    memory: int


class MailboxEngine:
    """Own a mailbox: decide commands against its state in memory, append their events in groups, then answer.

    One task takes what is pending (group commit), decides and folds it at once, and hands all events to one
    append that runs in a thread; the next group is decided meanwhile. Answers are given only when the append
    is durable. If it fails, every affected caller gets a typed error, the memory is dropped and folded from
    the log again.
    """

    def __init__(
        self,
        log: EventLog,
        clock: Clock,
        *,
        limits: MailboxLimits | None = None,
        default_policy: TopicPolicy | None = None,
        cache_bytes: int = 64 << 20,
        archive: LogArchive | None = None,
    ) -> None:
        self.log = log
        self._archive = archive
        self._clock = clock
        self._limits = limits
        self._default_policy = default_policy
        self._cache = EnvelopeCache(cache_bytes)
        self._writer = LogWriter(log)
        self._lookup = Lookup(log, self._cache, self._durable)
        self._waiters = Waiters()
        self._mailbox: Mailbox | None = None
        self._memory = 0
        self._chain = GENESIS
        self._base_at = 0
        self._base_uptime = 0
        self._epoch = 0
        self._snapshot_position = 0
        self._pending: deque[_Work] = deque()
        self._pending_commands = 0
        self._wake = asyncio.Event()
        self._finishing: deque[asyncio.Task[None]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._lost: PostroomError | None = None
        self._failure: PostroomError = Unavailable(f"Mailbox {log.mailbox} is being opened; retry shortly.")

    # -- opening and closing ---

    async def open(self, owner: str, mode: MailboxMode = "queue") -> None:
        """Fold the mailbox and take it over under the next epoch; create it with `mode` where it is new.

        Arguments:
            owner: who this is, in words an operator understands.

        Raises: WrongPosition when another owner keeps appending, BrokenLog when the log can't be folded.
        """
        for attempt in range(OWNERSHIP_TRIES):
            await self._load()
            try:
                await self._take_ownership(owner, mode)
                break
            except WrongPosition:
                if attempt == OWNERSHIP_TRIES - 1:
                    raise
        self._task = asyncio.create_task(self._run(), name=f"mailbox {self.log.mailbox}")

    async def close(self) -> None:
        """Finish what is pending, keep a snapshot if the log grew much, seal the log's end, and stop."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await self._task
        mailbox = self._mailbox
        if mailbox is not None:
            if mailbox.position - self._snapshot_position >= CLOSING_SNAPSHOT_EVENTS:
                await self._writer.try_save_snapshot(self._snapshot(mailbox))
            await self._writer.try_seal(Seal(mailbox.position, self._chain))
        self._writer.close()

    # -- for handlers ---

    @property
    def mailbox(self) -> Mailbox:
        """Return the state in memory; it may be ahead of the disk by the appends that are under way.

        Raises: Unavailable while the mailbox is being folded again.
        """
        if self._mailbox is None:
            raise self._lost or self._failure
        return self._mailbox

    def now(self) -> int:
        """Return the log time, µs."""
        now = self._base_at + self._clock.uptime() - self._base_uptime
        return max(now, self._mailbox.at) if self._mailbox is not None else now

    async def submit(self, commands: Sequence[Command]) -> list[Answer]:
        """Decide commands in their order and answer each once its events are durable.

        Returns: an answer for each command; a command that was refused is answered by its `Rejected`.
        Raises: Saturated when too many commands are pending, Unavailable when the outcome is unknown.
        """
        if self._lost is not None or self._closing:
            raise self._lost or Unavailable(f"Mailbox {self.log.mailbox} is closed; open it again.")
        if self._pending_commands + len(commands) > PENDING_COMMANDS and self._pending:
            raise Saturated(
                f"Mailbox {self.log.mailbox} has {self._pending_commands} commands pending; retry shortly.",
                100,
            )
        answers: asyncio.Future[list[Answer]] = asyncio.get_running_loop().create_future()
        self._pending.append(_Work(commands, answers))
        self._pending_commands += len(commands)
        self._wake.set()
        return await answers

    async def wait_for_messages(self, topic: str, wait_ms: int) -> None:
        """Return when a message of `topic` may be ready, or after `wait_ms`."""
        if not self._has_ready(topic):
            self._wake.set()  # so that the engine notes when the next message of the topic becomes due
            await self._waiters.wait(topic, wait_ms)

    async def enforce_retention(self) -> int:
        """Remove the settled past that is older than the history retention (RFC-037 `DeleteOldEvents`).

        Returns: how many records were removed.
        Raises: Unavailable when something failed; nothing is removed that is not archived.
        """
        cutoff = self.now() - self.mailbox.limits.history_retention_ms * MS
        return await self.remove_through(await asyncio.to_thread(self.log.position_before, cutoff))

    async def give_back(self, enough: int) -> int:
        """Give space that removed records left back to the disk; see `LogWriter.give_back`."""
        return await self._writer.give_back(enough)

    async def remove_through(self, through: int) -> int:
        """Remove the records at or before a position, as far as their messages are settled.

        Records of messages that are still unsettled stay, and all that came after them. What goes is stored
        in the archive first, where there is one; then `LogTruncated` is recorded, and a snapshot saved that
        covers both.

        Returns: how many records were removed.
        Raises: Unavailable when something failed; nothing is removed that is not archived.
        """
        mailbox = self.mailbox
        oldest = min((message.position for message in mailbox.messages.values()), default=through + 1)
        through = min(through, oldest - 1)
        if self._archive is not None:
            await archive_records(self.log, self._archive, max(through, mailbox.truncated_through))
        if through > mailbox.truncated_through:
            record = (await asyncio.to_thread(self.log.at_positions, [through]))[through]
            await self.submit([Truncate(through, record.chain)])
        through = self.mailbox.truncated_through
        first = await asyncio.to_thread(self.log.first_position)
        if first is None or first > through:
            return 0
        # After `LogTruncated`, so that the record which the snapshot stands on is not among those that go.
        await self._keep_snapshot(self.mailbox)
        removed = await self._writer.truncate(through)
        if removed:
            logger().info("mailbox.log_truncated", mailbox=self.log.mailbox, through=through, records=removed)
        return removed

    # -- the task ---

    async def _run(self) -> None:
        while not (self._closing and not self._pending):
            await self._wait_for_work()
            if self._mailbox is None and not await self._recover():
                continue
            works = self._take_pending()
            try:
                group = await self._decide(works)
                await self._room()
            except PostroomError as error:  # the log could not be read, or an append before failed
                await self._durable()
                self._drop(works, error)
                continue
            except Exception as error:  # a defect: nothing of this group was appended, so forget it all
                logger().exception("mailbox.group_failed", mailbox=self.log.mailbox)
                await self._durable()
                self._drop(works, Unavailable(f"Mailbox {self.log.mailbox} failed on a command: {error!r}."))
                continue
            if group.memory == self._memory:
                self._finish_later(group)
                self._waiters.wake(self._has_ready)
            else:  # an append failed, so what was decided on top of it is void
                self._refuse(works, self._failure)
        await self._durable()

    async def _wait_for_work(self) -> None:
        while not self._pending and not self._closing:
            timeout = self._sleep_seconds()
            if timeout is not None and timeout <= 0:
                await asyncio.sleep(0)  # however much there is to end, callers get their turn
                return
            self._wake.clear()
            try:
                async with asyncio.timeout(timeout):
                    await self._wake.wait()
            except TimeoutError:
                return

    def _sleep_seconds(self) -> float | None:
        """Return how long nothing can happen by itself; None: until somebody sends a command."""
        mailbox = self._mailbox
        if mailbox is None:
            return RECOVERY_SECONDS
        if mailbox.crowded:
            return 0
        times = [mailbox.next_alarm()]
        for name in self._waiters:
            if name in mailbox.topics:
                times += [shard.next_due() for shard in mailbox.topics[name].shards.values()]
        due = min((time for time in times if time is not None), default=None)
        return None if due is None else (due - self.now()) / 1_000_000

    def _take_pending(self) -> list[_Work]:
        works: list[_Work] = []
        size = 0
        while self._pending and size < GROUP_COMMANDS:
            work = self._pending.popleft()
            size += len(work.commands)
            works.append(work)
        self._pending_commands -= size
        return works

    async def _decide(self, works: list[_Work]) -> _Group:
        mailbox = self.mailbox
        group = _Group(works, [], [], self._memory)
        lookup = self._lookup
        lookup.begin_group()
        now = self.now()
        if mailbox.needs_sweep(now):
            self._apply(decide(Sweep(), mailbox, now), group.records)
        for work in works:
            answers: list[Answer] = []
            for command in await lookup.in_log(work.commands, mailbox):
                try:
                    if type(command) is Receive:
                        answers.append(await self._receive(command, now, group.records))
                    else:
                        answers.append(self._obey(lookup.within_group(command), now, group.records))
                except Rejected as rejection:
                    answers.append(rejection)
            group.answers.append(answers)
        return group

    def _obey(self, command: Command, now: int, records: list[Record]) -> Answer:
        events = decide(command, self.mailbox, now)
        if events:
            self._apply(events, records)
        return self._accepted(command, events, now) if type(command) is Send else events

    async def _receive(self, command: Receive, now: int, records: list[Record]) -> Answer:
        command, bodies = await self._lookup.bodies(command, self.mailbox, now, records)
        events = decide(command, self.mailbox, now)
        self._apply(events, records)
        return [Delivered(e, bodies[e.stream], self._epoch) for e in events if type(e) is MessageReceived]

    def _apply(self, events: Sequence[Event], records: list[Record]) -> None:
        mailbox, chain, epoch = self.mailbox, self._chain, self._epoch
        for event in events:
            record = to_record(event, mailbox.position + 1, epoch, chain)
            chain = record.chain
            kind = type(event)
            if kind is MessageAcked or kind is MessageExpired:
                self._lookup.note_left(mailbox.messages[event.stream])
            evolve(mailbox, event)
            records.append(record)
            if kind is MessageSent:
                self._cache.put(mailbox.position, event)  # type: ignore[arg-type]  # narrowed by `kind`
        self._chain = chain

    def _accepted(self, command: Send, events: Sequence[Event], now: int) -> Accepted:
        if events:
            if command.outside_id:
                self._lookup.note_sent(command.message)
            return Accepted(command.message, duplicate=False)
        original = None
        if command.idem_key is not None and not command.known:
            topic = self.mailbox.topic(command.topic)
            original = topic.window.recall(command.idem_key, now - topic.policy.replay_window_ms * MS)
        return Accepted(command.message if original is None else original.message, duplicate=True)

    def _has_ready(self, topic: str) -> bool:
        found = self._mailbox.topics.get(topic) if self._mailbox is not None else None
        now = self.now()
        return found is not None and any(next(shard.ready(now), None) for shard in found.shards.values())

    # -- writing ---

    def _finish_later(self, group: _Group) -> None:
        """Start the group's append now, and answer its callers when it and all before it are durable."""
        before = self._finishing[-1] if self._finishing else None
        append = self._writer.append(group.records) if group.records else None
        self._finishing.append(asyncio.create_task(self._finish(group, append, before)))
        mailbox = self.mailbox
        if mailbox.position - self._snapshot_position >= SNAPSHOT_EVENTS:
            self._writer.try_save_snapshot(self._snapshot(mailbox))

    async def _finish(
        self, group: _Group, append: asyncio.Future[None] | None, before: asyncio.Task[None] | None
    ) -> None:
        failure: PostroomError | None = None
        try:
            if append is not None:
                await append
        except PostroomError as error:
            failure = error
        if before is not None:
            await before
        self._finishing.popleft()
        if group.memory != self._memory:  # one before failed, and this one was decided on top of it
            self._refuse(group.works, self._failure)
        elif failure is not None:
            logger().error("mailbox.append_refused", mailbox=self.log.mailbox, error=str(failure))
            self._drop(group.works, failure)
        else:
            _answer(group)

    async def _room(self) -> None:
        """Wait until another append may be handed over."""
        while len(self._finishing) >= APPENDS_AHEAD:
            await asyncio.wait([self._finishing[0]])

    async def _durable(self) -> None:
        """Wait until the log holds all that the memory does."""
        while self._finishing:
            await asyncio.wait([self._finishing[0]])

    def _drop(self, works: list[_Work], error: PostroomError) -> None:
        """Drop the memory and tell callers why; a mailbox that was taken over refuses all from now on."""
        self._mailbox = None
        self._memory += 1
        self._failure = error
        self._refuse(works, error)
        if isinstance(error, Fenced | WrongPosition):
            self._lost = error
            self._closing = True
            self._refuse([self._pending.popleft() for _ in range(len(self._pending))], error)

    def _refuse(self, works: list[_Work], error: PostroomError) -> None:
        for work in works:
            if not work.answers.done():
                work.answers.set_exception(error)

    async def _recover(self) -> bool:
        """Fold the log again after a failed append; until that works, refuse what is pending."""
        await self._durable()
        if self._lost is not None:
            return False
        try:
            await self._load()
        except PostroomError as error:
            self._drop(self._take_pending(), error)
            return False
        if self.mailbox.epoch > self._epoch:
            self._drop(self._take_pending(), Fenced(self.log.mailbox, self._epoch, self.mailbox.epoch))
            return False
        logger().info("mailbox.recovered", mailbox=self.log.mailbox, position=self.mailbox.position)
        return True

    # -- loading ---

    async def _load(self) -> None:
        self._cache.clear()
        self._mailbox, self._snapshot_position = await asyncio.to_thread(
            fold_from, self.log, self._limits, self._default_policy
        )
        head = await asyncio.to_thread(self.log.head)
        self._chain = head.chain if head is not None else GENESIS

    async def _take_ownership(self, owner: str, mode: MailboxMode) -> None:
        mailbox = self.mailbox
        boot, uptime = self._clock.boot(), self._clock.uptime()
        at, continues = anchor(mailbox.clock, mailbox.at, wall=self._clock.wall(), boot=boot, uptime=uptime)
        self._base_at, self._base_uptime = at, uptime
        self._epoch = mailbox.epoch + 1
        command = TakeOwnership(self.log.mailbox, mode, owner, boot, uptime, continues)
        records: list[Record] = []
        self._apply(decide(command, mailbox, at), records)
        await self._writer.append(records)

    async def _keep_snapshot(self, mailbox: Mailbox) -> None:
        """Save a snapshot that the log will be cut by, on a record that the log really holds.

        Memory may be ahead of the log; if what it is ahead by never lands, the snapshot is worth nothing.
        """
        for _ in range(SNAPSHOT_TRIES):
            snapshot = self._snapshot(mailbox)
            await self._writer.save_snapshot(snapshot)
            stored = await asyncio.to_thread(self.log.at_positions, [snapshot.position])
            record = stored.get(snapshot.position)
            if record is not None and record.chain == snapshot.chain:
                return
        raise Unavailable(f"Mailbox {self.log.mailbox} is too busy to cut its log now; retry shortly.")

    def _snapshot(self, mailbox: Mailbox) -> StoredSnapshot:
        self._snapshot_position = mailbox.position
        return StoredSnapshot(mailbox.position, self._chain, take_snapshot(mailbox))


def _answer(group: _Group) -> None:
    for work, answers in zip(group.works, group.answers, strict=True):
        # The caller may have given up waiting; what it asked for happened all the same.
        if not work.answers.done():
            work.answers.set_result(answers)
