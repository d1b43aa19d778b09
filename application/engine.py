"""The mailbox engine: the one writer of a mailbox, deciding in memory and appending in groups."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec
import structlog

from postroom.application.codec import to_event, to_record
from postroom.application.envelope_cache import EnvelopeCache
from postroom.application.fold import fold
from postroom.application.ports.clock import Clock
from postroom.application.ports.event_log import EventLog, Seal, StoredSnapshot
from postroom.domain.errors import Fenced, PostroomError, Rejected, Saturated, Unavailable, WrongPosition
from postroom.domain.event import Event
from postroom.domain.integrity import is_intact
from postroom.domain.mailbox.commands import (
    Ack,
    Command,
    Extend,
    Nack,
    Receive,
    Send,
    Sweep,
    TakeOwnership,
    Truncate,
)
from postroom.domain.mailbox.decide import decide, deliverable
from postroom.domain.mailbox.events import MailboxMode
from postroom.domain.mailbox.logtime import anchor
from postroom.domain.mailbox.snapshot import take_snapshot
from postroom.domain.mailbox.state import Mailbox, evolve
from postroom.domain.message import MS, Message, MessageAcked, MessageExpired, MessageReceived, MessageSent
from postroom.domain.message import evolve as evolve_message
from postroom.domain.policy import MailboxLimits, TopicPolicy
from postroom.domain.record import GENESIS, Record

log_event = structlog.get_logger()

BATCH_COMMANDS = 400
PENDING_COMMANDS = 50_000
SNAPSHOT_EVENTS = 100_000
CLOSING_SNAPSHOT_EVENTS = 1_000
TRUNCATE_ROWS = 5_000
OWNERSHIP_TRIES = 5
"""How often a new owner reads the log again when the old owner's last batch lands first."""


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


_SETTLING = (Ack, Nack, Extend)


