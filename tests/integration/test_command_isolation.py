"""A command that fails by a defect is answered alone; neighbours and the state in memory are untouched."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from postroom.adapters.compose import OwnedMailbox
from postroom.application.mailbox.stored_snapshots import fold
from postroom.application.messages import Sent
from postroom.application.ports.event_log import EventLog
from postroom.application.queries.verify import VerifyLog
from postroom.domain.commit import Commit
from postroom.domain.errors import BrokenLog, InternalError
from postroom.domain.mailbox.commands import Ack, Command, Extend, Nack, Receive, Send, SetPolicy
from postroom.domain.message import Headers, Receipt
from postroom.domain.policy import TopicPolicy
from tests.simulation.view import view
from tests.support.stores import Place, message, sqlite_place

SEND = Send(b"m" * 16, "orders", 1, b"h" * 32, b"c" * 32, Headers(1), b"envelope")


def changed(command: Command, **fields: Any) -> Command:
    """Return a command with values that no handler would pass on."""
    return msgspec.structs.replace(command, **fields)


DEFECTS: list[Any] = [
    changed(SEND, deliver_after_ms=0.5),
    changed(SEND, size=2**70),
    changed(SEND, deliver_after_ms=float("nan")),
    changed(SEND, idem_key=b"k"),
    changed(SEND, idem_key="\ud800"),
    changed(SEND, idem_key=["k"]),
    changed(SEND, sticky_key="\ud800"),
    changed(SEND, message=b"short"),
    changed(SEND, message=["m"]),
    changed(SEND, message="text", has_external_id=True),
    changed(SEND, headers=Headers(1.5)),  # type: ignore[arg-type]
    changed(SEND, headers=Headers(1, principal=b"p")),  # type: ignore[arg-type]
    changed(SEND, headers=Headers(1, custom_headers={"k": "\ud800"})),
    changed(SEND, headers=Headers(1, custom_headers={"k": 1})),  # type: ignore[dict-item]
    changed(SEND, envelope="text"),
    changed(SEND, payload_hash="text"),
    changed(SEND, ttl_ms="soon"),
    Receive(5, 1, 1),  # type: ignore[arg-type]
    Receive(("orders",), 1, 1, consumer=7),  # type: ignore[arg-type]
    Receive(("orders",), 1, 1, consumer="\ud800"),
    Receive(("orders",), "1", 1),  # type: ignore[arg-type]
    Ack("text"),  # type: ignore[arg-type]
    Ack(None),  # type: ignore[arg-type]
    Ack(Receipt([], 1, 1)),  # type: ignore[arg-type]
    "no command",
    SetPolicy("orders", TopicPolicy(shards=0.5)).policy,  # type: ignore[arg-type]
]


@pytest_asyncio.fixture
async def mailbox(place: Place) -> AsyncIterator[OwnedMailbox]:
    async with place.open() as mailbox:
        yield mailbox


@pytest.fixture
def place(tmp_path: Any) -> Place:
    return sqlite_place(tmp_path)


@pytest.mark.parametrize("defect", DEFECTS, ids=[str(index) for index in range(len(DEFECTS))])
async def test_a_defect_in_one_command_is_answered_to_its_caller_and_the_others_get_their_answers(
    mailbox: OwnedMailbox, place: Place, defect: Any
) -> None:
    await mailbox.send_message(message(b"first"))
    position = mailbox.engine.mailbox.position
    before, (failed,), after, received = await asyncio.gather(
        mailbox.send_message(message(b"before", idem_key="before")),
        mailbox.engine.submit([defect]),
        mailbox.send_message(message(b"after")),
        mailbox.receive_messages("orders"),
    )
    assert isinstance(failed, InternalError), failed
    assert str(failed).startswith("Mailbox acme@one failed on a")
    assert [before.duplicate, after.duplicate] == [False, False]
    assert [delivery.payload for delivery in received] == [b"first", b"before", b"after"]
    assert mailbox.engine.mailbox.position == position + 5
    now = mailbox.engine.now()
    log = place.open_log()
    assert VerifyLog(log)().last == position + 5
    assert view(fold(log), now) == view(mailbox.engine.mailbox, now)
    log.close()


@pytest.mark.parametrize(
    "field", [{"jitter": float("nan")}, {"delay_ms": 0.5}, {"reason": b"x"}, {"reason": "\ud800"}]
)
async def test_a_defect_in_settling_a_delivery_leaves_the_delivery_as_it_was(
    mailbox: OwnedMailbox, field: dict[str, Any]
) -> None:
    await mailbox.send_message(message())
    (delivery,) = await mailbox.receive_messages("orders")
    (nacked,) = await mailbox.engine.submit([changed(Nack(delivery.receipt, 0.5), **field)])
    assert isinstance(nacked, InternalError)
    (extended,) = await mailbox.engine.submit([Extend(delivery.receipt, 1_000.5)])  # type: ignore[arg-type]
    assert not isinstance(extended, list)
    assert await mailbox.ack_messages([delivery.receipt]) == [None]


async def test_a_corrupt_history_fails_only_the_request_that_reads_it(
    mailbox: OwnedMailbox, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    await mailbox.send_message(message())
    (delivery,) = await mailbox.receive_messages("orders")
    await mailbox.ack_messages([delivery.receipt])
    log = mailbox.engine.log
    commits_of = type(log).commits_of

    def altered(self: EventLog, positions: Iterable[int], *, envelopes: bool = True) -> list[Commit]:
        return [commit._replace(events=b"") for commit in commits_of(self, positions, envelopes=envelopes)]

    monkeypatch.setattr(type(log), "commits_of", altered)
    state = mailbox.engine.state
    failed, sent_beside = await asyncio.gather(
        mailbox.ack_messages([delivery.receipt]), mailbox.send_message(message()), return_exceptions=True
    )
    assert isinstance(failed, BrokenLog)
    assert isinstance(sent_beside, Sent)
    assert mailbox.engine.state is state
