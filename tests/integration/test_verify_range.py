"""A log is verified in parts: together they notice every change of a commit, and each is bounded."""

from collections.abc import Callable
from typing import Any

import pytest
import pytest_asyncio

from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.mailbox.codec import make_commit
from postroom.application.queries.verify import RangeVerification, VerifyLog, VerifyRange
from postroom.domain.commit import Commit
from postroom.domain.errors import BrokenLog, InvalidRequest, NotFound
from postroom.domain.mailbox.events import LogTruncated
from postroom.domain.names import mailbox_stream
from tests.support.altered_log import AlteredLog
from tests.support.stores import MAILBOX, Place, message


@pytest_asyncio.fixture
async def log() -> AlteredLog:
    """The log of a mailbox to which six messages were sent, each in a commit of its own."""
    log = AlteredLog(MAILBOX)
    async with Place(lambda: log).open() as mailbox:
        for _ in range(6):
            await mailbox.send_message(message())
    return log


@pytest.fixture
def victim(log: AlteredLog) -> Commit:
    """The commit of a message in the middle of the log."""
    sends = [each for each in log.commits() if each.envelopes]
    assert len(sends) == 6
    return sends[3]


def verify_all(log: MemoryEventLog, limit: int = 1, first: int = 1) -> list[RangeVerification]:
    """Verify a log in parts, each of which continues the one before."""
    parts = [VerifyRange(log)(first, limit=limit)]
    while parts[-1].following is not None:
        parts.append(VerifyRange(log)(parts[-1].following, chain=parts[-1].chain, limit=limit))
    return parts


@pytest.mark.parametrize("limit", [1, 3, 100])
def test_the_parts_together_are_the_whole_log(log: AlteredLog, limit: int) -> None:
    parts, whole = verify_all(log, limit), VerifyLog(log)()
    assert [each.first for each in parts] == [1, *(each.last + 1 for each in parts[:-1])]
    assert (parts[-1].last, parts[-1].chain) == (whole.last, whole.chain)
    assert sum(each.commits for each in parts) == len(list(log.commits()))
    assert sum(each.messages for each in parts) == whole.messages == 6


def test_a_range_ends_with_the_commit_of_its_last_position(log: AlteredLog, victim: Commit) -> None:
    part = VerifyRange(log)(victim.first, victim.last)
    assert (part.first, part.last, part.commits, part.following) == (victim.first, victim.last, 1, None)


ALTERATIONS: dict[str, Callable[[Commit], dict[str, Any]]] = {
    "the time": lambda commit: {"at": commit.at + 1},
    "the epoch": lambda commit: {"epoch": 9},
    "the events": lambda commit: {"events": commit.events + b"\x00"},
    "the chain": lambda commit: {"chain": bytes(32)},
    "an envelope": lambda commit: {"envelopes": commit.envelopes.replace(b"hello", b"HELLO")},
    "an envelope too few": lambda commit: {"envelopes": b""},
    "another encoding of the envelopes": lambda commit: {"envelopes": b"\xdc\x00\x01" + commit.envelopes[1:]},
}


@pytest.mark.parametrize("alteration", ALTERATIONS)
@pytest.mark.parametrize("limit", [1, 100])
def test_a_change_is_noticed_where_it_is(
    log: AlteredLog, victim: Commit, alteration: str, limit: int
) -> None:
    log.alter(victim.first, **ALTERATIONS[alteration](victim))
    with pytest.raises(BrokenLog, match=f"position[s]? {victim.first}\\b") as error:
        verify_all(log, limit)
    assert error.value.position == victim.first


@pytest.mark.parametrize("limit", [1, 100])
def test_a_commit_that_is_missing_is_noticed(log: AlteredLog, victim: Commit, limit: int) -> None:
    log.remove(victim.first)
    with pytest.raises(BrokenLog, match=r"commit at position|jumps from position") as error:
        verify_all(log, limit)
    assert error.value.position == victim.first
    with pytest.raises(BrokenLog, match=f"The log jumps to position {victim.last + 1}"):
        VerifyRange(log)(victim.last + 1)


def test_a_part_that_continues_another_notices_that_the_log_was_rewritten_meanwhile(
    log: AlteredLog, victim: Commit
) -> None:
    part = VerifyRange(log)(1, victim.first - 1)
    log.alter(part.last, chain=bytes(32))
    with pytest.raises(BrokenLog, match=f"has another commit at position {part.last} than before"):
        VerifyRange(log)(part.last + 1, chain=part.chain)


def test_the_last_part_notices_that_the_end_was_cut_off(log: AlteredLog) -> None:
    head = log.head()
    assert head is not None
    log.remove(head.position)
    with pytest.raises(BrokenLog, match=f"reached position {head.position} when it was last closed"):
        verify_all(log)


def test_a_log_whose_start_retention_removed_is_verified_from_what_it_recorded(
    log: AlteredLog, victim: Commit
) -> None:
    head = log.head()
    assert head is not None
    event = LogTruncated(mailbox_stream(MAILBOX), 9, head.at, victim.last, victim.chain)
    log.append([make_commit([event], [0], first=head.position + 1, epoch=head.epoch, previous=head.chain)])
    log.truncate(victim.last, 100)
    first = victim.last + 1
    assert verify_all(log, first=first)[0].first == first
    with pytest.raises(NotFound, match=f"no position 1; it has positions {first} to {head.position + 1}"):
        VerifyRange(log)(1)
    log.remove(first)
    with pytest.raises(BrokenLog, match=f"starts at position {first + 1}, but no retention is recorded"):
        VerifyRange(log)(first + 1)


@pytest.mark.parametrize(("first", "limit"), [(0, 1), (1 << 40, 1), (1, 0), (1, 100_001)])
def test_numbers_out_of_bounds_are_refused(log: AlteredLog, first: int, limit: int) -> None:
    with pytest.raises(InvalidRequest, match="must be"):
        VerifyRange(log)(first, limit=limit)


def test_an_empty_log_has_no_range() -> None:
    with pytest.raises(NotFound, match="has no position 1; it is empty"):
        VerifyRange(MemoryEventLog(MAILBOX))(1)
