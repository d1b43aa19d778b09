"""Codec: domain events to the bytes of commits and back (ADR 0066)."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, groupby, repeat

import msgspec
from blake3 import blake3

from postroom.application.mailbox.run import Run, expand
from postroom.application.mailbox.runs import RUNS, AnyRun, SentRun
from postroom.domain.commit import Commit, IndexEntry, LastEvent, link
from postroom.domain.errors import BrokenLog
from postroom.domain.event import Event
from postroom.domain.integrity import has_intact_payload
from postroom.domain.message import MessageSent
from postroom.domain.names import STREAM_BYTES
from postroom.domain.record import Record

_encode = msgspec.msgpack.Encoder().encode
_decode_runs = msgspec.msgpack.Decoder(list[AnyRun]).decode
_decode_envelopes = msgspec.msgpack.Decoder(list[bytes]).decode
_DECODE_ERRORS = (msgspec.MsgspecError, TypeError, ValueError, RecursionError)


def encode_events(events: Sequence[Event], distances: Sequence[int]) -> tuple[bytes, bytes]:
    """Return events and the envelopes of their messages, encoded as in a commit.

    Arguments:
        events: at least one, all of the same log time.
        distances: see `Record.distance`.

    Raises: MsgspecError, TypeError, ValueError or OverflowError when an event could not be decoded again.
    """
    runs: list[Run] = []
    envelopes: list[bytes] = []
    start = 0
    for cls, group in groupby(events, type):
        run = list(group)
        runs.append(RUNS[cls].of(run, distances[start : start + len(run)]))
        start += len(run)
        if cls is MessageSent:
            envelopes += [event.envelope for event in run]  # type: ignore[attr-defined]  # all MessageSent
    encoded = _encode(runs)
    _decode_runs(encoded)
    return encoded, encode_envelopes(envelopes)


def encode_envelopes(envelopes: Sequence[bytes]) -> bytes:
    """Return the envelopes of a commit's messages, encoded as in a commit; empty if it has no messages."""
    return _encode(envelopes) if envelopes else b""


def make_commit(
    events: Sequence[Event],
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
    at = events[0].at
    if [event.at for event in events].count(at) != len(events):
        raise ValueError("the events of a commit have different log times")
    encoded, envelopes = encode_events(events, distances)
    last = first + len(events) - 1
    chain_hash = link(previous, first, last, epoch, at, encoded)
    entries = [
        IndexEntry(event.stream, event.version, position)
        for event, distance, position in zip(events, distances, range(first, last + 1), strict=True)
        if not distance
    ]
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


def decode_envelopes(commit: Commit, messages: int) -> Iterator[bytes]:
    """Return the envelopes of a commit's messages; empty if they were not read, or altered."""
    if commit.envelopes:
        with suppress(*_DECODE_ERRORS):
            envelopes = _decode_envelopes(commit.envelopes)
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
