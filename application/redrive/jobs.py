"""Redrive jobs: handlers that preview, start, list, show and change them, and the runner of their steps."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import accumulate, islice

import msgspec
import uuid_utils
from blake3 import blake3

from postroom.application.erasure.erase_subject import spec_as_stored
from postroom.application.mailbox.administer import execute
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.mailbox.outgoing import NewId
from postroom.application.mailbox.owner_tasks import RETRY_SECONDS, StepWorker
from postroom.application.page import Page
from postroom.application.query_results import DeadLetter, Outcome, RedriveGroup, RedrivePreview, check_page
from postroom.application.redrive.copies import CopyFactory, Pace, list_messages, read_copies
from postroom.application.redrive.selection import (
    CHUNK,
    Candidate,
    find_candidates,
    find_changed,
    find_matches,
    read_records,
    select,
)
from postroom.application.reports import RedriveMessage, RedriveReport, report_of
from postroom.domain.arguments import check_int, check_optional_text, check_type
from postroom.domain.errors import InvalidRequest, PostroomError
from postroom.domain.integrity import fingerprint
from postroom.domain.mailbox.commands import Sweep
from postroom.domain.mailbox.redrive_decisions import find_job
from postroom.domain.message import MS, READY, Message, MessageRedriven, Status
from postroom.domain.names import check_uuid, message_id, message_stream
from postroom.domain.policy import DAY_MS, MAX_DURATION_MS
from postroom.domain.redrive.job import (
    ACTIVE,
    AdvanceRedrive,
    ChangeRedrive,
    Copy,
    JobStatus,
    Original,
    RedriveAdvanced,
    RedriveCommand,
    RedriveJob,
    StartRedrive,
    UndoRedrive,
)
from postroom.domain.redrive.spec import JobAction, RedriveSpec, SkipReason, check_action

BATCH = 500
"""Maximum number of messages that one commit changes, which bounds the wait of senders."""
COPY_BYTES = 4 << 20
"""Maximum size of the copied payloads of one commit; a single larger payload is permitted."""
FULL_SECONDS = 0.25
"""Pause of a job while the shard of its next message is full."""


class RedriveWorker(StepWorker):
    """Worker that runs the active jobs in the state of a mailbox, including jobs of an earlier owner.

    The progress of a job is part of the state and is committed with the changes of its messages. Only the
    queue of matches, which is rebuilt when the state is loaded again, and the pace are in memory.

    Arguments:
        batch: maximum number of messages that one commit changes.
    """

    failure = "redrive.failed"

    def __init__(
        self, engine: MailboxEngine, *, batch: int = BATCH, new_id: NewId = uuid_utils.uuid7
    ) -> None:
        super().__init__(engine)
        self._batch = batch
        self._copies = CopyFactory(engine.log.mailbox, engine.now, new_id, engine.protection)
        self._works: dict[bytes, _Work] = {}
        self._due: dict[bytes, float] = {}

    async def _run_once(self, *, is_changed: bool) -> float | None:
        """Run a step of each due job; return the seconds until the next step, or None if no job is active."""
        if is_changed:
            self._due.clear()
        jobs = [each for each in self._engine.mailbox.redrives.values() if each.status in ACTIVE]
        self._works = {job.job: work for job in jobs if (work := self._works.get(job.job)) is not None}
        self._due = {job.job: self._due.get(job.job, 0.0) for job in jobs}
        now = asyncio.get_running_loop().time
        for job in jobs:
            if self._due[job.job] <= now():
                pause = await self._attempt(self._step(job), job=message_id(job.job))
                self._due[job.job] = now() + pause if pause > 0 else 0.0
        return max(0.0, min(self._due.values()) - now()) if jobs else None

    async def _step(self, job: RedriveJob) -> float:
        state = self._engine.state
        work = self._works.get(job.job)
        if work is None or work.status != job.status or work.state is not state:
            work = self._works[job.job] = _Work(self._engine, job, self._batch, self._copies)
        try:
            return await (work.advance(job) if job.status == JobStatus.RUNNING else work.undo(job))
        except PostroomError:
            raise
        except Exception:  # it is begun again
            self._works.pop(job.job, None)
            raise


class _Work:
    """Work on one job: its queue of matches, or of events to undo, and its pace."""

    def __init__(self, engine: MailboxEngine, job: RedriveJob, batch: int, copies: CopyFactory) -> None:
        self._engine = engine
        self._batch = batch
        self.state = engine.state
        self.status = job.status
        self._now = asyncio.get_running_loop().time
        self._pace = Pace(job.spec.rate, self._now())
        self._matches: list[Candidate] = []
        self._source: deque[Candidate] | None = None
        self._advances: deque[tuple[int, RedriveAdvanced]] | None = None
        self._copies = copies
        self._changed: list[bytes] | None = None
        self._is_stalled = False

    async def advance(self, job: RedriveJob) -> float:
        """Change the next messages; return the seconds until the next step."""
        if self._source is None:
            await self._fill(job, 0)  # may take seconds, for which the pace must not catch up
            self._pace = Pace(job.spec.rate, self._now())
        maximum = self._batch if job.remaining is None else min(self._batch, job.remaining)
        if self._is_stalled:  # checks whether the shard still is full
            maximum = 1
        count = self._pace.allowance(self._now(), max(1, maximum))
        if not count:
            return self._pace.pause()
        is_last = await self._fill(job, count)
        batch = self._take(job, count)
        is_last = is_last and len(batch) == len(self._matches)
        cursor = job.cutoff if is_last else batch[-1].place
        if is_last and job.left > len(batch):
            # What changed is skipped when no other message is left: the cursor then excludes it, whatever
            # happens to it.
            if not batch and await self._skip_changed(job):
                return 0
            is_last = not batch
        streams = tuple(each.message.stream for each in batch)
        copies = await asyncio.to_thread(self._make_copies, job, batch) if job.spec.sends_copies else ()
        await execute(self._engine, AdvanceRedrive(job.job, streams, cursor, is_last, copies))
        after = self._engine.mailbox.redrives.get(job.job)
        if after is None or after.status != JobStatus.RUNNING:
            return 0
        self._pace.spend(after.moved - job.moved)
        self._matches = [each for each in self._matches if each.place > after.cursor]
        self._is_stalled = after.version == job.version
        return FULL_SECONDS if self._is_stalled else self._pace.pause()

    async def _skip_changed(self, job: RedriveJob) -> bool:
        """Skip the next selected messages that changed before the job, or its next owner, looked for them.

        Returns: False when there are none.
        """
        if self._changed is None:
            self._changed = await find_changed(job, self._engine.log, self._engine.mailbox)
        streams = tuple(self._changed[: self._batch])
        if not streams:
            return False
        reason: SkipReason | None = "settled" if job.spec.sends_copies else None
        if job.spec.selects_waiting:  # unless its state then tells another one
            reason = "dead" if job.spec.action == "cancel" else "in_flight"
        skips = () if reason is None else tuple(reason for _ in streams)
        await execute(self._engine, AdvanceRedrive(job.job, streams, job.cutoff, is_last=False, copies=skips))
        del self._changed[: self._batch]
        return True

    def _take(self, job: RedriveJob, count: int) -> list[Candidate]:
        """Return the next matches, up to `count`; fewer if their copies would be large."""
        batch = self._matches[:count]
        if job.spec.sends_copies:
            sizes = accumulate(each.message.size for each in batch)
            batch = batch[: max(1, sum(size <= COPY_BYTES for size in sizes))]
        return batch

    def _make_copies(self, job: RedriveJob, batch: Sequence[Candidate]) -> tuple[Copy | SkipReason, ...]:
        messages = [each.message for each in batch]
        records = read_records(self._engine.log, [each.position for each in messages])
        return tuple(self._copies.make(job.spec, each, records.get(each.position)) for each in messages)

    async def _fill(self, job: RedriveJob, count: int) -> bool:
        """Read until there are more than `count` matches; return whether there are no others."""
        if self._source is None:
            self._source = deque(
                await find_candidates(job.spec, self._engine.mailbox, job.cutoff, job.cursor)
            )
        while len(self._matches) <= count:
            if not self._source:
                return True
            chunk = list(islice(self._source, CHUNK))
            self._matches += await find_matches(job.spec, chunk, self._engine.log, job.cutoff)
            for _ in chunk:  # removed only after the log was read without an error
                self._source.popleft()
        return False

    async def undo(self, job: RedriveJob) -> float:
        """Undo the oldest of the job's remaining advances; return the seconds until the next step."""
        if self._advances is None:
            self._advances = deque(await asyncio.to_thread(self._read_advances, job))
        messages: tuple[tuple[bytes, int], ...] = ()
        originals: tuple[Original, ...] = ()
        cursor = job.undo_cursor
        if self._advances:
            position, event = self._advances[0]
            cursor = event.version
            if job.spec.sends_copies:
                messages, originals = await asyncio.to_thread(read_copies, self._engine.log, position, event)
            else:
                messages = await asyncio.to_thread(self._read_messages, position, event)
        is_last = len(self._advances) <= 1
        await execute(self._engine, UndoRedrive(job.job, messages, cursor, is_last, originals))
        if self._advances:
            self._advances.popleft()
        after = self._engine.mailbox.redrives.get(job.job)
        return RETRY_SECONDS if after is not None and after.version == job.version else 0

    def _read_advances(self, job: RedriveJob) -> list[tuple[int, RedriveAdvanced]]:
        """Return the positions and events of the job's progress that are not undone."""
        return [
            (record.position, record.event)
            for record in self._engine.log.read_stream(job.job)
            if isinstance(record.event, RedriveAdvanced) and record.version > job.undo_cursor
        ]

    def _read_messages(self, position: int, event: RedriveAdvanced) -> tuple[tuple[bytes, int], ...]:
        """Return the messages redriven in the commit of an event, and the positions of their redrives."""
        records = self._engine.log.at_positions(range(position - event.moved, position))
        return tuple(
            (record.stream, record.position)
            for record in records.values()
            if isinstance(record.event, MessageRedriven)
        )


