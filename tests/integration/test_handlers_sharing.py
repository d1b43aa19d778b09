"""The public handlers shared: callers that wait, many at once, that give up; owners, readers, closing."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from postroom.adapters.compose import OwnedMailbox, list_mailboxes, open_mailbox
from postroom.adapters.compose.queries import read_mailbox
from postroom.application.messages import Sent
from postroom.application.ports.event_log import Answer
from postroom.domain.errors import (
    InvalidRequest,
    MailboxOwned,
    NotFound,
    Saturated,
    Unavailable,
)
from postroom.domain.mailbox.commands import Command, Receive, Sweep
from postroom.domain.policy import MailboxLimits, TopicPolicy
from tests.support.stores import MAILBOX, envelope, memory_place, message
from tests.support.waiting import until

LONG_MS = 60_000


# -- waiting ---


async def test_a_long_poll_wakes_when_a_message_is_sent(mailbox: OwnedMailbox) -> None:
    waiting = asyncio.create_task(mailbox.receive_messages("orders", wait_ms=LONG_MS))
    await until(lambda: mailbox.engine.long_polls.count("orders") == 1)
    await mailbox.send_message(message(b"elsewhere", topic="invoices"))
    assert not waiting.done()
    await mailbox.send_message(message())
    (received,) = await waiting
    assert received.payload == b"hello"


async def test_a_long_poll_wakes_when_a_delayed_message_becomes_due(mailbox: OwnedMailbox) -> None:
    await mailbox.send_message(message(deliver_after_ms=1_000))
    assert await mailbox.receive_messages("orders") == []
    (received,) = await mailbox.receive_messages("orders", wait_ms=LONG_MS)
    assert received.attempt == 1


async def test_a_long_poll_wakes_when_a_delivery_times_out(mailbox: OwnedMailbox) -> None:
    await mailbox.send_message(message())
    await mailbox.receive_messages("orders", visibility_ms=250)
    (received,) = await mailbox.receive_messages("orders", wait_ms=LONG_MS)
    assert received.attempt == 2


async def test_a_long_poll_ends_empty_handed(mailbox: OwnedMailbox) -> None:
    assert await mailbox.receive_messages("orders", wait_ms=20) == []


async def test_of_many_pollers_one_gets_the_one_message(mailbox: OwnedMailbox) -> None:
    polls = [asyncio.create_task(mailbox.receive_messages("orders", wait_ms=LONG_MS)) for _ in range(5)]
    await until(lambda: mailbox.engine.long_polls.count("orders") == 5)
    await mailbox.send_message(message())
    done, waiting = await asyncio.wait(polls, return_when=asyncio.FIRST_COMPLETED)
    assert [len(poll.result()) for poll in done] == [1]
    for poll in waiting:
        poll.cancel()
    await asyncio.wait(waiting)


def count_receives(mailbox: OwnedMailbox, monkeypatch: pytest.MonkeyPatch) -> list[Command]:
    """Return a list to which every command is added that the engine is asked for."""
    commands: list[Command] = []
    submit = mailbox.engine.submit

    async def count(submitted: Sequence[Command]) -> list[Answer]:
        commands.extend(command for command in submitted if isinstance(command, Receive))
        return await submit(submitted)

    monkeypatch.setattr(mailbox.engine, "submit", count)
    return commands


async def test_a_send_wakes_as_many_pollers_as_there_are_messages(
    mailbox: OwnedMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    receives = count_receives(mailbox, monkeypatch)
    polls = [
        asyncio.create_task(mailbox.receive_messages("orders", max_messages=1, wait_ms=LONG_MS))
        for _ in range(100)
    ]
    await until(lambda: mailbox.engine.long_polls.count("orders") == 100)
    receives.clear()
    await mailbox.send_batch([message(), message(topic="invoices"), message()])
    await until(lambda: sum(poll.done() for poll in polls) == 2)
    assert await mailbox.receive_messages("orders") == []  # decided after what others asked for
    done, waiting = await asyncio.wait(polls, timeout=0)
    receives.pop()
    assert (len(done), len(receives)) == (2, 2)
    for poll in waiting:
        poll.cancel()
    await asyncio.wait(waiting)


async def test_a_poller_sleeps_while_the_only_message_waits_for_its_expiry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = memory_place()
    async with place.open() as mailbox:
        await mailbox.send_message(message(ttl_seconds=1))
    place.clock.reboot(after_ms=2_000)  # expiry pauses for a while
    async with place.open() as mailbox:
        receives = count_receives(mailbox, monkeypatch)
        assert await mailbox.receive_messages("orders", wait_ms=100) == []
        assert len(receives) == 2


@pytest.mark.parametrize(
    "fields", [{"wait_ms": -1}, {"wait_ms": 60_001}, {"max_bytes": 0}, {"max_messages": 0}]
)
async def test_a_receive_outside_its_limits_is_refused(mailbox: OwnedMailbox, fields: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match=f"{next(iter(fields))} must be"):
        await mailbox.receive_messages("orders", **fields)  # type: ignore[arg-type]


# -- many callers ---


async def test_64_callers_at_once_lose_nothing_and_share_nothing(mailbox: OwnedMailbox) -> None:
    async def live(caller: int) -> list[str]:
        sent = [await mailbox.send_message(message(topic=f"t{caller % 4}")) for _ in range(5)]
        received = await mailbox.receive_messages(f"t{caller % 4}", max_messages=5, visibility_ms=LONG_MS)
        assert await mailbox.ack_messages([each.receipt for each in received]) == [None] * len(received)
        assert len({each.message_id for each in sent}) == 5
        return [each.message_id for each in received]

    received = [id_ for ids in await asyncio.gather(*(live(caller) for caller in range(64))) for id_ in ids]
    assert len(received) == len(set(received))
    left = sum(shard.ready for shard in (await mailbox.get_backlog()).shards)
    assert len(received) + left == 64 * 5


async def test_what_a_cancelled_caller_asked_for_happens_all_the_same(mailbox: OwnedMailbox) -> None:
    giving_up = asyncio.create_task(mailbox.send_message(message(b"1")))
    staying = asyncio.create_task(mailbox.send_message(message(b"2")))
    await asyncio.sleep(0)
    giving_up.cancel()
    assert not (await staying).duplicate
    with pytest.raises(asyncio.CancelledError):
        await giving_up
    assert {m.payload for m in await mailbox.receive_messages("orders")} == {b"1", b"2"}


async def test_a_poller_that_gives_up_takes_no_message_with_it(mailbox: OwnedMailbox) -> None:
    poll = asyncio.create_task(mailbox.receive_messages("orders", wait_ms=LONG_MS))
    await until(lambda: mailbox.engine.long_polls.count("orders") == 1)
    poll.cancel()
    await asyncio.wait([poll])
    await mailbox.send_message(message())
    assert len(await mailbox.receive_messages("orders")) == 1


async def test_a_receiver_that_gives_up_while_it_is_queued_takes_no_message_with_it(
    mailbox: OwnedMailbox,
) -> None:
    await mailbox.send_message(message())
    receivers = [asyncio.create_task(mailbox.receive_messages("orders")) for _ in range(3)]
    await asyncio.sleep(0)
    for receiver in receivers:
        receiver.cancel()
    await asyncio.wait(receivers)
    (received,) = await mailbox.receive_messages("orders")
    assert received.attempt == 1


async def test_too_many_pending_commands_are_refused(mailbox: OwnedMailbox) -> None:
    flood = asyncio.create_task(mailbox.engine.submit([Sweep()] * 50_000))
    await asyncio.sleep(0)
    with pytest.raises(Saturated, match="too many commands pending; retry shortly"):
        await mailbox.engine.submit([Sweep()])
    assert len(await flood) == 50_000
    await mailbox.send_message(message())


async def test_a_topic_with_a_flood_of_sends_does_not_hold_up_another(mailbox: OwnedMailbox) -> None:
    done: list[str] = []

    async def send(topic: str) -> None:
        await mailbox.send_batch([message(bytes(4_096), topic)] * 10)
        done.append(topic)

    flood = [asyncio.create_task(send("noisy")) for _ in range(500)]
    await asyncio.sleep(0)
    await send("quiet")
    assert done.index("quiet") < 100
    await asyncio.gather(*flood)


async def test_a_topic_with_a_flood_of_sends_leaves_room_for_another(mailbox: OwnedMailbox) -> None:
    floods = [asyncio.create_task(mailbox.send_batch([message()] * 5_000)) for _ in range(10)]
    await asyncio.sleep(0)
    assert (await mailbox.send_message(message(topic="quiet"))).message_id
    results = await asyncio.gather(*floods, return_exceptions=True)
    refused = [result for result in results if isinstance(result, Saturated)]
    assert refused
    assert all(100 <= error.retry_after_ms <= 60_000 for error in refused)


async def test_a_full_shard_tells_refused_senders_when_its_consumers_will_have_made_room(store: str) -> None:
    policy = TopicPolicy(shards=1, shard_capacity=100)
    async with open_mailbox(store, MAILBOX, default_policy=policy) as mailbox:
        await mailbox.send_batch([message()] * 100)
        for _ in range(50):
            await mailbox.ack_messages(
                [m.receipt for m in await mailbox.receive_messages("orders", max_messages=1)]
            )
            await mailbox.send_message(message())
        refused = [
            answer for answer in await mailbox.send_batch([message()] * 200) if isinstance(answer, Saturated)
        ]
        waits = [error.retry_after_ms for error in refused]
        assert len(waits) == 200
        assert waits == sorted(waits)
        assert waits[0] < waits[-1] <= 60_000


async def test_the_in_flight_ceiling_refuses_with_a_time_to_retry(store: str) -> None:
    async with open_mailbox(store, MAILBOX, limits=MailboxLimits(in_flight_ceiling=1)) as mailbox:
        await mailbox.send_batch([message(), message()])
        assert len(await mailbox.receive_messages("orders")) == 1
        with pytest.raises(Saturated, match="limit of 1 messages in flight") as refused:
            await mailbox.receive_messages("orders")
        assert 0 < refused.value.retry_after_ms <= 30_000


# -- owning, reading, closing ---


async def test_a_store_has_one_owner_a_mailbox_and_any_number_of_readers(tmp_path: Path) -> None:
    store = str(tmp_path / "store.db")
    assert list_mailboxes(store) == []
    async with open_mailbox(store, MAILBOX, owner="worker 7 on mars") as mailbox:
        await mailbox.send_message(message(message_id="m1"))
        with pytest.raises(MailboxOwned, match="owned by worker 7 on mars; use connect"):
            async with open_mailbox(store, MAILBOX, wait_ms=0):
                pytest.fail("owned twice")
        with read_mailbox(store, MAILBOX) as reader:
            assert reader.get_message("m1").status == "ready"
            assert reader.get_backlog().owner == "worker 7 on mars"
            assert reader.verify_log().messages == 1
        async with open_mailbox(store, "acme@two", wait_ms=0) as other:
            assert (await other.get_backlog()).shards == []
    async with open_mailbox(store, MAILBOX, wait_ms=0) as mailbox:
        assert len(await mailbox.receive_messages("orders")) == 1
    assert list_mailboxes(store) == [MAILBOX, "acme@two"]


async def test_a_reader_of_what_does_not_exist_is_told_so(tmp_path: Path) -> None:
    store = str(tmp_path / "store.db")
    with pytest.raises(NotFound, match="There is no store"), read_mailbox(store):
        pass
    with (
        pytest.raises(InvalidRequest, match="must have the form namespace@proxy"),
        read_mailbox(store, "nonsense"),
    ):
        pass


async def test_the_same_envelope_may_go_to_two_mailboxes_of_a_store(tmp_path: Path) -> None:
    store, blob = str(tmp_path / "store.db"), envelope("0198c0de-0000-7000-8000-000000000001")
    for name in (MAILBOX, "acme@two"):
        async with open_mailbox(store, name) as mailbox:
            (answer,) = await mailbox.send_envelopes([blob])
            assert answer == Sent("0198c0de-0000-7000-8000-000000000001", duplicate=False)


async def test_a_closed_mailbox_refuses_and_says_why(store: str) -> None:
    async with open_mailbox(store, MAILBOX) as mailbox:
        pass
    with pytest.raises(Unavailable, match="is closed; open it again"):
        await mailbox.send_message(message())


async def test_closing_finishes_what_was_asked(tmp_path: Path) -> None:
    store = str(tmp_path / "store.db")
    async with open_mailbox(store, MAILBOX) as mailbox:
        pending = [asyncio.create_task(mailbox.send_message(message())) for _ in range(20)]
        await asyncio.sleep(0)
    assert len({(await task).message_id for task in pending}) == 20
    async with open_mailbox(store, MAILBOX) as mailbox:
        assert len(await mailbox.receive_messages("orders")) == 20
