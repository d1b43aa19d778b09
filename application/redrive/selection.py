"""Selection of dead letters by the specification of a redrive job."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from postroom.application.mailbox.stored_snapshots import fold_message
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.message_lists import describe_message
from postroom.domain.errors import BrokenLog
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.message import Message, MessageDeadLettered, MessageSent
from postroom.domain.record import Record
from postroom.domain.redrive.job import RedriveAdvanced, RedriveJob, RedriveSkipped
from postroom.domain.redrive.spec import RedriveSpec, is_dead

CHUNK = 500
"""Number of messages that are compared without yielding, and read from the log at a time."""


class Candidate(NamedTuple):
    """A dead letter, and the position of its dead-lettering."""

    last: int
    message: Message


async def find_candidates(
    spec: RedriveSpec, mailbox: Mailbox, cutoff: int, cursor: int = 0
) -> list[Candidate]:
    """Return the dead letters that match by the state of the mailbox, in the order of their dead-lettering.

    Arguments:
        cursor, cutoff: positions; only messages dead-lettered after `cursor` and up to `cutoff` match.
    """
    candidates: list[Candidate] = []
    for topic in list(mailbox.topics.values()):
        if not topic.dead or not spec.covers_topic(topic.name):
            continue
        streams = spec.streams(mailbox.name, topic.name)
        messages = iter(list(topic.dead.values()))
        while chunk := list(islice(messages, CHUNK)):
            candidates += (
                Candidate(each.last, each)
                for each in chunk
                if cursor < each.last <= cutoff
                and is_dead(each)
                and (streams is None or each.stream in streams)
                and spec.covers_state(each)
            )
            await asyncio.sleep(0)  # lets the mailbox run
    candidates.sort(key=lambda each: each.last)
    return candidates


async def find_changed(job: RedriveJob, log: EventLogReader, others: AbstractSet[bytes]) -> list[bytes]:
    """Return the messages that a job selected, but that changed before it reached them.

    They were dead letters at its cut-off and matched then; the log is read up to there.

    Arguments:
        others: selected messages that did not change.
    """
    streams = await asyncio.to_thread(_dead_letters_at, log, job)
    candidates = await asyncio.to_thread(_candidates_at, log, job, streams - others)
    candidates.sort(key=lambda each: each.last)
    changed: list[bytes] = []
    async for chunk in select(job.spec, candidates, log):
        changed += (each.message.stream for each in chunk)
    return changed[: job.left - len(others)]


def _dead_letters_at(log: EventLogReader, job: RedriveJob) -> set[bytes]:
    """Return the messages that were dead letters at a job's cut-off and have no outcome yet."""
    dead: set[bytes] = set()
    for position, event in log.replay():
        if position > job.cutoff:
            break
        if isinstance(event, MessageDeadLettered):
            dead.add(event.stream)
        else:
            dead.discard(event.stream)
    for record in log.read_stream(job.job):
        if isinstance(record.event, RedriveSkipped):
            dead.discard(record.event.message)
        elif isinstance(record.event, RedriveAdvanced):
            changed = range(record.position - record.event.moved, record.position)
            dead.difference_update(each.stream for each in log.at_positions(changed).values())
    return dead


def _candidates_at(log: EventLogReader, job: RedriveJob, streams: AbstractSet[bytes]) -> list[Candidate]:
    """Return the messages that matched by their state at a job's cut-off."""
    candidates = []
    for stream, records in log.read_streams(streams).items():
        message = fold_message(each for each in records if each.position <= job.cutoff)
        if message is None or not job.spec.covers_topic(message.topic):
            continue
        named = job.spec.streams(log.mailbox, message.topic)
        if is_dead(message) and (named is None or stream in named) and job.spec.covers_state(message):
            candidates.append(Candidate(message.last, message))
    return candidates


async def select(
    spec: RedriveSpec, candidates: Sequence[Candidate], log: EventLogReader
) -> AsyncIterator[list[Candidate]]:
    """Yield the candidates that match, in a list per chunk.

    Messages whose records can't be read match only if the specification has no criteria for records.
    """
    for start in range(0, len(candidates), CHUNK):
        yield await find_matches(spec, candidates[start : start + CHUNK], log)


async def find_matches(
    spec: RedriveSpec, candidates: Sequence[Candidate], log: EventLogReader
) -> list[Candidate]:
    """Return the candidates of a chunk that match; see `select`."""
    if not spec.needs_log:
        return list(candidates)
    return await asyncio.to_thread(_read_matches, spec, candidates, log)


def _read_matches(spec: RedriveSpec, candidates: Sequence[Candidate], log: EventLogReader) -> list[Candidate]:
    """Return the candidates that match by their records; slow for the words of large payloads."""
    records = read_records(log, [each.message.position for each in candidates])
    return [each for each in candidates if _matches(spec, each, records, log.mailbox)]


def _matches(spec: RedriveSpec, candidate: Candidate, records: dict[int, Record], mailbox: str) -> bool:
    record = records.get(candidate.message.position)
    sent = None if record is None else record.event
    return (
        isinstance(sent, MessageSent)
        and sent.stream == candidate.message.stream
        and spec.covers_content(describe_message(mailbox, sent, candidate.message))
    )


def read_records(log: EventLogReader, positions: Sequence[int]) -> dict[int, Record]:
    """Return the records at these positions, except in commits that can't be decoded."""
    try:
        return log.at_positions(positions)
    except BrokenLog:
        records: dict[int, Record] = {}
        for position in positions:
            with suppress(BrokenLog):
                records |= log.at_positions([position])
        return records
