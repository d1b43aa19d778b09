"""Reports of workers about themselves, and the registry in the owner of a mailbox (ADR 0141)."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from postroom.application.messages import rfc3339
from postroom.domain.arguments import MAX_TEXT_CHARS, check_int, check_items, check_text, check_type
from postroom.domain.errors import InvalidRequest
from postroom.domain.policy import MAX_DURATION_MS

REPORT_SECONDS = 10.0
"""Time between two reports of a worker."""
STALE_MS = 30_000
"""Time without a report after which a worker is stale: it was stopped, hangs, or can't reach the owner."""
FORGET_MS = 3_600_000
"""Time without a report after which a worker is forgotten."""
MAX_HANDLERS = 200
CAPACITY = 4_000
"""Maximum number of workers and handlers, together, that an owner keeps."""
US_PER_MS = 1_000


class HandlerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A handler of a worker.

    Arguments:
        topic: its topic, pattern or subscription.
        handler: name of its function.
        consumer: the name that its receives give, as `list_consumers` shows it.
        concurrency: maximum number of its calls at once; 0 if it does not say.
        in_use: number of its calls now.
        handled, failed: number of deliveries that it acked, and that failed, since the worker started.
    """

    topic: str
    handler: str
    consumer: str = ""
    concurrency: int = 0
    in_use: int = 0
    handled: int = 0
    failed: int = 0


class WorkerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker that runs, as it describes itself.

    Arguments:
        process: its process id on the host.
        version: of its code; empty if it does not say.
        postroom_version: of Postroom, or of another client.
        uptime_ms: time since it started.
    """

    name: str
    host: str = ""
    process: int = 0
    version: str = ""
    postroom_version: str = ""
    uptime_ms: int = 0
    handlers: tuple[HandlerState, ...] = ()

    def validate(self) -> "WorkerState":
        """Return this.

        Raises: InvalidRequest naming the first field of a wrong type or out of range.
        """
        check_text("The name of a worker", self.name, 1)
        for field in ("host", "version", "postroom_version"):
            check_text(field, getattr(self, field))
        check_int("process", self.process)
        check_int("uptime_ms", self.uptime_ms, 0, MAX_DURATION_MS)
        handlers = check_items("handlers", self.handlers)
        if len(handlers) > MAX_HANDLERS:
            raise InvalidRequest(
                f"A worker must report at most {MAX_HANDLERS} handlers; it reported {len(handlers)}."
            )
        for each in handlers:
            check_type("A handler", each, HandlerState)
            for field in ("topic", "handler", "consumer"):
                check_text(field, getattr(each, field), 0 if field == "consumer" else 1, MAX_TEXT_CHARS)
            for field in ("concurrency", "in_use", "handled", "failed"):
                check_int(field, getattr(each, field))
        return msgspec.structs.replace(self, handlers=tuple(handlers))


def check_worker(value: object) -> WorkerState:
    """Return the state of a worker whose fields are valid, or raise InvalidRequest."""
    return check_type("The worker", value, WorkerState).validate()


class WorkerReport(msgspec.Struct, frozen=True):
    """A worker as the owner of the mailbox knows it.

    Arguments:
        id: of its run.
        name, host, process, version, postroom_version: as of `WorkerState`.
        started_at: log time.
        silent_ms: time since its latest report.
        is_stale: it has not reported for 30 s: it was stopped, hangs, or can't reach the owner.
        principal: of its capability; None for a process of the mailbox's own user.
        handlers: with their numbers as of the latest report.
    """

    id: str
    name: str
    host: str
    process: int
    version: str
    postroom_version: str
    started_at: str
    silent_ms: int
    is_stale: bool
    principal: str | None = None
    handlers: list[HandlerState] = []


class _Entry(NamedTuple):
    """A worker, and the log time (µs) of its latest report."""

    worker: WorkerState
    seen: int

    @property
    def size(self) -> int:
        """Return how much of the registry's capacity the worker and its handlers take."""
        return 1 + len(self.worker.handlers)


class WorkerRegistry:
    """The workers of a mailbox, in the memory of its owner.

    At capacity, the principal with the most workers and handlers loses those that are silent for longest, so
    that no principal can displace the workers of others.

    Arguments:
        now: returns the log time, µs.
    """

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._entries: dict[tuple[str | None, str], _Entry] = {}
        """Latest reports by principal and id; the oldest report is first."""
        self._sizes: Counter[str | None] = Counter()

    def report(self, id_: str, worker: WorkerState, principal: str | None, *, ended: bool) -> None:
        """Note a report of a worker.

        Arguments:
            ended: the worker ends, and is forgotten.
        """
        key, now = (principal, id_), self._now()
        self._remove(key)
        if not ended:
            entry = self._entries[key] = _Entry(worker, now)
            self._sizes[principal] += entry.size
        self._forget(now)

    def list_workers(self) -> list[WorkerReport]:
        """Return the workers, stale ones last."""
        now = self._now()
        self._forget(now)
        return sort_workers(_make_report(*each, now) for each in self._entries.items())

    def _forget(self, now: int) -> None:
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if entry.seen > now - FORGET_MS * US_PER_MS:
                break
            self._remove(key)
        while self._sizes.total() > CAPACITY:
            ((principal, _),) = self._sizes.most_common(1)
            self._remove(next(key for key in self._entries if key[0] == principal))

    def _remove(self, key: tuple[str | None, str]) -> None:
        if (entry := self._entries.pop(key, None)) is None:
            return
        self._sizes[key[0]] -= entry.size
        if not self._sizes[key[0]]:
            del self._sizes[key[0]]


def sort_workers(workers: Iterable[WorkerReport]) -> list[WorkerReport]:
    """Return workers by name, host and process, stale ones last."""
    return sorted(workers, key=lambda each: (each.is_stale, each.name, each.host, each.process, each.id))


def _make_report(key: tuple[str | None, str], entry: _Entry, now: int) -> WorkerReport:
    worker, silent_ms = entry.worker, max(0, now - entry.seen) // US_PER_MS
    return WorkerReport(
        key[1],
        worker.name,
        worker.host,
        worker.process,
        worker.version,
        worker.postroom_version,
        rfc3339(max(0, entry.seen - worker.uptime_ms * US_PER_MS)) or "",
        silent_ms,
        silent_ms > STALE_MS,
        key[0],
        list(worker.handlers),
    )
