"""Copy of a store's content into an empty store of any kind."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import TypeVar

from postroom.application.ports.backup import MailboxHead, StoreLoader, StoreSnapshot
from postroom.domain.record import Record

T = TypeVar("T")

BATCH_RECORDS = 5_000


def copy_store(
    snapshot: StoreSnapshot,
    loader: StoreLoader,
    heads: Sequence[MailboxHead],
    added: Mapping[str, Sequence[Record]] = {},
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Copy all logs, with their snapshots and seals, and the recorded messages.

    Arguments:
        heads: the ends of the logs of the snapshot.
        added: records to append after those of a mailbox.
        progress: called with the number of records copied.
    """
    count = 0
    for head in heads:
        name = head.mailbox
        more = added.get(name, ())
        loader.add_mailbox(name, max(head.first, 1), more[-1].position if more else head.position)
        for batch in _batches(chain(snapshot.records(name), more), BATCH_RECORDS):
            loader.append(name, batch)
            count += len(batch)
            progress(count)
        loader.save_snapshots(name, snapshot.snapshots(name))
        seal = snapshot.seal(name)
        if seal is not None:
            loader.save_seal(name, seal)
    for rows in _batches(snapshot.recorded_messages(), BATCH_RECORDS):
        loader.record_messages(rows)


def _batches(rows: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(rows)
    while batch := list(islice(iterator, size)):
        yield batch
