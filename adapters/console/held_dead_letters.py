"""Dead letters as the mailbox itself holds them, filtered and grouped for stores without read models."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, Final

from postroom.adapters.console.values import parse_number
from postroom.application.operations.mailbox import Mailbox
from postroom.application.page import Page
from postroom.application.ports.dead_letters import (
    DeadLetter,
    DeadLetterFilter,
    DeadLetterGroup,
    DeadLetterGroupFilter,
    DeadLetterGroupPage,
)
from postroom.application.queries.mailbox_past import to_us
from postroom.application.query_results import DeadLetter as HeldDeadLetter
from postroom.domain.integrity import fingerprint
from postroom.domain.search import topic_matches

MAX_READ: Final = 5_000
"""Maximum number of dead letters that a page reads; it reads the oldest messages first."""
_AT_ONCE: Final = 1_000


async def read_held(mailbox: Mailbox, filter_: DeadLetterFilter) -> tuple[list[DeadLetter], bool]:
    """Return the matching dead letters, latest first, and whether it read all dead letters of the mailbox.

    Arguments:
        mailbox: restricted to the caller's rights.
    """
    topic = filter_.topics[0] if len(filter_.topics) == 1 and "*" not in filter_.topics[0] else None
    letters: list[DeadLetter] = []
    read, cursor = 0, None
    while True:
        part = await mailbox.list_dead_letters(topic, reason=filter_.reason, limit=_AT_ONCE, cursor=cursor)
        letters += filter(lambda each: _matches(each, filter_), map(_convert, part.items))
        read, cursor = read + len(part.items), part.next_cursor
        if cursor is None or read >= MAX_READ:
            break
    return sorted(letters, key=lambda each: (each.last_seen, each.id), reverse=True), cursor is None


def page_of(letters: Sequence[DeadLetter], limit: int, cursor: str | None) -> Page[DeadLetter]:
    """Return a page of dead letters; a cursor is the number of dead letters before the page."""
    start = parse_number("cursor", cursor or "") or 0
    end = start + limit
    return Page(tuple(letters[start:end]), str(end) if end < len(letters) else None)


def group(letters: Sequence[DeadLetter], filter_: DeadLetterGroupFilter) -> DeadLetterGroupPage:
    """Return a page of the groups of dead letters; see `page_of` for the cursor."""
    if not letters:
        return DeadLetterGroupPage(())
    start = filter_.since if filter_.since is not None else letters[-1].last_seen
    end = filter_.until if filter_.until is not None else letters[0].last_seen + 1
    width = max(1, -(-(end - start) // max(1, filter_.bars)))
    members: dict[tuple[str, ...], list[DeadLetter]] = {}
    for each in letters:
        members.setdefault(tuple(getattr(each, name) for name in filter_.by), []).append(each)
    groups = [_group(each, filter_.bars, start, width) for each in members.values()]
    if filter_.order == "largest":
        groups.sort(key=lambda each: -each.count)
    first = parse_number("cursor", filter_.cursor or "") or 0
    last = first + filter_.limit
    return DeadLetterGroupPage(
        tuple(groups[first:last]),
        letters=len(letters),
        groups=len(groups),
        start=start,
        width=width,
        next_cursor=str(last) if last < len(groups) else None,
    )


def _group(letters: Sequence[DeadLetter], bars: int, start: int, width: int) -> DeadLetterGroup:
    trend = [0] * bars
    for each in letters if bars else ():
        trend[min(bars - 1, max(0, (each.last_seen - start) // width))] += 1
    return DeadLetterGroup(
        _common(each.topic for each in letters),
        _common(each.reason for each in letters),
        _common(each.fingerprint for each in letters),
        len(letters),
        letters[-1].last_seen,
        letters[0].last_seen,
        tuple(trend),
        letters[0],
    )


def _common(values: Iterator[str]) -> str | None:
    """Return the value if all are equal, else None."""
    different = set(values)
    return different.pop() if len(different) == 1 else None


def _matches(letter: DeadLetter, filter_: DeadLetterFilter) -> bool:
    text = (filter_.text or "").casefold()
    return (
        (not filter_.topics or any(topic_matches(each, letter.topic) for each in filter_.topics))
        and filter_.fingerprint in (None, letter.fingerprint)
        and (filter_.since is None or letter.last_seen >= filter_.since)
        and (filter_.until is None or letter.last_seen < filter_.until)
        and text in (letter.last_error or "").casefold()
    )


def _convert(letter: HeldDeadLetter) -> DeadLetter:
    facts: dict[str, Any] = {
        name: getattr(letter, name)
        for name in ("mailbox", "topic", "shard", "message_id", "reason", "attempt", "last_error", "redriven")
    }
    return DeadLetter(
        **facts,
        id=letter.position,
        original_subject=letter.topic,
        fingerprint=fingerprint(letter.reason, letter.last_error),
        first_seen=to_us(datetime.fromisoformat(letter.first_seen)),
        last_seen=to_us(datetime.fromisoformat(letter.last_seen)),
        redriven_at=None,
    )