MAX_SAMPLES = 10
MAX_GROUPS = 100

DescribeDeadLetters = Callable[[str, Sequence[Message]], list[DeadLetter]]
"""Returns descriptions of dead letters of a mailbox."""


class RedriveJobs:
    """The redrive jobs of a mailbox, for its owner; see `Mailbox`."""

    def __init__(self, engine: MailboxEngine, describe: DescribeDeadLetters, new_id: NewId) -> None:
        self._engine = engine
        self._describe = describe
        self._new_id = new_id
        self.worker = RedriveWorker(engine)

    async def preview_redrive(self, spec: RedriveSpec, /) -> RedrivePreview:
        """Return the messages that a job would select now; see `Mailbox.preview_redrive`."""
        spec = await self._as_stored(spec)
        await self._engine.check_ownership()
        cutoff = self._engine.mailbox.position
        matches = await self._select(spec, cutoff)
        samples = matches[:MAX_SAMPLES]
        groups: Counter[tuple[str, str, str]] = Counter()
        errors: dict[tuple[str, str, str], str | None] = {}
        digest = blake3()
        for number, each in enumerate(matches):
            reason, error = self._reason(spec, each), None if spec.selects_waiting else each.last_error
            key = (each.topic, reason, "" if spec.selects_waiting else fingerprint(reason, error))
            groups[key] += 1
            errors[key] = error
            digest.update(each.stream + each.last.to_bytes(8))
            if number % CHUNK == 0:
                await asyncio.sleep(0)  # lets the mailbox run
        return RedrivePreview(
            self._engine.name,
            cutoff,
            len(matches),
            [RedriveGroup(*key, count, errors[key]) for key, count in groups.most_common(MAX_GROUPS)],
            [
                msgspec.structs.replace(each, reason=self._reason(spec, message))
                for message, each in zip(samples, self._describe(self._engine.name, samples), strict=True)
            ],
            digest.hexdigest(16),
        )

    def _reason(self, spec: RedriveSpec, message: Message) -> str:
        """Return why a message was dead-lettered; the status of one that waits."""
        if not spec.selects_waiting:
            return message.reason or ""
        if message.status == READY and message.due > self._engine.now():
            return "delayed"
        return Status(message.status).name.lower()

    async def start_redrive(
        self,
        spec: RedriveSpec,
        /,
        *,
        job_id: str | None = None,
        cutoff: int | None = None,
        previewed: int | None = None,
        principal: str | None = None,
    ) -> RedriveReport:
        """Start a job, and return it; see `Mailbox.start_redrive`."""
        check_optional_text("principal", principal)
        end = self._engine.mailbox.position
        cutoff = end if cutoff is None else check_int("cutoff", cutoff, 0, end)
        before = 0 if previewed is None else check_int("previewed", previewed, 0, cutoff)
        spec = await self._as_stored(spec)
        job = self._new_id().bytes if job_id is None else self._stream(job_id)
        self._engine.check_process()
        if job not in self._engine.mailbox.redrives:
            matches = await self._select(spec, cutoff)
            # Those of a preview that have changed since are skipped; see `find_changed`.
            most = max(len(matches), min(before, spec.limit or before))
            await self._submit(StartRedrive(job, spec, cutoff, most, principal))
        else:  # a repeated request: has no effect, or is refused if it differs
            await self._submit(StartRedrive(job, spec, 0, 0, principal))
        return self._report(job)

    async def list_redrives(self) -> list[RedriveReport]:
        """Return the jobs; see `Mailbox.list_redrives`."""
        await self._engine.check_ownership()
        mailbox = self._engine.mailbox
        jobs = sorted(mailbox.redrives.values(), key=lambda job: (job.started_at, job.job), reverse=True)
        return [report_of(mailbox.name, job) for job in jobs]

    async def get_redrive(self, job_id: str, /) -> RedriveReport:
        """Return a job; see `Mailbox.get_redrive`."""
        await self._engine.check_ownership()
        return self._report(self._stream(job_id))

    async def list_redrive_messages(
        self, job_id: str, /, *, outcome: Outcome | None = None, cursor: str | None = None, limit: int = 100
    ) -> Page[RedriveMessage]:
        """Return a page of the messages of a job; see `Mailbox.list_redrive_messages`."""
        check_page(outcome, cursor, limit)
        await self._engine.check_ownership()
        job = find_job(self._stream(job_id), self._engine.mailbox)
        await self._engine.submit([Sweep()])  # returns when earlier decisions are durable
        now = self._engine.now()
        return await asyncio.to_thread(list_messages, self._engine.log, job, outcome, cursor, limit, now)

    async def change_redrive(
        self, job_id: str, action: JobAction, /, *, principal: str | None = None
    ) -> RedriveReport:
        """Pause, resume, cancel or undo a job; see `Mailbox.change_redrive`."""
        job = self._stream(job_id)
        check_optional_text("principal", principal)
        await self._submit(ChangeRedrive(job, check_action(action), principal))
        return self._report(job)

    async def _as_stored(self, spec: RedriveSpec) -> RedriveSpec:
        """Return a valid specification whose criteria match encrypted messages, and name no subject."""
        check_type("The redrive specification", spec, RedriveSpec).validate()
        if spec.at is not None and spec.at * MS > self._engine.now() + MAX_DURATION_MS * MS:
            raise InvalidRequest(f"Redrive at must be within {MAX_DURATION_MS // DAY_MS:,} days from now.")
        protection = self._engine.protection
        return spec if protection is None else await asyncio.to_thread(spec_as_stored, spec, protection)

    async def _select(self, spec: RedriveSpec, cutoff: int) -> list[Message]:
        """Return the messages that match, and did so at a cut-off, up to the limit of a job."""
        candidates = await find_candidates(spec, self._engine.mailbox, cutoff)
        # By their sends, as those that were sent together are read together.
        candidates.sort(key=lambda each: each.message.position)
        matches: list[Candidate] = []
        async for chunk in select(spec, candidates, self._engine.log, cutoff):
            matches += chunk
        matches.sort(key=lambda each: each.place)
        return [each.message for each in matches[: spec.limit]]

    async def _submit(self, command: RedriveCommand) -> None:
        try:
            await execute(self._engine, command)
        finally:
            self.worker.wake()

    def _report(self, job: bytes) -> RedriveReport:
        mailbox = self._engine.mailbox
        return report_of(mailbox.name, find_job(job, mailbox))

    def _stream(self, job_id: object) -> bytes:
        return message_stream(self._engine.name, check_uuid("The redrive job id", job_id))
