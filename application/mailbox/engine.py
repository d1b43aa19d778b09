"""The mailbox engine: the only writer of a mailbox, which decides in memory and appends in groups."""

import asyncio
import math
import os
from collections.abc import Callable, Sequence
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
    may_be_encrypted,
    releases_of,
)
from postroom.application.mailbox.log_writer import (
    Committer,
    LogWriter,
    SnapshotSaver,
    lease_ended,
    mailbox_closed,
    refuse,
)
from postroom.application.mailbox.owned_state import OwnedState
from postroom.application.mailbox.settle import limit_tracebacks
from postroom.application.mailbox.snapshots import Taken
from postroom.application.messages import MessageDelivery
from postroom.application.metrics import MailboxMetrics
from postroom.application.ports.event_log import Answer, Clock, EventLog
from postroom.application.telemetry import logger, summarize
from postroom.application.threads import Alarm, cancel_and_wait, check_not_forked, has_result
from postroom.domain.arguments import check_int
from postroom.domain.commit import Commit
from postroom.domain.errors import PostroomError, Rejected, Unavailable
from postroom.domain.mailbox.commands import Command, Receive
from postroom.domain.mailbox.events import MailboxMode
from postroom.domain.mailbox.ownership import Anchor
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.message import MAX_EPOCH, MessageSent
from postroom.domain.names import message_id
from postroom.domain.settings import UNCHANGED, SettingsChanges

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
        self._may_append = may_append or (lambda: True)
        self.writer = LogWriter(log, self._may_append)
        self._clock = clock
        self._anchor = Anchor(0, 0, continues=False)
        self.metrics = MailboxMetrics()
        self.long_polls = LongPolls()
        self._pending = PendingRequests(log.mailbox, self.now)
        self._wake = Alarm()
        cache = EnvelopeCache(cache_bytes)
        self._owned = OwnedState(log, cache.clear, self._pending, self.long_polls, self.metrics, self._wake)
        self.wait_until_lost = self._owned.wait_until_lost
        if protection is not None:
            protection.read_topics, protection.read_records = self._owned.subject_policies, log.read_stream
        self.committer = Committer(
            self.writer,
            self.check_ownership,
            self._owned.invalidate,
            self._owned.refuse,
            self.metrics,
            self.long_polls,
            self.release,
        )
        enricher = CommandEnricher(log, cache, self.committer, protection)
        self._decider = GroupDecider(enricher, self.metrics.reorder, admit, is_merging=is_merging)
        self._saver = SnapshotSaver(self.writer, self._wake)
        self._task: asyncio.Task[None] | None = None
        self.tasks: list[asyncio.Task[None]] = []
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

        Raises: InvalidRequest for an epoch out of range, and as `OwnedState.take_over`.
        """
        if epoch is not None:
            check_int("epoch", epoch, 1, MAX_EPOCH)
        self._anchor = await self._owned.take_over(
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
        self._owned.close(mailbox_closed(self.name))
        if self._task is not None:
            await self._task
        self._wake.cancel()
        if self._owned.current is not None:
            await self._saver.close(self._owned.current)
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
        state = self._owned.current
        if state is None:
            raise Unavailable(f"Mailbox {self.log.mailbox} is being opened; retry shortly.")
        if state.failure is not None:
            raise self._owned.lost or state.failure
        if not self._may_append():
            raise lease_ended(self.name)
        return state

    @property
    def mailbox(self) -> Mailbox:
        """Return the mailbox in memory; raises as `state` does."""
        return self.state.mailbox

    def check_process(self) -> None:
        """Raise InvalidRequest in a process that was forked from the one that opened the mailbox."""
        check_not_forked(self._process, self.log.mailbox)

    def now(self) -> int:
        """Return the log time, µs."""
        now = self._anchor.at + self._clock.uptime() - self._anchor.uptime
        state = self._owned.current
        return max(now, state.mailbox.at) if state is not None and state.failure is None else now

    async def submit(self, commands: Sequence[Command]) -> list[Answer]:
        """Decide commands in order and return their answers when their events are durable.

        Returns: an answer for each command; `Rejected` for a refused one.
        Raises: Saturated when too many commands are pending, Unavailable when the outcome is unknown,
            InvalidRequest in a forked process.
        """
        has_content, state = may_be_encrypted(commands), self._owned.current
        if has_content and state is not None:
            commands = limit_tracebacks(commands, state.mailbox.limits.traceback_bytes)
        if self.protection is not None:
            return await self.protection.submit(commands, self._submit)
        if has_content:
            return await submit_without_keys(commands, self._submit, self.log.read_stream)
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
            if self._owned.lost is not None or self._owned.is_closing:
                raise self._owned.lost or mailbox_closed(self.name)
            self._pending.add(Request(commands, answers, perf_counter()), self._owned.current)
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
        if deliveries and self._owned.lost is None and self._task is not None and not self._task.done():
            answers: asyncio.Future[list[Answer]] = asyncio.get_running_loop().create_future()
            answers.add_done_callback(lambda each: each.cancelled() or each.exception())
            with suppress(PostroomError):
                request = Request(releases_of(deliveries), answers, perf_counter())
                self._pending.add(request, self._owned.current)
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
            if not self._owned.is_closing and not self.is_deliverable(command.topics):
                self._wake.set()  # the loop must consider the next delayed message of the topics
                await self.long_polls.wait(command.topics, remaining_ms, command.consumer)

    def is_deliverable(self, topics: Sequence[str]) -> bool:
        """Return whether a message of one of `topics` may be delivered now."""
        return any(self._deliverable(topic, 1) for topic in topics)

    async def find_message_id(self, stream: bytes) -> str:
        """Return the id under which a message was sent; see `MailboxOwner.find_message_id`."""
        self.check_process()
        records = await asyncio.to_thread(self.log.read_stream, stream)
        sent = records[0].event if records else None
        return message_id(stream, sent.headers.message_id if isinstance(sent, MessageSent) else None)

    async def check_ownership(self) -> None:
        """Check that no newer owner has written to the log; if one has, refuse all further requests.

        A new owner writes before it answers anything, so the state in memory after this check was current
        when the check was made. An append makes the same check (ADR 0104).

        Raises: Fenced when there is a newer owner or the store was replaced, Unavailable when the log can't
            be read, InvalidRequest in a forked process.
        """
        self.check_process()
        await self._owned.check_ownership()

    async def take_snapshot(self, *, whole: bool = False) -> Taken:
        """Save a snapshot of the mailbox as of now or later, in steps between groups of commands.

        The state may be ahead of the log, but no snapshot is saved whose commit was not appended.

        Arguments:
            whole: give up all earlier snapshots.

        Raises: Unavailable when it can't be saved, or as `state`; MailboxClosed.
        """
        if self._owned.is_closing:
            raise mailbox_closed(self.name)
        answer = self.state.snapshots.ask(whole=whole)
        self._wake.set()
        return await answer

    async def _run(self) -> None:
        while True:
            if self._owned.is_closing and not self._pending:
                await self.committer.wait_until_durable()
                if not self._pending:  # else the receivers of the last groups had given up
                    return
            await self._wait_for_work()
            if not self._may_append():
                refuse(self._pending.take_all(), lease_ended(self.name), self.metrics)
                continue
            state = self._owned.current
            if state is None or state.failure is not None:
                await self.committer.wait_until_durable()
                state = await self._owned.recover()
                if state is None:
                    continue
            requests = self._pending.take()
            try:
                group, commits = await self._decide(requests, state)
                await self.committer.wait_for_room()
            except Exception as error:
                await self.committer.wait_until_durable()
                self._owned.fail(requests, error)
                continue
            state = group.state
            if state.failure is not None:  # an append has failed in the meantime
                self._owned.refuse(requests, state.failure)
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
            self._owned.invalidate(Unavailable(f"Mailbox {self.name} is loaded again: {summarize(error)}."))
        if (recovered := await self._owned.recover()) is None:
            raise state.failure or self._owned.lost or lease_ended(self.name)
        group = await self._decider.decide(requests, recovered, self.now(), is_careful=True)
        return group, recovered.commit(group.events)

    async def _wait_for_work(self) -> None:
        """Return when there is a request, or the next timer is due."""
        while not self._pending and not self._owned.is_closing:
            state, seconds = self._owned.current, RECOVERY_SECONDS
            if not self._may_append():
                seconds = LEASE_CHECK_SECONDS
            elif state is not None and state.failure is None:
                now = self.now()
                due = self.long_polls.next_due(state, now)
                seconds = math.inf if due is None else (due - now) / 1_000_000
            if seconds <= 0:
                await asyncio.sleep(0)  # lets callers run even if many timers are due
                return
            self._wake.clear()
            if seconds < math.inf:
                self._wake.set_within(seconds)
            await self._wake.wait()
            if self._wake.is_due:
                self._wake.is_due = False
                return

    def _deliverable(self, topic: str, limit: int) -> int:
        state = self._owned.current
        if state is None or state.failure is not None:
            return 0
        return state.mailbox.count_deliverable(topic, self.now(), limit)
