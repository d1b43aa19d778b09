"""Codec of domain events: bytes of commits, their compression, the format of stores (ADR 0066, ADR 0101)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, chain, repeat
from typing import TypeVar

import msgspec
import zstandard
from blake3 import blake3

from postroom.application.mailbox.event_columns import RUNS, AnyRun, SentRun
from postroom.application.version import own_version
from postroom.domain.commit import (
    Commit,
    EventColumns,
    EventParts,
    IndexEntry,
    LastEvent,
    Run,
    by_column,
    expand,
    link,
)
from postroom.domain.errors import BrokenLog, UnusableStore
from postroom.domain.integrity import has_intact_payload
from postroom.domain.message import MessageSent
from postroom.domain.names import STREAM_BYTES
from postroom.domain.record import Event, Record

_encode = msgspec.msgpack.Encoder().encode
_decode_runs = msgspec.msgpack.Decoder(list[AnyRun]).decode
_decode_envelopes = msgspec.msgpack.Decoder(list[bytes | int]).decode
_DECODE_ERRORS = (msgspec.MsgspecError, TypeError, ValueError, IndexError, RecursionError)


def encode_events(events: EventParts, distances: Sequence[int]) -> tuple[bytes, bytes]:
    """Return events and the envelopes of their messages, encoded as in a commit.

    Arguments:
        events: at least one, all of the same log time.
        distances: see `Record.distance`.

    Raises: MsgspecError, TypeError, ValueError or OverflowError when an event could not be decoded again.
    """
    return _encode_columns(by_column(events), distances)


_ENVELOPES = MessageSent.__struct_fields__.index("envelope")


def _encode_columns(parts: Sequence[EventColumns], distances: Sequence[int]) -> tuple[bytes, bytes]:
    runs: list[Run] = []
    envelopes: list[bytes] = []
    start = 0
    for part in parts:
        end = start + len(part.columns[0])
        runs.append(RUNS[part.type].of(part.columns, distances[start:end]))
        start = end
        if part.type is MessageSent:
            envelopes += part.columns[_ENVELOPES]
    encoded = _encode(runs)
    _decode_runs(encoded)
    return encoded, encode_envelopes(envelopes) if envelopes else b""


def encode_envelopes(envelopes: Sequence[bytes]) -> bytes:
    """Return the envelopes of a commit's messages, encoded as in a commit; empty if it has no messages.

    A repeated envelope is encoded as the index of its first place (ADR 0119): copies for subscriptions have
    the envelope of their original.
    """
    if not envelopes:
        return b""
    if len(set(envelopes)) == len(envelopes):
        return _encode(envelopes)
    places: dict[bytes, int] = {}
    firsts = [places.setdefault(each, index) for index, each in enumerate(envelopes)]
    return _encode([envelopes[first] if first == index else first for index, first in enumerate(firsts)])


def make_commit(
    events: EventParts,
    distances: Sequence[int],
    *,
    first: int,
    epoch: int,
    previous: bytes,
    last_events: Sequence[LastEvent] = (),
) -> Commit:
    """Return the commit of events from position `first` on.

    Arguments:
        events, distances: see `encode_events`.
        previous: chain hash of the previous commit.
        last_events: see `Commit`.

    Raises: as `encode_events`.
    """
    parts = by_column(events)
    at = parts[0].columns[2][0]
    encoded, envelopes = _encode_columns(parts, distances)
    entries: list[IndexEntry] = []
    position = first
    for part in parts:
        streams, versions, times, *_ = part.columns
        if times.count(at) != len(times):
            raise ValueError("the events of a commit have different log times")
        positions = range(position, position + len(streams))
        some = distances[position - first : position - first + len(streams)]
        if not any(some):
            entries += map(IndexEntry, streams, versions, positions)
        elif 0 in some:
            entries += [
                IndexEntry(*each)
                for *each, distance in zip(streams, versions, positions, some, strict=True)
                if not distance
            ]
        position += len(streams)
    last = position - 1
    chain_hash = link(previous, first, last, epoch, at, encoded)
    return Commit(first, last, epoch, at, chain_hash, encoded, envelopes, entries, last_events)


def decode_runs(commit: Commit) -> list[AnyRun]:
    """Return the runs of a commit.

    Raises: BrokenLog when they can't be decoded, or have another number of events than the commit.
    """
    try:
        runs = _decode_runs(commit.events)
    except _DECODE_ERRORS as error:
        raise _undecodable(commit, error) from error
    if sum(run.count for run in runs) != commit.event_count or any(
        run.count < 1 or len(run.streams) != STREAM_BYTES * run.count for run in runs
    ):
        raise _undecodable(commit, "it has another number of events than positions")
    return runs


def stream_ids(commit: Commit) -> Iterator[bytes]:
    """Yield the stream of each event of a commit.

    Raises: BrokenLog when it can't be decoded.
    """
    for run in decode_runs(commit):
        yield from run.stream_ids()


def decode_events(commit: Commit) -> Iterator[Event]:
    """Yield the events of a commit; envelopes that were not read, or altered, are empty.

    Raises: BrokenLog when they can't be decoded.
    """
    return chain.from_iterable(decode_by_type(commit))


def decode_by_type(commit: Commit) -> Iterator[list[Event]]:
    """Yield consecutive events of one type; otherwise as `decode_events`."""
    return (events for _, events in _runs_with_events(commit))


def to_records(commit: Commit) -> Iterator[Record]:
    """Yield the records of a commit; envelopes that were not read, or altered, are empty: see `is_intact`.

    Raises: as `decode_events`.
    """
    position = commit.first
    for run, events in _runs_with_events(commit):
        try:
            distances, hashes = expand(run.distances, run.count), run.envelope_hashes()
        except ValueError as error:
            raise _undecodable(commit, error) from error
        for event, distance, envelope_hash in zip(events, distances, hashes, strict=False):
            yield Record(position, commit.epoch, commit.chain, event, distance, envelope_hash)
            position += 1


def is_intact(record: Record) -> bool:
    """Return whether a message's envelope and headers match their hashes (svc-mailbox I-12)."""
    sent = record.event
    return (
        isinstance(sent, MessageSent)
        and blake3(sent.envelope).digest() == record.envelope_hash
        and has_intact_payload(sent)
    )


