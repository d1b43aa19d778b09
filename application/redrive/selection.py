"""Selection of dead letters and waiting messages by the specification of a redrive job."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from itertools import islice
from operator import attrgetter

import msgspec

from postroom.application.mailbox.stored_snapshots import fold_message
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.message_lists import describe_message
from postroom.domain.errors import BrokenLog
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.message import (
    Message,
    MessageAcked,
    MessageDeadLettered,
    MessageExpired,
    MessageRedriven,
    MessageSent,
)
from postroom.domain.record import Event, Record
from postroom.domain.redrive.job import RedriveAdvanced, RedriveJob, RedriveSkipped
from postroom.domain.redrive.spec import RedriveSpec

CHUNK = 500
"""Number of messages that are compared without yielding, and read from the log at a time."""

_by_place = attrgetter("place")


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A message that may be selected, and its place; see `RedriveSpec.place_of`."""

    place: int
    message: Message


async def find_candidates(
    spec: RedriveSpec, mailbox: Mailbox, cutoff: int, cursor: int = 0
) -> list[Candidate]:
    """Return the messages that match by the state of the mailbox, in the order of their places.

    Arguments:
        cursor, cutoff: positions; only messages with a place after `cursor` and up to `cutoff` match.
    """
    topics = {
        name: spec.streams(mailbox.name, name) for name in list(mailbox.topics) if spec.covers_topic(name)
    }
    if spec.selects_waiting:  # in the order of their sends
        parts = [list(mailbox.messages.values())]
    else:
        parts = [list(mailbox.topics[name].dead.values()) for name in topics]
    candidates: list[Candidate] = []
    for part in parts:
        messages = iter(part)
        while chunk := list(islice(messages, CHUNK)):
            candidates += (
                Candidate(place, each)
                for each in chunk
                if cursor < (place := spec.place_of(each)) <= cutoff
                and each.topic in topics
                and ((streams := topics[each.topic]) is None or each.stream in streams)
                and spec.covers_state(each)
            )
            await asyncio.sleep(0)  # lets the mailbox run
    if not spec.selects_waiting:
        candidates.sort(key=_by_place)
    return candidates


async def find_changed(job: RedriveJob, log: EventLogReader, mailbox: Mailbox) -> list[bytes]:
    """Return the messages that a job selected, but that changed before it reached them.

    They matched at its cut-off; the log is read up to there.
    """
    streams = iter(await asyncio.to_thread(_streams_at, log, job))
    candidates: list[Candidate] = []
    while chunk := list(islice(streams, CHUNK)):
        states = ((each, mailbox.messages.get(each)) for each in chunk)
        is_changed = {each for each, state in states if state is None or state.last > job.cutoff}
        candidates += await asyncio.to_thread(_candidates_at, log, job.spec, job.cutoff, is_changed)
    candidates.sort(key=_by_place)
    changed: list[bytes] = []
    async for matches in select(job.spec, candidates, log, job.cutoff):
        changed += (each.message.stream for each in matches)
    return changed[: job.left]


def _streams_at(log: EventLogReader, job: RedriveJob) -> set[bytes]:
    """Return the messages that may have matched at a job's cut-off and have no outcome yet."""
    streams: set[bytes] = set()
    is_waiting = job.spec.selects_waiting
    begins = (MessageSent, MessageRedriven) if is_waiting else MessageDeadLettered
    ends = (MessageAcked, MessageDeadLettered, MessageExpired) if is_waiting else Event
    for position, event in log.replay():
        if position > job.cutoff:
            break
        if isinstance(event, begins):
            streams.add(event.stream)
        elif isinstance(event, ends):
            streams.discard(event.stream)
    for record in log.read_stream(job.job):
        if isinstance(record.event, RedriveSkipped):
            streams.discard(record.event.message)
        elif isinstance(record.event, RedriveAdvanced):
            changed = range(record.position - record.event.moved, record.position)
            streams.difference_update(each.stream for each in log.at_positions(changed).values())
    return streams


def _candidates_at(
    log: EventLogReader, spec: RedriveSpec, cutoff: int, streams: AbstractSet[bytes]
) -> list[Candidate]:
    """Return the messages that matched by their state at a cut-off."""
    candidates = []
    for stream, records in log.read_streams(streams).items():
        message = fold_message(each for each in records if each.position <= cutoff)
        if message is None or not spec.covers_topic(message.topic):
            continue
        named = spec.streams(log.mailbox, message.topic)
        if (named is None or stream in named) and spec.covers_state(message):
            candidates.append(Candidate(spec.place_of(message), message))
    return candidates


async def select(
    spec: RedriveSpec, candidates: Sequence[Candidate], log: EventLogReader, cutoff: int
) -> AsyncIterator[list[Candidate]]:
    """Yield the candidates that match, in a list per chunk.

    Messages whose records can't be read match only if the specification has no criteria for records.
    """
    for start in range(0, len(candidates), CHUNK):
        yield await find_matches(spec, candidates[start : start + CHUNK], log, cutoff)
        await asyncio.sleep(0)  # lets the mailbox run


async def find_matches(
    spec: RedriveSpec, candidates: Sequence[Candidate], log: EventLogReader, cutoff: int
) -> list[Candidate]:
    """Return the candidates of a chunk that match, and did so at the cut-off; see `select`."""
    if spec.selects_waiting:
        changed = {each.message.stream for each in candidates if each.message.last > cutoff}
        if changed:  # such as a dead letter that was redriven since
            before = await asyncio.to_thread(_candidates_at, log, spec, cutoff, changed)
            changed -= {each.message.stream for each in before}
            candidates = [each for each in candidates if each.message.stream not in changed]
    if not spec.needs_log:
        return list(candidates)
    return await asyncio.to_thread(_read_matches, spec, candidates, log)


def _read_matches(spec: RedriveSpec, candidates: Sequence[Candidate], log: EventLogReader) -> list[Candidate]:
    """Return the candidates that match by their records; slow for the words of large payloads."""
    records = read_records(
        log, [each.message.position for each in candidates], envelopes=spec.match is not None
    )
    return [each for each in candidates if _matches(spec, each, records, log.mailbox)]


def _matches(spec: RedriveSpec, candidate: Candidate, records: dict[int, Record], mailbox: str) -> bool:
    record = records.get(candidate.message.position)
    sent = None if record is None else record.event
    return (
        isinstance(sent, MessageSent)
        and sent.stream == candidate.message.stream
        and spec.covers_content(describe_message(mailbox, sent, candidate.message))
    )


def read_records(
    log: EventLogReader, positions: Sequence[int], *, envelopes: bool = True
) -> dict[int, Record]:
    """Return the records at these positions, except in commits that can't be decoded.

    Arguments:
        envelopes: read them; otherwise, they may be empty.
    """
    try:
        return log.at_positions(positions, envelopes=envelopes)
    except BrokenLog:
        records: dict[int, Record] = {}
        for position in positions:
            with suppress(BrokenLog):
                records |= log.at_positions([position], envelopes=envelopes)
        return records
