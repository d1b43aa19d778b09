"""The state of a mailbox in memory: take-over, recovery after a failure, and loss to another owner."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from postroom.application.mailbox.command_queue import LongPolls, PendingRequests
from postroom.application.mailbox.groups import LoadedMailbox, Request, load_mailbox
from postroom.application.mailbox.log_writer import LogWriter, refuse
from postroom.application.metrics import MailboxMetrics
from postroom.application.ports.event_log import Clock, EventLog
from postroom.application.telemetry import logger, summarize
from postroom.domain.errors import DuplicateRecord, Fenced, PostroomError, Unavailable, WrongPosition
from postroom.domain.mailbox.commands import TakeOwnership
from postroom.domain.mailbox.events import MailboxMode
from postroom.domain.mailbox.ownership import Anchor, anchor
from postroom.domain.settings import SettingsChanges
from postroom.domain.subject import SubjectPolicy

OWNERSHIP_TRIES = 5
"""Attempts of a new owner to append while the previous owner still appends."""


class OwnedState:
    """State of a mailbox that this process owns, loaded from the log when it is opened and after a failure.

    While it is void, requests are refused.

    Arguments:
        forget: called before the log is read; drops what is in memory besides the state.
        pending: the requests that are not decided yet.
        wake: wakes the task that decides them.

    Attributes:
        current: the state, which may be ahead of the log by the appends in progress; None before `take_over`.
        lost: the reason why this process does not own the mailbox any more.
        is_closing: whether no more requests are accepted.
    """

    def __init__(
        self,
        log: EventLog,
        forget: Callable[[], None],
        pending: PendingRequests,
        long_polls: LongPolls,
        metrics: MailboxMetrics,
        wake: asyncio.Event,
    ) -> None:
        self._log = log
        self._forget = forget
        self._pending = pending
        self._long_polls = long_polls
        self._metrics = metrics
        self._wake = wake
        self._is_lost = asyncio.Event()
        self.current: LoadedMailbox | None = None
        self.lost: PostroomError | None = None
        self.is_closing = False

    def subject_policies(self) -> Mapping[str, SubjectPolicy]:
        """Return the settings that say which messages of a topic are encrypted, by topic."""
        return {} if self.current is None else self.current.mailbox.settings.subject_policies

    async def take_over(
        self,
        writer: LogWriter,
        clock: Clock,
        owner: str,
        mode: MailboxMode | None,
        settings: SettingsChanges,
        *,
        epoch: int | None,
        accept_clock: bool,
        can_encrypt: bool,
    ) -> Anchor:
        """Load the mailbox and append `OwnershipTaken`; return the anchor of log time.

        Arguments: as of `MailboxEngine.open`.
        Raises: WrongMode and SettingsConflict when it has another mode or other settings, WrongPosition when
            another owner keeps appending, InvalidRequest when it encrypts messages and there is no key store,
            Fenced when the epoch is not above the log's, Unavailable when the lease has ended, BrokenLog when
            the log can't be folded, ImplausibleClock when the machine was restarted and its wall clock is too
            far ahead.
        """
        attempt = 1
        while True:
            began = clock.uptime()
            state = await self._load()
            loaded, replayed = clock.uptime(), state.records_since_snapshot
            mailbox, boot, uptime = state.mailbox, clock.boot(), clock.uptime()
            time = anchor(mailbox, wall=clock.wall(), boot=boot, uptime=uptime, accept_clock=accept_clock)
            command = TakeOwnership(
                mailbox.name, mode, owner, boot, uptime, time.continues, epoch, settings, can_encrypt
            )
            try:
                await writer.append(state.take_ownership(command, time.at))
            except WrongPosition:
                if attempt == OWNERSHIP_TRIES:
                    raise
                attempt += 1
                continue
            logger().info(
                "mailbox.owned",
                mailbox=mailbox.name,
                epoch=state.epoch,
                position=mailbox.position,
                replayed=replayed,
                load_ms=(loaded - began) // 1_000,
                append_ms=(clock.uptime() - loaded) // 1_000,
            )
            self.current = state
            return time

    async def check_ownership(self) -> None:
        """Check that no newer owner has written to the log; see `MailboxEngine.check_ownership`."""
        try:
            head = await asyncio.to_thread(self._log.head)
            if head is not None and self.current is not None and head.epoch > self.current.epoch:
                raise Fenced(self._log.mailbox, self.current.epoch, head.epoch)
        except Fenced as error:
            self.invalidate(error)
            raise
        except RuntimeError as error:  # no thread can be started while the interpreter exits
            raise Unavailable(
                f"The log of mailbox {self._log.mailbox} can't be read: {summarize(error)}."
            ) from error

    def invalidate(self, error: PostroomError) -> None:
        """Mark the state void; if another owner took over, refuse all further requests."""
        if self.current is not None:
            self.current.failure = error
            self.current.snapshots.refuse(error)
        if isinstance(error, Fenced | WrongPosition):
            self.lost = error
            self._is_lost.set()
            self.close(error)
            refuse(self._pending.take_all(), error, self._metrics)

    def close(self, reason: PostroomError) -> None:
        """Accept no more requests, and end the waits for messages."""
        self.is_closing = True
        self._wake.set()
        self._long_polls.wake_all(reason)

    async def wait_until_lost(self) -> None:
        """Return when another owner has taken over the mailbox."""
        await self._is_lost.wait()

    def refuse(self, requests: Sequence[Request], failure: PostroomError) -> None:
        """Refuse requests to a void state; after a duplicate record, have them decided once more."""
        for each in requests:
            if self.is_closing or each.is_repeated or not isinstance(failure, DuplicateRecord):
                refuse([each], failure, self._metrics)
            else:
                self._pending.repeat(each)
        self._wake.set()

    def fail(self, requests: Sequence[Request], error: Exception) -> None:
        """Refuse requests because the log could not be read, or a defect left the state partly evolved.

        To be called when no append is in progress.
        """
        if not isinstance(error, PostroomError):
            logger().error("mailbox.group_failed", mailbox=self._log.mailbox, exc_info=error)
            error = Unavailable(f"Mailbox {self._log.mailbox} failed on a command: {summarize(error)}.")
        refuse(requests, error, self._metrics)
        self.invalidate(error)

    async def recover(self) -> LoadedMailbox | None:
        """Load the state again, and return it; on failure, refuse the pending requests.

        To be called when no append is in progress.
        """
        if self.lost is not None:
            return None
        try:
            state = await self._load()
            if self.current is not None and state.epoch > self.current.epoch:
                raise Fenced(self._log.mailbox, self.current.epoch, state.epoch)
        except PostroomError as error:
            refuse(self._pending.take(), error, self._metrics)
            self.invalidate(error)
            return None
        self.current = state
        logger().info("mailbox.recovered", mailbox=self._log.mailbox, position=state.mailbox.position)
        return state

    async def _load(self) -> LoadedMailbox:
        self._forget()
        try:
            return await load_mailbox(self._log)
        except PostroomError:
            raise
        except Exception as error:  # a defect of the adapter: callers still get an answer
            logger().exception("mailbox.load_failed", mailbox=self._log.mailbox)
            raise Unavailable(
                f"The log of mailbox {self._log.mailbox} failed: {summarize(error)}."
            ) from error