def _runs_with_events(commit: Commit) -> Iterator[tuple[AnyRun, list[Event]]]:
    runs = decode_runs(commit)
    try:
        envelopes = decode_envelopes(commit, sum(run.count for run in runs if type(run) is SentRun))
        for run in runs:
            yield run, list(run.events(commit.at, envelopes))
    except _DECODE_ERRORS as error:
        raise _undecodable(commit, error) from error


def envelopes_by_position(commit: Commit) -> dict[int, bytes]:
    """Return the envelopes of the messages that a commit sent, by position; those altered are empty.

    Raises: as `decode_runs`.
    """
    runs = decode_runs(commit)
    ends = accumulate((run.count for run in runs), initial=commit.first)
    sent = [range(end, end + run.count) for end, run in zip(ends, runs, strict=False) if type(run) is SentRun]
    envelopes = decode_envelopes(commit, sum(map(len, sent)))
    return dict(zip(chain.from_iterable(sent), envelopes, strict=True))


def decode_envelopes(commit: Commit, messages: int) -> Iterator[bytes]:
    """Return the envelopes of a commit's messages; empty if they were not read, or altered."""
    if commit.envelopes:
        with suppress(*_DECODE_ERRORS):
            envelopes: list[bytes] = []
            for each in _decode_envelopes(commit.envelopes):
                envelopes.append(each if isinstance(each, bytes) else envelopes[each])
            if len(envelopes) == messages:
                return iter(envelopes)
    return repeat(b"", messages)


