"""The mailbox engine: the only writer of a mailbox, which decides in memory and appends in groups."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import perf_counter

from postroom.application.erasure.protection import MessageEncryption, submit_without_keys
from postroom.application.mailbox.command_enricher import CACHE_BYTES, CommandEnricher, EnvelopeCache
from postroom.application.mailbox.command_queue import LongPolls, PendingRequests
from postroom.application.mailbox.group_decider import GroupDecider
from postroom.application.mailbox.groups import (
    Answers,
    Group,
    LoadedMailbox,
    Request,
    deliveries_of,
    load_mailbox,
    may_be_encrypted,
    releases_of,
)
from postroom.application.mailbox.log_writer import (
    Committer,
    LogWriter,
    SnapshotSaver,
    lease_ended,
    refuse,
    take_over,
)
from postroom.application.mailbox.settle import limit_tracebacks
from postroom.application.mailbox.snapshots import Taken
from postroom.application.messages import MessageDelivery
from postroom.application.metrics import MailboxMetrics
from postroom.application.ports.event_log import Answer, Clock, EventLog
from postroom.application.telemetry import logger, summarize
from postroom.application.threads import cancel_and_wait, check_not_forked, has_result
from postroom.domain.arguments import check_int
from postroom.domain.commit import Commit
from postroom.domain.errors import (
    DuplicateRecord,
    Fenced,
    MailboxClosed,
    PostroomError,
    Rejected,
    Unavailable,
    WrongPosition,
)
from postroom.domain.mailbox.commands import Command, Receive
from postroom.domain.mailbox.events import MailboxMode
from postroom.domain.mailbox.ownership import Anchor
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.message import MAX_EPOCH, MessageSent
from postroom.domain.names import message_id
from postroom.domain.settings import UNCHANGED, SettingsChanges
from postroom.domain.subject import SubjectPolicy

IS_MERGING = os.environ.get("POSTROOM_MERGING", "on") != "off"
"""Whether owners decide commands together; a switch for comparisons and in case of a defect (ADR 0134)."""
RECOVERY_SECONDS = 1.0
"""Pause before another attempt to load the log, if no command arrives."""
LEASE_CHECK_SECONDS = 0.25
"""Interval at which an owner looks whether it may append again."""


class MailboxEngine:
    """Owner of a mailbox: decides queued commands in groups against the state in memory.

    One task takes the pending requests (group commit), decides them and hands their events to the committer,
    which appends them in a thread while the next group is decided, and answers when they are durable. When an
    append fails, every affected caller gets a typed error and the state is loaded from the log again.

    Arguments:
        admit: called before each send, with the size of its envelope; raises Saturated for lack of room.
        may_append: whether the owner's lease lasts (RFC-049), from any thread. While it answers False,
            requests get Unavailable, nothing is appended or read, and timers wait.
        protection: encrypts sent messages and decrypts delivered ones (ADR 0089).
        is_merging: whether commands are decided together where that has the effect of one by one (ADR 0134).
    """

    def __init__(
        self,
        log: EventLog,
        clock: Clock,
        *,
        cache_bytes: int = CACHE_BYTES,
        admit: Callable[[Mailbox, int], None] | None = None,
        may_append: Callable[[], bool] | None = None,
        protection: MessageEncryption | None = None,
        is_merging: bool = IS_MERGING,
    ) -> None:
        self.log, self.protection = log, protection
        if protection is not None:
            protection.read_topics, protection.read_records = self._subject_policies, log.read_stream
        self._may_append = may_append or (lambda: True)
        self.writer = LogWriter(log, self._may_append)
        self._clock = clock
        self.metrics = MailboxMetrics()
        self.long_polls = LongPolls()
        self.committer = Committer(
            self.writer,
            self.check_ownership,
            self._invalidate,
            self._refuse,
            self.metrics,
            self.long_polls,
            self.release,
        )
        self._cache = EnvelopeCache(cache_bytes)
        enricher = CommandEnricher(log, self._cache, self.committer, protection)
        self._decider = GroupDecider(enricher, self.metrics.reorder, admit, is_merging=is_merging)
        self._state: LoadedMailbox | None = None
        self._anchor = Anchor(0, 0, continues=False)
        self._pending = PendingRequests(log.mailbox, self.now)
        self._wake = asyncio.Event()
        self._saver = SnapshotSaver(self.writer, self._wake)
        self._task: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._is_due = False
        self.tasks: list[asyncio.Task[None]] = []
        self._closing = False
        self._lost: PostroomError | None = None
        self._is_lost = asyncio.Event()
        self._process = os.getpid()

    async def open(
        self,
        owner: str,
        mode: MailboxMode | None = None,
        settings: SettingsChanges = UNCHANGED,
        *,
        accept_clock: bool = False,
        epoch: int | None = None,
    ) -> None:
        """Load the mailbox and take it over under a higher epoch; create it if it does not exist.

        Arguments:
            owner: name of this owner, for operators.
            mode: expected mode; None accepts any, and creates a queue.
            settings: of a new mailbox; one that exists must have them.
            accept_clock: accept a wall clock far ahead of the last record.
            epoch: the one of the owner's lease (RFC-049); None takes the one after the log's.

        Raises: InvalidRequest for an epoch out of range, and as `take_over`.
        """
        if epoch is not None:
            check_int("epoch", epoch, 1, MAX_EPOCH)
        self._state, self._anchor = await take_over(
            self._load,
            self.writer,
            self._clock,
            owner,
            mode,
            settings,
            epoch=epoch,
            accept_clock=accept_clock,
            can_encrypt=self.protection is not None,
        )
        self._task = asyncio.create_task(self._run(), name=f"mailbox {self.log.mailbox}")

    async def close(self) -> None:
        """End `tasks` and pending requests, save a snapshot if the log has grown, seal the log, and stop."""
        await cancel_and_wait(*self.tasks)
        self._closing = True
        self._wake.set()
        self.long_polls.wake_all(MailboxClosed(f"Mailbox {self.log.mailbox} is closed; open it again."))
        if self._task is not None:
            await self._task
        if self._alarm is not None:
            self._alarm.cancel()
        if self._state is not None:
            await self._saver.close(self._state)
        await self.writer.close()

    @property
    def name(self) -> str:
        """Return the name of the mailbox."""
        return self.log.mailbox

    @property
    def state(self) -> LoadedMailbox:
        """Return the state in memory; it may be ahead of the log by the appends in progress.

        Raises: Unavailable while it is void or the owner's lease has ended, Fenced when another owner took
            over the mailbox, InvalidRequest in a forked process.
        """
        self.check_process()
        if self._state is None:
            raise Unavailable(f"Mailbox {self.log.mailbox} is being opened; retry shortly.")
        if self._state.failure is not None:
            raise self._lost or self._state.failure
        if not self._may_append():
            raise lease_ended(self.name)
        return self._state

    @property
    def mailbox(self) -> Mailbox:
        """Return the mailbox in memory; raises as `state` does."""
        return self.state.mailbox

    def _subject_policies(self) -> Mapping[str, SubjectPolicy]:
        return {} if self._state is None else self._state.mailbox.settings.subject_policies

    def check_process(self) -> None:
        """Raise InvalidRequest in a process that was forked from the one that opened the mailbox."""
        check_not_forked(self._process, self.log.mailbox)

    def now(self) -> int:
        """Return the log time, µs."""
        now = self._anchor.at + self._clock.uptime() - self._anchor.uptime
        state = self._state
        return max(now, state.mailbox.at) if state is not None and state.failure is None else now

    async def submit(self, commands: Sequence[Command]) -> list[Answer]:
        """Decide commands in order and return their answers when their events are durable.

        Returns: an answer for each command; `Rejected` for a refused one.
        Raises: Saturated when too many commands are pending, Unavailable when the outcome is unknown,
            InvalidRequest in a forked process.
        """
        if self.protection is None and not may_be_encrypted(commands):
            return await self._submit(commands)
        if may_be_encrypted(commands):
            if self._state is not None:
                commands = limit_tracebacks(commands, self._state.mailbox.limits.traceback_bytes)
            if self.protection is None:
                return await submit_without_keys(commands, self._submit, self.log.read_stream)
        if self.protection is not None:
            return await self.protection.submit(commands, self._submit)
        return await self._submit(commands)

    def start(self, commands: Sequence[Command], answers: Answers, *, is_plain: bool = False) -> bool:
        """Queue commands without waiting for their answers; see `submit`.

        Arguments:
            is_plain: whether what has to be encrypted is.

        Returns: False, having done nothing, if keys may be needed; only `submit` executes such commands.
        """
        try:
            if not is_plain and (self.protection is not None or may_be_encrypted(commands)):
                return False
            self.check_process()
            if self._lost is not None or self._closing:
                raise self._lost or MailboxClosed(f"Mailbox {self.log.mailbox} is closed; open it again.")
            self._pending.add(Request(commands, answers, perf_counter()), self._state)
        except Exception as error:  # a defect in one call must not keep others from being queued
            if isinstance(error, PostroomError):
                self.metrics.count_refusal(error)
            answers.set_exception(error)
        else:
            self._wake.set()
        return True

    async def _submit(self, commands: Sequence[Command]) -> list[Answer]:
        self.check_process()  # in a forked process, no event loop runs
        answers: asyncio.Future[list[Answer]] = asyncio.get_running_loop().create_future()
        self.start(commands, answers, is_plain=True)
        try:
            return await answers
        except asyncio.CancelledError:
            if has_result(answers):
                self.release(deliveries_of(answers.result()))
            raise

    def release(self, deliveries: Sequence[MessageDelivery]) -> None:
        """Release deliveries whose receivers have given up; if that fails, their visibility timeout does.

        Also while the mailbox closes, as who stops working cancels its receives and closes.
        """
        if deliveries and self._lost is None and self._task is not None and not self._task.done():
            answers: asyncio.Future[list[Answer]] = asyncio.get_running_loop().create_future()
            answers.add_done_callback(lambda each: each.cancelled() or each.exception())
            with suppress(PostroomError):
                self._pending.add(Request(releases_of(deliveries), answers, perf_counter()), self._state)
            self._wake.set()

    async def receive(
        self, command: Receive, wait_ms: int, *, is_stream: bool = False
    ) -> list[MessageDelivery]:
        """Deliver ready messages; see `MailboxOwner.receive`."""
        # A stream in the owner's own process ends with it, so `is_stream` changes nothing.
        self.check_process()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1_000
        while True:
            (answer,) = await self.submit([command])
            if isinstance(answer, Rejected):
                raise answer
            assert isinstance(answer, list)
            remaining_ms = int((deadline - loop.time()) * 1_000)
            if answer or remaining_ms <= 0:
                return answer
            await self._wait_for_messages(command, remaining_ms)

    def is_deliverable(self, topics: Sequence[str]) -> bool:
        """Return whether a message of one of `topics` may be delivered now."""
        return any(self._deliverable(topic, 1) for topic in topics)

    async def find_message_id(self, stream: bytes) -> str:
        """Return the id under which a message was sent; see `MailboxOwner.find_message_id`."""
        self.check_process()
        records = await asyncio.to_thread(self.log.read_stream, stream)
        sent = records[0].event if records else None
        return message_id(stream, sent.headers.message_id if isinstance(sent, MessageSent) else None)

    async def wait_until_lost(self) -> None:
        """Return when another owner has taken over the mailbox."""
        await self._is_lost.wait()

    async def check_ownership(self) -> None:
        """Check that no newer owner has written to the log; if one has, refuse all further requests.

        A new owner writes before it answers anything, so the state in memory after this check was current
        when the check was made. An append makes the same check (ADR 0104).

        Raises: Fenced when there is a newer owner or the store was replaced, Unavailable when the log can't
            be read, InvalidRequest in a forked process.
        """
        self.check_process()
        try:
            head = await asyncio.to_thread(self.log.head)
            if head is not None and self._state is not None and head.epoch > self._state.epoch:
                raise Fenced(self.log.mailbox, self._state.epoch, head.epoch)
        except Fenced as error:
            self._invalidate(error)
            raise
        except RuntimeError as error:  # no thread can be started while the interpreter exits
            raise Unavailable(f"The log of mailbox {self.name} can't be read: {summarize(error)}.") from error

    async def take_snapshot(self, *, whole: bool = False) -> Taken:
        """Save a snapshot of the mailbox as of now or later, in steps between groups of commands.

        The state may be ahead of the log, but no snapshot is saved whose commit was not appended.

        Arguments:
            whole: give up all earlier snapshots.

        Raises: Unavailable when it can't be saved, or as `state`; MailboxClosed.
        """
        if self._closing:
            raise MailboxClosed(f"Mailbox {self.log.mailbox} is closed; open it again.")
        answer = self.state.snapshots.ask(whole=whole)
        self._wake.set()
        return await answer

    async def _wait_for_messages(self, command: Receive, wait_ms: int) -> None:
        """Return when a message of one of the topics of `command` may be ready, or after `wait_ms`."""
        if self._lost is not None:
            raise self._lost
        if not self._closing and not self.is_deliverable(command.topics):
            self._wake.set()  # the loop must consider the next delayed message of the topics
            await self.long_polls.wait(command.topics, wait_ms, command.consumer)

    async def _run(self) -> None:
        while True:
            if self._closing and not self._pending:
                await self.committer.wait_until_durable()
                if not self._pending:  # else the receivers of the last groups had given up
                    return
            await self._wait_for_work()
            if not self._may_append():
                refuse(self._pending.take_all(), lease_ended(self.name), self.metrics)
                continue
            state = self._state
            if state is None or state.failure is not None:
                state = await self._recover()
                if state is None:
                    continue
            requests = self._pending.take()
            try:
                group, commits = await self._decide(requests, state)
                await self.committer.wait_for_room()
            except Exception as error:
                await self._fail(requests, error)
                continue
            state = group.state
            if state.failure is not None:  # an append has failed in the meantime
                self._refuse(requests, state.failure)
                continue
            self.committer.commit(group, commits)
            state.advance_snapshot(self._saver.save)
            self.long_polls.wake_for(self._deliverable, state.mailbox, self.now())

    async def _decide(self, requests: list[Request], state: LoadedMailbox) -> tuple[Group, list[Commit]]:
        """Decide requests, with the receives that waited for what they send, and encode their events.

        If an event can't be encoded, the state is loaded again and the requests are decided once more, so
        that only the command that caused it fails.
        """
        now = self.now()
        group = await self._decider.decide(requests, state, now)
        if self.long_polls.wake_for(self._deliverable, state.mailbox, now):
            await asyncio.sleep(0)  # in which the woken receivers ask again
            await self._decider.decide(self._pending.take(), state, now, group=group)  # extends `requests`
        try:
            return group, state.commit(group.events)
        except Exception as error:
            logger().exception("mailbox.encode_failed", mailbox=self.log.mailbox)
            await self.committer.wait_until_durable()  # earlier groups are stored, and answered so
            self._invalidate(Unavailable(f"Mailbox {self.log.mailbox} is loaded again: {summarize(error)}."))
        if (recovered := await self._recover()) is None:
            raise state.failure or self._lost or lease_ended(self.name)
        group = await self._decider.decide(requests, recovered, self.now(), is_careful=True)
        return group, recovered.commit(group.events)

    async def _wait_for_work(self) -> None:
        while not self._pending and not self._closing:
            timeout = self._sleep_seconds()
            if timeout is not None and timeout <= 0:
                await asyncio.sleep(0)  # lets callers run even if many timers are due
                return
            self._wake.clear()
            if timeout is not None:  # an alarm that comes too early is as good
                loop = asyncio.get_running_loop()
                at, alarm = loop.time() + timeout, self._alarm
                if alarm is None or alarm.when() > at:
                    if alarm is not None:
                        alarm.cancel()
                    self._alarm = loop.call_at(at, self._wake_at_alarm)
            await self._wake.wait()
            if self._is_due:
                self._is_due = False
                return

    def _wake_at_alarm(self) -> None:
        self._alarm, self._is_due = None, True
        self._wake.set()

    def _sleep_seconds(self) -> float | None:
        """Return the time until the next timer, or None without one."""
        if not self._may_append():
            return LEASE_CHECK_SECONDS
        state = self._state
        if state is None or state.failure is not None:
            return RECOVERY_SECONDS
        now = self.now()
        due = self.long_polls.next_due(state, now)
        return None if due is None else (due - now) / 1_000_000

    def _deliverable(self, topic: str, limit: int) -> int:
        state = self._state
        if state is None or state.failure is not None:
            return 0
        return state.mailbox.count_deliverable(topic, self.now(), limit)

    def _refuse(self, requests: Sequence[Request], failure: PostroomError) -> None:
        """Refuse requests to a void state; after a duplicate record, have them decided once more."""
        for each in requests:
            if self._closing or each.is_repeated or not isinstance(failure, DuplicateRecord):
                refuse([each], failure, self.metrics)
            else:
                self._pending.repeat(each)
        self._wake.set()

    async def _fail(self, requests: list[Request], error: Exception) -> None:
        """Refuse requests because the log could not be read, or a defect left the state partly evolved."""
        if not isinstance(error, PostroomError):
            logger().error("mailbox.group_failed", mailbox=self.log.mailbox, exc_info=error)
            error = Unavailable(f"Mailbox {self.log.mailbox} failed on a command: {summarize(error)}.")
        await self.committer.wait_until_durable()
        refuse(requests, error, self.metrics)
        self._invalidate(error)

    def _invalidate(self, error: PostroomError) -> None:
        """Mark the state void; if another owner took over, refuse all further requests."""
        if self._state is not None:
            self._state.failure = error
            self._state.snapshots.refuse(error)
        if isinstance(error, Fenced | WrongPosition):
            self._lost = error
            self._is_lost.set()
            self._closing = True
            self._wake.set()
            self.long_polls.wake_all(error)
            refuse(self._pending.take_all(), error, self.metrics)

    async def _recover(self) -> LoadedMailbox | None:
        """Load the state again, and return it; on failure, refuse the pending requests."""
        await self.committer.wait_until_durable()
        if self._lost is not None:
            return None
        try:
            state = await self._load()
            if self._state is not None and state.epoch > self._state.epoch:
                raise Fenced(self.log.mailbox, self._state.epoch, state.epoch)
        except PostroomError as error:
            refuse(self._pending.take(), error, self.metrics)
            self._invalidate(error)
            return None
        self._state = state
        logger().info("mailbox.recovered", mailbox=self.log.mailbox, position=state.mailbox.position)
        return state

    async def _load(self) -> LoadedMailbox:
        self._cache.clear()
        try:
            return await load_mailbox(self.log)
        except PostroomError:
            raise
        except Exception as error:  # a defect of the adapter: callers still get an answer
            logger().exception("mailbox.load_failed", mailbox=self.log.mailbox)
            raise Unavailable(f"The log of mailbox {self.name} failed: {summarize(error)}.") from error
