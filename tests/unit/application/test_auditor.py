"""The auditor records each read with its outcome before the answer goes out."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from postroom.application.access.audit import AuditEntry, Auditor
from postroom.domain.capability.access import combine
from postroom.domain.capability.rights import Expires, Right, Rights
from postroom.domain.capability.token import Identifier
from postroom.domain.errors import Forbidden, Unavailable
from tests.support.access import MemoryAuditLog

ACCESS = combine(
    Identifier(key_id=b"k" * 8, nonce=b"n" * 16, principal="shop", epoch=1, issued_at=0, rights=Rights()),
    [Expires(1)],
)


class FullAuditLog:
    """An audit log whose store can't be written."""

    async def record(self, entries: Sequence[AuditEntry], /) -> None:
        raise Unavailable("The disk is full.")


async def read(log: MemoryAuditLog | FullAuditLog, answer: Callable[[], Awaitable[list[int]]]) -> list[int]:
    """Read through an auditor."""
    auditor = Auditor(log, ACCESS, "acme@one", lambda: 7)
    return await auditor.run(Right.READ_PAYLOAD, answer, len, topics=["orders"], criteria=["text"])


async def three() -> list[int]:
    return [1, 2, 3]


async def test_an_answer_is_recorded_with_its_size() -> None:
    log = MemoryAuditLog()
    assert await read(log, three) == [1, 2, 3]
    assert log.entries == [
        AuditEntry(
            at=7,
            principal="shop",
            capability=(b"n" * 16).hex(),
            operation="read-payload",
            mailbox="acme@one",
            topics=("orders",),
            target="",
            matches=3,
            outcome="allowed",
            corr_id="",
            criteria=("text",),
        )
    ]


@pytest.mark.parametrize(
    ("error", "outcome"), [(Forbidden("no"), "E_CAP_SCOPE"), (KeyError("k"), "E_INTERNAL")]
)
async def test_an_error_is_recorded_as_the_outcome(error: Exception, outcome: str) -> None:
    async def fail() -> list[int]:
        raise error

    log = MemoryAuditLog()
    with pytest.raises(type(error)):
        await read(log, fail)
    assert [(each.outcome, each.matches) for each in log.entries] == [(outcome, 0)]


async def test_a_caller_that_goes_away_is_recorded() -> None:
    log = MemoryAuditLog()
    call = asyncio.create_task(read(log, asyncio.Event().wait))  # type: ignore[arg-type] # never answers
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call])
    assert [each.outcome for each in log.entries] == ["cancelled"]


async def test_a_read_that_can_not_be_recorded_is_refused() -> None:
    with pytest.raises(Unavailable, match="disk is full"):
        await read(FullAuditLog(), three)