class _Work(NamedTuple):
    commands: Sequence[Command]
    answers: "asyncio.Future[list[Answer]]"


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
    ) -> None:
        self.log = log
        self._clock = clock
        self._limits = limits
        self._default_policy = default_policy
        self._cache = EnvelopeCache(cache_bytes)
        self._mailbox: Mailbox | None = None
        self._chain = GENESIS
        # Messages that the group being decided settled or expired.
        self._left: dict[bytes, Message] = {}
        self._base_at = 0
        self._base_uptime = 0
        self._epoch = 0
        self._snapshot_position = 0
        self._pending: deque[_Work] = deque()
        self._pending_commands = 0
        self._wake = asyncio.Event()
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="postroom-append")
        self._writing: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._lost: PostroomError | None = None
        self._append_error: PostroomError = Unavailable(f"Mailbox {log.mailbox} could not be written.")

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
        """Finish what is pending, keep a snapshot if the log grew much, and stop."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await self._task
        if (
            self._mailbox is not None
            and self._mailbox.position - self._snapshot_position >= CLOSING_SNAPSHOT_EVENTS
        ):
            await self._in_writer(self._try_save_snapshot, self._snapshot_of(self._mailbox))
        if self._mailbox is not None:
            await self._in_writer(self._try_seal, Seal(self._mailbox.position, self._chain))
        self._writer.shutdown(wait=True)

    # -- for handlers ---

    @property
    def mailbox(self) -> Mailbox:
        """Return the state in memory; it may be ahead of the disk by the append that is under way.

        Raises: Unavailable while the mailbox is being folded again.
        """
        if self._mailbox is None:
            raise self._lost or Unavailable(f"Mailbox {self.log.mailbox} is being opened; retry shortly.")
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
        if self._has_ready(topic):
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters = self._waiting.setdefault(topic, set())
        waiters.add(waiter)
        self._wake.set()  # so that the engine notes when the next message of the topic becomes due
        try:
            await asyncio.wait([waiter], timeout=wait_ms / 1_000)
        finally:
            waiters.discard(waiter)
            if not waiters:
                self._waiting.pop(topic, None)

    async def enforce_retention(self) -> int:
        """Remove the settled past that is older than the history retention (RFC-037 `DeleteOldEvents`).

        Records of messages that are still unsettled stay, and all that came after them. A snapshot that
        covers what goes is saved first, and `LogTruncated` recorded.

        Returns: how many records were removed.
        """
        mailbox = self.mailbox
        cutoff = self.now() - mailbox.limits.history_retention_ms * MS
        through = await asyncio.to_thread(self.log.position_before, cutoff)
        oldest = min((message.position for message in mailbox.messages.values()), default=through + 1)
        through = min(through, oldest - 1)
        if through > mailbox.truncated_through:
            await self._in_writer(self.log.save_snapshot, self._snapshot_of(mailbox))
            record = (await asyncio.to_thread(self.log.at_positions, [through]))[through]
            await self.submit([Truncate(through, record.chain)])
        removed = 0
        while gone := await self._in_writer(self.log.truncate, mailbox.truncated_through, TRUNCATE_ROWS):
            removed += gone
        if removed:
            log_event.info(
                "mailbox.log_truncated", mailbox=self.log.mailbox, through=through, records=removed
            )
        return removed

    # -- the task ---

    async def _run(self) -> None:
        while not (self._closing and not self._pending):
            await self._wait_for_work()
            if self._mailbox is None and not await self._recover():
                continue
            works = self._take_batch()
            try:
                records, replies = await self._decide_batch(works)
            except PostroomError as error:  # the log could not be read, or the append before failed
                await self._settle_writing()
                self._forget(works, error)
                continue
            except Exception as error:  # a defect: nothing of this batch was appended, so forget it all
                log_event.exception("mailbox.batch_failed", mailbox=self.log.mailbox)
                await self._settle_writing()
                self._forget(
                    works, Unavailable(f"Mailbox {self.log.mailbox} failed on a command: {error!r}.")
                )
                continue
            await self._settle_writing()
            if self._mailbox is None:  # the append before failed, so what was decided on top of it is void
                self._forget(works, self._append_error)
            elif records:
                self._start_append(records, works, replies)
            else:
                _answer(works, replies)
            self._wake_receivers()
        await self._settle_writing()

    async def _wait_for_work(self) -> None:
        while not self._pending and not self._closing:
            timeout = self._sleep_seconds()
            if timeout is not None and timeout <= 0:
                return
            self._wake.clear()
            try:
                async with asyncio.timeout(timeout):
                    await self._wake.wait()
            except TimeoutError:
                return

    def _sleep_seconds(self) -> float | None:
        """Return how long nothing can happen by itself; None for as long as nobody sends a command."""
        mailbox = self._mailbox
        if mailbox is None:
            return None
        now = self.now()
        if mailbox.crowded:
            return 0
        times = [mailbox.next_alarm()]
        for name in self._waiting:
            if name in mailbox.topics:
                times += [shard.next_due() for shard in mailbox.topics[name].shards.values()]
        due = min((time for time in times if time is not None), default=None)
        return None if due is None else (due - now) / 1_000_000

    def _take_batch(self) -> list[_Work]:
        works: list[_Work] = []
        size = 0
        while self._pending and size < BATCH_COMMANDS:
            work = self._pending.popleft()
            size += len(work.commands)
            works.append(work)
        self._pending_commands -= size
        return works

    async def _decide_batch(self, works: list[_Work]) -> tuple[list[Record], list[list[Answer]]]:
        mailbox = self.mailbox
        records: list[Record] = []
        now = self.now()
        self._left.clear()
        if mailbox.needs_sweep(now):
            self._apply(decide(Sweep(), mailbox, now), records)
        replies: list[list[Answer]] = []
        new_ids: set[bytes] = set()
        for work in works:
            commands = await self._look_up(work.commands)
            answers: list[Answer] = []
            for command in commands:
                if new_ids or self._left:
                    command = self._informed(command, new_ids)
                try:
                    if type(command) is Receive:
                        answers.append(await self._receive(command, now, records))
                        continue
                    events = decide(command, mailbox, now)
                except Rejected as rejection:
                    answers.append(rejection)
                    continue
                if events:
                    self._apply(events, records)
                    if type(command) is Send and command.outside_id:
                        new_ids.add(command.message)
                answers.append(self._accepted(command, events, now) if type(command) is Send else events)
            replies.append(answers)
        return records, replies

    async def _receive(self, command: Receive, now: int, records: list[Record]) -> list[Delivered]:
        command, bodies = await self._verified(command, now, records)
        events = decide(command, self.mailbox, now)
        self._apply(events, records)
        return [Delivered(e, bodies[e.stream], self._epoch) for e in events if isinstance(e, MessageReceived)]

    def _apply(self, events: Sequence[Event], records: list[Record]) -> None:
        mailbox, chain, epoch = self.mailbox, self._chain, self._epoch
        for event in events:
            record = to_record(event, mailbox.position + 1, epoch, chain)
            chain = record.chain
            kind = type(event)
            if kind is MessageAcked or kind is MessageExpired:
                self._left[event.stream] = mailbox.messages[event.stream]
            evolve(mailbox, event)
            records.append(record)
            if kind is MessageSent:
                self._cache.put(mailbox.position, event)  # type: ignore[arg-type]  # narrowed by `kind`
        self._chain = chain

    def _accepted(self, command: Send, events: Sequence[Event], now: int) -> Accepted:
        if events:
            return Accepted(command.message, duplicate=False)
        original = None
        if command.idem_key is not None and not command.known:
            topic = self.mailbox.topic(command.topic)
            original = topic.window.recall(command.idem_key, now - topic.policy.replay_window_ms * MS)
        return Accepted(command.message if original is None else original.message, duplicate=True)

    # -- what a decision needs from the log ---

    def _informed(self, command: Command, new_ids: set[bytes]) -> Command:
        """Tell a command what its group did before it to messages no longer in memory; the log can't say yet.

        Arguments:
            new_ids: outside ids that this group sent.
        """
        if type(command) is Send:
            if command.message in new_ids:
                return msgspec.structs.replace(command, known=True)
        elif isinstance(command, _SETTLING) and command.receipt.message in self._left:
            return msgspec.structs.replace(command, settled=self._left[command.receipt.message])
        return command

    async def _look_up(self, commands: Sequence[Command]) -> Sequence[Command]:
        """Tell commands what the log knows of messages that are not in memory (any more)."""
        messages = self.mailbox.messages
        settled: list[tuple[int, Ack | Nack | Extend]] = []
        outside: list[tuple[int, Send]] = []
        for index, command in enumerate(commands):
            if type(command) is Send:
                if command.outside_id:
                    outside.append((index, command))
            elif isinstance(command, _SETTLING) and command.receipt.message not in messages:
                settled.append((index, command))
        if not settled and not outside:
            return commands
        await self._settle_writing()  # so that the log holds all that the memory does
        found = list(commands)
        for index, settling in settled:
            message = await asyncio.to_thread(self._message, settling.receipt.message)
            found[index] = msgspec.structs.replace(settling, settled=message)
        known = (
            await asyncio.to_thread(self.log.known, [send.message for _, send in outside])
            if outside
            else set()
        )
        for index, send in outside:
            if send.message in known:
                found[index] = msgspec.structs.replace(send, known=True)
        return found

    def _message(self, stream: bytes) -> Message | None:
        message: Message | None = None
        for record in self.log.history(stream):
            message = evolve_message(message, to_event(record), position=record.position, epoch=record.epoch)  # type: ignore[arg-type]
        return message

    async def _verified(
        self, command: Receive, now: int, records: list[Record]
    ) -> tuple[Receive, dict[bytes, MessageSent]]:
        """Fetch what `command` would deliver, and name the messages whose stored bytes were altered.

        What is still in the cache never left memory; what comes from the log is checked (svc-mailbox I-12).
        """
        bodies: dict[bytes, MessageSent] = {}
        corrupt: set[bytes] = set()
        while True:
            chosen = deliverable(command, self.mailbox, now)
            missing = []
            for message in chosen:
                if message.stream not in bodies and message.stream not in corrupt:
                    sent = self._cache.pop(message.position)
                    if sent is not None:
                        bodies[message.stream] = sent
                    else:
                        missing.append(message)
            if not missing:
                return command, bodies
            await self._settle_writing()
            stored = await asyncio.to_thread(self.log.at_positions, [m.position for m in missing])
            # What this very group sent is not in the log yet.
            unwritten = {record.position: record for record in records}
            for message in missing:
                record = stored.get(message.position) or unwritten.get(message.position)
                read = to_event(record) if record is not None else None
                if isinstance(read, MessageSent) and read.stream == message.stream and is_intact(read):
                    bodies[message.stream] = read
                else:
                    corrupt.add(message.stream)
            if corrupt:
                command = msgspec.structs.replace(command, corrupt=frozenset(corrupt))

    # -- writing ---

    def _start_append(self, records: list[Record], works: list[_Work], replies: list[list[Answer]]) -> None:
        # Handed to the thread at once, not when this task next yields: the next group is decided meanwhile.
        append = asyncio.get_running_loop().run_in_executor(self._writer, self.log.append, records)
        self._writing = asyncio.ensure_future(self._finish_append(append, works, replies))
        mailbox = self.mailbox
        if mailbox.position - self._snapshot_position >= SNAPSHOT_EVENTS:
            self._writer.submit(self._try_save_snapshot, self._snapshot_of(mailbox))

    async def _finish_append(
        self, append: asyncio.Future[None], works: list[_Work], replies: list[list[Answer]]
    ) -> None:
        try:
            await append
        except PostroomError as error:
            self._append_error = error
            log_event.error("mailbox.append_failed", mailbox=self.log.mailbox, error=str(error))
            self._forget(works, error)
        else:
            _answer(works, replies)

    async def _settle_writing(self) -> None:
        if self._writing is not None:
            await self._writing
            self._writing = None

    def _forget(self, works: list[_Work], error: PostroomError) -> None:
        """Drop the memory and tell callers why; a lost mailbox refuses everything from now on."""
        self._mailbox = None
        for work in works:
            if not work.answers.done():
                work.answers.set_exception(error)
        if isinstance(error, Fenced | WrongPosition):
            self._lost = error
            self._closing = True
            while self._pending:
                self._forget([self._pending.popleft()], error)

    async def _recover(self) -> bool:
        """Fold the log again after a failed append; until that works, refuse what is pending."""
        if self._lost is not None:
            return False
        try:
            await self._load()
        except PostroomError as error:
            works = self._take_batch()
            self._forget(works, error)
            return False
        if self.mailbox.epoch > self._epoch:
            self._forget(self._take_batch(), Fenced(self.log.mailbox, self._epoch, self.mailbox.epoch))
            return False
        log_event.info("mailbox.recovered", mailbox=self.log.mailbox, position=self.mailbox.position)
        return True

    async def _in_writer(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._writer, function, *arguments)

    # -- loading ---

    async def _load(self) -> None:
        self._cache.clear()
        self._mailbox = await asyncio.to_thread(fold, self.log, self._limits, self._default_policy)
        head = await asyncio.to_thread(self.log.head)
        self._chain = head.chain if head is not None else GENESIS
        self._snapshot_position = next((s.position for s in self.log.snapshots()), 0)

    async def _take_ownership(self, owner: str, mode: MailboxMode) -> None:
        mailbox = self.mailbox
        boot, uptime = self._clock.boot(), self._clock.uptime()
        at, continues = anchor(mailbox.clock, mailbox.at, wall=self._clock.wall(), boot=boot, uptime=uptime)
        self._base_at, self._base_uptime = at, uptime
        self._epoch = mailbox.epoch + 1
        command = TakeOwnership(self.log.mailbox, mode, owner, boot, uptime, continues)
        records: list[Record] = []
        self._apply(decide(command, mailbox, at), records)
        await self._in_writer(self.log.append, records)

    def _snapshot_of(self, mailbox: Mailbox) -> StoredSnapshot:
        self._snapshot_position = mailbox.position
        return StoredSnapshot(mailbox.position, self._chain, take_snapshot(mailbox))

    def _try_save_snapshot(self, snapshot: StoredSnapshot) -> None:
        try:
            self.log.save_snapshot(snapshot)
        except PostroomError as error:  # the log is complete without it; the next one gets another try
            log_event.warning("mailbox.snapshot_failed", mailbox=self.log.mailbox, error=str(error))

    def _wake_receivers(self) -> None:
        for topic, waiters in self._waiting.items():
            if self._has_ready(topic):
                for waiter in waiters:
                    if not waiter.done():
                        waiter.set_result(None)

    def _try_seal(self, seal: Seal) -> None:
        try:
            self.log.seal(seal)
        except PostroomError as error:  # without it, the seal of an earlier owner still holds
            log_event.warning("mailbox.seal_failed", mailbox=self.log.mailbox, error=str(error))

    def _has_ready(self, topic: str) -> bool:
        found = self._mailbox.topics.get(topic) if self._mailbox is not None else None
        now = self.now()
        return found is not None and any(next(shard.ready(now), None) for shard in found.shards.values())


def _answer(works: list[_Work], replies: list[list[Answer]]) -> None:
    for work, answers in zip(works, replies, strict=True):
        # The caller may have given up waiting; what it asked for happened all the same.
        if not work.answers.done():
            work.answers.set_result(answers)
