"""Writes of an owner to the log: commits of groups in order, the take-over, and snapshots."""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import msgspec

from postroom.application.mailbox.command_queue import LongPolls
from postroom.application.mailbox.groups import Group, LoadedMailbox, Request, deliveries_of
from postroom.application.mailbox.segments import ends_with
from postroom.application.messages import MessageDelivery
from postroom.application.metrics import MailboxMetrics
from postroom.application.ports.event_log import EventLog, Seal, StoredSnapshot, VolatileLog
from postroom.application.telemetry import logger, summarize
from postroom.application.threads import DaemonExecutor
from postroom.domain.commit import Commit
from postroom.domain.errors import MailboxClosed, PostroomError, Unavailable

T = TypeVar("T")

LEASE_RETRY_MS = 1_000

TRUNCATE_COMMITS = 200
"""Commits removed in one transaction; bounds how long an append waits for retention."""
RECLAIM_BYTES = 1 << 20
"""Bytes reclaimed in one transaction, for the same reason."""


class LogWriter:
    """Thread that executes writes to a log in order.

    Arguments:
        may_append: see `MailboxEngine`; asked last here, as an append may have waited for others.
    """

    def __init__(self, log: EventLog, may_append: Callable[[], bool]) -> None:
        self._log = log
        self._may_append = may_append
        self._thread = DaemonExecutor(1, "postroom-append")
        self._saving: set[asyncio.Task[StoredSnapshot]] = set()

    def append(self, commits: Sequence[Commit]) -> asyncio.Future[None]:
        """Start an append at once and return its future."""
        return self._start(self._append, commits)

    def save_snapshot(
        self, rows: Iterator[StoredSnapshot], position: int, keep_from: int
    ) -> asyncio.Future[StoredSnapshot]:
        """Start to save the rows of a part, between appends; see `EventLog.save_snapshot`.

        Arguments:
            rows: iterated in the thread.
            position: of the last row.
            keep_from: position before which rows are removed when all are saved.

        Returns: the last row.
        """
        saving = asyncio.create_task(self._save_rows(rows, position, keep_from))
        self._saving.add(saving)
        saving.add_done_callback(self._saving.discard)
        return saving

    def try_seal(self, seal: Seal) -> asyncio.Future[None]:
        """Seal the end of the log; a failure is only logged, as the previous seal remains valid."""
        return self._start(self._try, "mailbox.seal_failed", self._log.seal, seal)

    async def truncate(self, through: int) -> int:
        """Remove the commits that end at or before `through` in steps, between appends.

        Returns: the number of positions removed.
        """
        removed = 0
        while count := await self._start(self._log.truncate, through, TRUNCATE_COMMITS):
            removed += count
        return removed

    async def reclaim_space(self, enough: int) -> int:
        """Reclaim freed space in steps, between appends; return the number of bytes.

        Arguments:
            enough: bytes after which to stop.
        """
        reclaimed = 0
        while reclaimed < enough and (size := await self._start(self._log.reclaim_space, RECLAIM_BYTES)):
            reclaimed += size
        return reclaimed

    def compact(self, log: VolatileLog, through: int, unsettled: Collection[bytes]) -> asyncio.Future[int]:
        """Compact a log in memory between appends; see `VolatileLog.compact`."""
        return self._start(log.compact, through, unsettled)

    async def close(self) -> None:
        """Finish the pending writes and end the thread."""
        if self._saving:
            await asyncio.wait(self._saving)
        with suppress(Unavailable):  # without a thread, nothing is pending
            await self._start(lambda: None)  # joining the thread would block the event loop
        self._thread.shutdown(wait=False)

    def _start(self, function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _append(self, commits: Sequence[Commit]) -> None:
        if not self._may_append():
            raise lease_ended(self._log.mailbox)
        try:
            self._log.append(commits)
        except PostroomError:
            raise
        except Exception as error:  # a defect of the adapter: callers still get an answer
            logger().exception("mailbox.append_failed", mailbox=self._log.mailbox)
            raise Unavailable(
                f"The log of mailbox {self._log.mailbox} failed: {summarize(error)}."
            ) from error

    async def _save_rows(
        self, rows: Iterator[StoredSnapshot], position: int, keep_from: int
    ) -> StoredSnapshot:
        try:
            while True:
                row = await self._start(self._save_row, rows, position, keep_from)
                if row.position == position:
                    return row
        except PostroomError as error:
            logger().warning("mailbox.snapshot_failed", mailbox=self._log.mailbox, error=str(error))
            raise

    def _save_row(self, rows: Iterator[StoredSnapshot], position: int, keep_from: int) -> StoredSnapshot:
        row = next(rows)
        # Those that it replaces may be needed to read a truncated log.
        if not ends_with(self._log, position, row.chain):
            raise Unavailable(
                f"A snapshot of mailbox {self._log.mailbox} was not saved, as the commit that ends at "
                f"position {position} was not appended; retry shortly."
            )
        self._log.save_snapshot(row, keep_from if row.position == position else 0)
        return row

    def _try(self, failure: str, write: Callable[[T], None], what: T) -> None:
        try:
            write(what)
        except PostroomError as error:
            logger().warning(failure, mailbox=self._log.mailbox, error=str(error))


def lease_ended(mailbox: str) -> Unavailable:
    """Return the answer to callers while the owner of a mailbox may not append; nothing was recorded."""
    return Unavailable(
        f"The lease of mailbox {mailbox} was not renewed in time, so this process may not use it now; "
        "retry shortly.",
        LEASE_RETRY_MS,
    )


def mailbox_closed(mailbox: str) -> MailboxClosed:
    """Return the answer to callers of a mailbox that its owner has closed."""
    return MailboxClosed(f"Mailbox {mailbox} is closed; open it again.")


APPENDS_IN_PROGRESS = 2
"""Maximum number of appends in progress; two, so that the log never waits for the next group."""


class _Entry(msgspec.Struct, eq=False):
    """A group whose events may not be durable yet, with their number, and the time when it was committed."""

    group: Group
    count: int
    began: float
    failure: PostroomError | None = None
    is_over: bool = False


class Committer:
    """Committer of groups; answers each when its events and all earlier ones are durable.

    A group without events is answered once the log shows that no other process has taken the mailbox over.
    """

    def __init__(
        self,
        writer: LogWriter,
        check_ownership: Callable[[], Coroutine[Any, Any, None]],
        on_failure: Callable[[PostroomError], None],
        refuse: Callable[[Sequence[Request], PostroomError], None],
        metrics: MailboxMetrics,
        long_polls: LongPolls,
        release: Callable[[Sequence[MessageDelivery]], None],
    ) -> None:
        """Initialise with the log's writer.

        Arguments:
            check_ownership: see `MailboxEngine.check_ownership`; called for groups without events.
            on_failure: called with the first failed append of a state; it must invalidate the state.
            refuse: called with the requests of each group whose state is void, and the reason.
            long_polls: notified of the messages whose end is durable.
            release: called with deliveries whose receivers have given up.
        """
        self._writer = writer
        self._check_ownership = check_ownership
        self._on_failure = on_failure
        self._refuse = refuse
        self._metrics = metrics
        self._long_polls = long_polls
        self._release = release
        self._in_progress: deque[_Entry] = deque()
        self._waiting: list[asyncio.Future[None]] = []

    def commit(self, group: Group, commits: Sequence[Commit]) -> None:
        """Start to append the commits of a group, without waiting."""
        if not commits and not group.requests:
            return
        entry = _Entry(group, sum(commit.event_count for commit in commits), perf_counter())
        self._in_progress.append(entry)
        # Answers from memory count only while nobody else owns the mailbox.
        ended = self._writer.append(commits) if commits else asyncio.create_task(self._check_ownership())
        ended.add_done_callback(partial(self._end, entry))

    @property
    def groups(self) -> list[Group]:
        """Return the groups that may not be durable yet, in order."""
        return [each.group for each in self._in_progress]

    async def wait_for_room(self) -> None:
        """Wait until another append may be started."""
        while len(self._in_progress) >= APPENDS_IN_PROGRESS:
            await self._wait()

    async def wait_until_durable(self) -> None:
        """Wait until every append has ended; then the log matches the state, or the state is void."""
        while self._in_progress:
            await self._wait()

    async def _wait(self) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting

    def _end(self, entry: _Entry, ended: asyncio.Future[None]) -> None:
        """Note that an append or a check has ended, and answer the groups that wait for no other one."""
        entry.is_over = True
        try:
            ended.result()
        except PostroomError as error:
            entry.failure = error
        except BaseException as error:  # a defect, or the event loop ends: nothing may count as durable
            name = entry.group.state.mailbox.name
            entry.failure = Unavailable(f"The log of mailbox {name} failed: {summarize(error)}.")
        else:
            if entry.count:
                self._metrics.commit.observe(perf_counter() - entry.began)
                self._metrics.batch.observe(entry.count)
                events = entry.group.events
                self._metrics.count_topics(
                    sent=events.sent_by_topic,
                    delivered=events.delivered,
                    acked=events.acked,
                    nacked=events.nacked,
                )
        while self._in_progress and self._in_progress[0].is_over:
            oldest = self._in_progress.popleft()
            group, failure = oldest.group, oldest.failure
            if group.state.failure is None and failure is not None and oldest.count:
                logger().error("mailbox.append_refused", mailbox=group.state.mailbox.name, error=str(failure))
                self._on_failure(failure)
            if refusal := group.state.failure or failure:
                self._refuse(group.requests, refusal)
            else:
                if self._long_polls.watches:
                    self._long_polls.note(group.events)
                if untaken := self._answer(group):
                    self._release(untaken)
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(None)

    def _answer(self, group: Group) -> list[MessageDelivery]:
        """Send the callers of a group their answers; return the deliveries whose receivers have given up."""
        now, untaken = perf_counter(), list[MessageDelivery]()
        for request, answers in zip(group.requests, group.answers, strict=True):
            if isinstance(answers, PostroomError):
                refuse((request,), answers, self._metrics)
                continue
            try:
                request.answers.set_result(answers)
            except asyncio.InvalidStateError:  # the caller no longer waits; its commands have taken effect
                untaken += deliveries_of(answers)
                continue
            self._metrics.count(type(request.commands[0]), answers, now - request.began)
        return untaken


def refuse(requests: Iterable[Request], error: PostroomError, metrics: MailboxMetrics) -> None:
    """Answer every caller with `error`, and count the refusals."""
    for request in requests:
        if not request.answers.done():
            request.answers.set_exception(error)
            metrics.count_refusal(error)


CLOSING_SNAPSHOT_EVENTS = 1_000
"""Events after the newest snapshot from which a mailbox that closes saves another one."""


class SnapshotSaver:
    """Saver of parts, which wakes the engine's loop after each."""

    def __init__(self, writer: LogWriter, wake: asyncio.Event) -> None:
        self._writer = writer
        self._wake = wake

    def save(
        self, rows: Iterator[StoredSnapshot], position: int, keep_from: int
    ) -> "asyncio.Future[StoredSnapshot]":
        """Start to save a part; see `LogWriter.save_snapshot`."""
        saving = self._writer.save_snapshot(rows, position, keep_from)
        saving.add_done_callback(lambda _: self._wake.set())  # the next one may have been asked for
        return saving

    async def close(self, state: LoadedMailbox) -> None:
        """Save a snapshot if the log has grown, seal the log, and refuse requests for further snapshots.

        To be called when nothing is decided any more. A failure is only logged, as both are optional.
        """
        mailbox = state.mailbox
        if state.failure is None:
            if state.records_since_snapshot >= CLOSING_SNAPSHOT_EVENTS:
                await self._finish(state)
            await self._writer.try_seal(Seal(mailbox.position, state.chain))
        state.snapshots.refuse(mailbox_closed(mailbox.name))

    async def _finish(self, state: LoadedMailbox) -> None:
        answer = state.snapshots.ask()
        while not answer.done():
            self._wake.clear()
            if state.snapshots.is_active:
                state.advance_snapshot(self.save)
                await asyncio.sleep(0)
            else:
                await self._wake.wait()
        answer.exception()  # has been logged
