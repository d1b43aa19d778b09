"""Copy of a store's content into an empty store of any kind."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeVar

from postroom.application.ports.backup import MailboxHead, StoreLoader, StoreSnapshot
from postroom.domain.commit import Commit

T = TypeVar("T")

BATCH_ROWS = 5_000
BATCH_COMMITS, BATCH_BYTES = 500, 16 << 20
"""Bounds of the commits that are in memory at a time; one may be larger."""


def copy_store(
    snapshot: StoreSnapshot,
    loader: StoreLoader,
    heads: Sequence[MailboxHead],
    added: Mapping[str, Sequence[Commit]] = {},
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Copy all logs, with their indexes, snapshots and seals, and the recorded messages.

    Arguments:
        heads: the ends of the logs of the snapshot.
        added: commits to append after those of a mailbox.
        progress: called with the number of events copied.
    """
    count = 0
    for head in heads:
        name = head.mailbox
        more = added.get(name, ())
        loader.add_mailbox(name, max(head.first, 1), more[-1].last if more else head.position)
        for commits in _commits(snapshot.commits(name)):
            loader.append(name, commits)
            count += sum(commit.event_count for commit in commits)
            progress(count)
        for entries in _batches(snapshot.entries(name), BATCH_ROWS):
            loader.add_entries(name, entries)
        if more:
            loader.append(name, more)
            count += sum(commit.event_count for commit in more)
            progress(count)
        loader.save_snapshots(name, snapshot.snapshots(name))
        seal = snapshot.seal(name)
        if seal is not None:
            loader.save_seal(name, seal)
    for rows in _batches(snapshot.recorded_messages(), BATCH_ROWS):
        loader.record_messages(rows)


def _commits(commits: Iterable[Commit]) -> Iterator[list[Commit]]:
    batch: list[Commit] = []
    size = 0
    for commit in commits:
        batch.append(commit)
        size += len(commit.events) + len(commit.envelopes)
        if len(batch) >= BATCH_COMMITS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _batches(rows: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(rows)
    while batch := list(islice(iterator, size)):
        yield batch