def _undecodable(commit: Commit, reason: object) -> BrokenLog:
    return BrokenLog(
        f"The commit of positions {commit.first} to {commit.last} can't be decoded ({reason}): it was "
        "altered, or a newer version of Postroom wrote it. Restore the store from a backup, or read it with "
        "that version.",
        commit.first,
    )


T = TypeVar("T")

LEVEL = 1
MIN_BYTES = 256
"""Size below which compression saves less than it costs."""
MAX_BYTES = 1 << 30
"""Maximum size of a part; no store holds larger values."""
_MAGIC = b"\x28\xb5\x2f\xfd"

# Compressors that are not in use. Making one takes 9 µs, five times as long as compressing a small part. A
# thread takes one out while it uses it, so there are as many as are used at a time, not as many as threads.
_compressors: list[zstandard.ZstdCompressor] = []
_decompressors: list[zstandard.ZstdDecompressor] = []


def compress(part: bytes) -> bytes:
    """Return a part of a commit, compressed where that makes it smaller.

    MessagePack never begins like a compressed part.
    """
    if len(part) < MIN_BYTES:
        return part
    compressor = _take(_compressors, _new_compressor)
    compressed = compressor.compress(part)
    _compressors.append(compressor)
    return compressed if len(compressed) < len(part) else part


def decompress(part: bytes, position: int) -> bytes:
    """Return the part that `compress` returned.

    Arguments:
        position: of the commit, for the error.

    Raises: BrokenLog when it can't be decompressed, or has another size than it states.
    """
    if not part.startswith(_MAGIC):
        return part
    try:
        size = zstandard.frame_content_size(part)
        if not 0 <= size <= MAX_BYTES:
            raise ValueError(f"it states a size of {size} bytes")
        decompressor = _take(_decompressors, zstandard.ZstdDecompressor)
        whole = decompressor.decompress(part, max_output_size=size, allow_extra_data=False)
        _decompressors.append(decompressor)
        if len(whole) != size:
            raise ValueError(f"it has {len(whole)} bytes instead of {size}")
        return whole
    except (zstandard.ZstdError, ValueError, MemoryError) as error:
        raise BrokenLog(
            f"The commit at position {position} can't be decompressed ({error}): it was altered. Restore the "
            "store from a backup.",
            position,
        ) from error


def decompress_envelopes(part: bytes) -> bytes:
    """Return the envelopes of a commit; empty if they were altered, which their hashes tell."""
    try:
        return decompress(part, 0)
    except BrokenLog:
        return b""


def _take(unused: list[T], make: Callable[[], T]) -> T:
    try:
        return unused.pop()
    except IndexError:
        return make()


def _new_compressor() -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(LEVEL)


FORMAT = 4
"""Number of the format of tables and events that this version writes.

It grows by one when a former version could not use records of this one: with a new type of event, a new
version of one, or a change of the tables that a former version does not know. A store is frozen as a fixture
of the tests then, and SQLite and PostgreSQL have a migration to the new format.

1: commits (since 23 November 2026). 2: the format is recorded in the store, and settings are events.
3: messages have their sticky keys, by which they may be ordered, and are rescheduled. 4: settings have saved
searches, and snapshots the deliveries of messages in a struct of their own.
"""
RECORDS = 0
"""The format before commits, which `postroom import-store` reads."""


def check_format(store: str, format_: int, writer: str = "") -> None:
    """Check that this version can read a store.

    Arguments:
        store: its name, for messages.
        format_: its format.
        writer: the version of Postroom that wrote it first in that format.

    Raises: UnusableStore.
    """
    if format_ > FORMAT:
        raise UnusableStore(
            f"The store {store} has the format {format_} of Postroom {writer}, and this version, "
            f"{own_version()}, reads formats up to {FORMAT}; install Postroom {writer} or a later version."
        )
    if format_ <= RECORDS:
        raise UnusableStore(
            f"The store {store} has the format of before 23 November 2026; run `postroom import-store "
            f"{store} NEW` to copy it into a new store."
        )
