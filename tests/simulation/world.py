"""A small world for the mailbox to live in: time that stands still, one thread, and a disk that can fail."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from selectors import SelectorKey, SelectSelector
from typing import Any

from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.mailbox.records import Records
from postroom.application.ports.event_log import LogSize, Seal, StoredSnapshot
from postroom.domain.commit import Commit, IndexEntry
from postroom.domain.errors import Unavailable
from tests.simulation.jobs import Job
from tests.support.clocks import SimulatedClock

MS = 1_000


class NoFiles(SelectSelector):
    """A selector that asks the kernel for nothing, as a simulation waits for no file."""

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop on simulated time, whose executors run in the loop itself: every run is the same run.

    A job takes effect some turns of the loop after it was handed over, and is answered some turns later, so
    that a crash can come before, between and after.
    """

    TURNS = 2

    def __init__(self, clock: SimulatedClock) -> None:
        super().__init__(NoFiles())
        self._clock = clock
        self._jobs = 0

    def time(self) -> float:
        return self._clock.true / 1_000_000

    def run_in_executor(  # type: ignore[override]  # the base class types the arguments more narrowly
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        done: asyncio.Future[Any] = self.create_future()
        self._jobs += 1
        self._after(self.TURNS, self._run_job, Job(done, func, args))
        return done

    def play(self, what: Any) -> Any:
        """Run a coroutine, then everything that it left behind and every timer that is due."""
        result = self.run_until_complete(what)
        self.run_until_complete(self._settle())
        return result

    async def _settle(self) -> None:
        idle = 0
        while idle < 2:  # a timer that is due is ready one turn later
            await asyncio.sleep(0)
            idle = 0 if self._jobs or self._ready else idle + 1  # type: ignore[attr-defined]  # not in typeshed

    def _run_job(self, job: Job) -> None:
        job.run()
        self._after(self.TURNS, self._finish_job, job)

    def _finish_job(self, job: Job) -> None:
        self._jobs -= 1
        job.finish()

    def _after(self, turns: int, call: Callable[..., None], *args: Any) -> None:
        if turns:
            self.call_soon(self._after, turns - 1, call, *args)
        else:
            call(*args)


class Disk(MemoryEventLog):
    """What survives a crash."""

    def __init__(self, mailbox: str) -> None:
        super().__init__(mailbox)
        self.end = 0
        self.changes = 0

    def append(self, commits: Sequence[Commit]) -> None:
        super().append(commits)
        self.end += sum(commit.event_count for commit in commits)
        self.changes += 1

    def truncate(self, through: int, limit: int) -> int:
        self.changes += 1
        return super().truncate(through, limit)

    def save_snapshot(self, snapshot: StoredSnapshot, keep_from: int = 0) -> None:
        self.changes += 1
        super().save_snapshot(snapshot, keep_from)


class LogHandle(Records):
    """One process's access to the disk: it ends with the process, and an append may fail.

    `fail_next` makes the next append fail, `before` it took effect or `after`: the caller can't tell which.
    `took_effect` tells the test, of each append.
    """

    durability = "nothing"

    def __init__(self, disk: Disk) -> None:
        self.mailbox = disk.mailbox
        self.fail_next: str | None = None
        self.took_effect: list[bool] = []
        self._disk = disk
        self._is_dead = False

    def kill(self) -> None:
        self._is_dead = True

    def append(self, commits: Sequence[Commit]) -> None:
        failure, self.fail_next = self.fail_next, None
        disk = self._alive()
        self.took_effect.append(False)
        if failure != "before":
            disk.append(commits)
            self.took_effect[-1] = True
        if failure is not None:
            raise Unavailable(f"The simulated disk failed {failure} an append.")

    def commits(self, after: int = 0, *, envelopes: bool = True) -> Iterator[Commit]:
        return self._alive().commits(after, envelopes=envelopes)

    def commits_of(self, positions: Iterable[int], *, envelopes: bool = True) -> list[Commit]:
        return self._alive().commits_of(positions, envelopes=envelopes)

    def index_of(self, streams: Iterable[bytes]) -> list[IndexEntry]:
        return self._alive().index_of(streams)

    def streams_between(self, first: bytes, last: bytes, limit: int) -> list[bytes]:
        return self._alive().streams_between(first, last, limit)

    def head(self) -> Any:
        return self._alive().head()

    def first_position(self) -> int | None:
        return self._alive().first_position()

    def position_before(self, at: int) -> int:
        return self._alive().position_before(at)

    def truncate(self, through: int, limit: int) -> int:
        return self._alive().truncate(through, limit)

    def position_at_size(self, size: int) -> int:
        return self._alive().position_at_size(size)

    def size(self) -> LogSize:
        return self._alive().size()

    def reclaim_space(self, limit: int) -> int:
        return self._alive().reclaim_space(limit)

    def save_snapshot(self, snapshot: StoredSnapshot, keep_from: int = 0) -> None:
        self._alive().save_snapshot(snapshot, keep_from)

    def snapshots(self) -> Iterator[StoredSnapshot]:
        return self._alive().snapshots()

    def seal(self, seal: Seal) -> None:
        self._alive().seal(seal)

    def read_seal(self) -> Seal | None:
        return self._alive().read_seal()

    def close(self) -> None:
        """Leave the disk as it is."""

    def _alive(self) -> Disk:
        if self._is_dead:
            raise Unavailable("This process is dead.")
        return self._disk


class WithoutSnapshots(LogHandle):
    """The same log as somebody sees it who must fold it from the start."""

    def snapshots(self) -> Iterator[StoredSnapshot]:
        return iter(())
