"""Access control: which tokens are valid, and what their bearers may still do when they end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroom.adapters.key_rings import MemoryKeyRing
from postroom.application.access import authority as authority_module
from postroom.application.access.authority import Authority, Revocations
from postroom.application.access.guard import Deliveries
from postroom.application.received_messages import ReceivedMessage
from postroom.application.threads import background_task
from postroom.domain.capability.rights import Expires, Topics
from postroom.domain.capability.token import Token, attenuate
from postroom.domain.errors import Unauthenticated, Unavailable
from postroom.domain.message import Receipt
from postroom.domain.policy import DAY_MS
from tests.support.access import MemoryPlace, controlled_mailbox, mailbox_of, reason_of
from tests.support.clocks import ManualClock
from tests.support.examples import examples
from tests.support.messages import message
from tests.support.waiting import until

A, B = "orders", "payments"


@pytest.fixture
async def place() -> AsyncIterator[MemoryPlace]:
    async with controlled_mailbox() as opened:
        yield opened


# -- Tokens ---


@pytest.mark.parametrize(
    ("token", "reason"),
    [(None, "missing"), ("", "missing"), ("junk", "malformed"), ("prm1_junk", "malformed"), (5, "missing")],
    ids=repr,
)
async def test_a_call_without_a_token_of_ours_is_refused(place: MemoryPlace, token: Any, reason: str) -> None:
    assert await reason_of(place.control.open_session(token)) == reason


async def test_a_token_of_another_service_is_refused(place: MemoryPlace) -> None:
    async with controlled_mailbox() as other:
        assert await reason_of(place.control.open_session(other.issue())) == "signature"


async def test_no_error_contains_a_token(place: MemoryPlace) -> None:
    token = place.issue(topics=[A])
    place.capabilities.revoke_epoch()
    for text in (token, token[:-1], token + "A", token[:-4] + "AAAA"):
        with pytest.raises(Unauthenticated) as error:
            await place.control.open_session(text)
        assert token[5:40] not in str(error.value)


async def test_a_capability_ends_at_its_expiry(place: MemoryPlace) -> None:
    token = place.issue(lifetime_ms=10_000)
    mailbox = (await place.control.open_session(token)).mailbox
    await mailbox.send_message(message())
    await place.clock.advance(10)
    assert await reason_of(mailbox.send_message(message())) == "expired"
    assert await reason_of(place.control.open_session(token)) == "expired"


async def test_a_revoked_capability_and_what_was_attenuated_from_it_end_together(place: MemoryPlace) -> None:
    token, other = Token.decode(place.issue()), place.issue()
    narrower = attenuate(token, Topics((A,))).encode()
    mailboxes = [(await place.control.open_session(each)).mailbox for each in (token.encode(), narrower)]
    place.capabilities.revoke(token.read_identifier().nonce)
    await place.control.refresh()
    for each in (token.encode(), narrower):
        assert await reason_of(place.control.open_session(each)) == "revoked"
    for mailbox in mailboxes:
        assert await reason_of(mailbox.send_message(message())) == "revoked"
    await (await place.control.open_session(other)).mailbox.send_message(message())


async def test_a_revocation_outlasts_a_clock_that_was_days_ahead_for_a_while(
    place: MemoryPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = place.issue(lifetime_ms=10_000)
    place.capabilities.revoke(Token.decode(token).read_identifier().nonce)
    now = place.clock.wall()
    for days in (0, 3, 0):
        monkeypatch.setattr(place.clock, "wall", partial(int, now + days * DAY_MS * 1_000))
        await place.control.refresh()
    assert await reason_of(place.control.open_session(token)) == "revoked"


async def test_a_revocation_takes_effect_within_the_time_to_live_without_polling(place: MemoryPlace) -> None:
    token = place.issue()
    mailbox = (await place.control.open_session(token)).mailbox
    place.capabilities.revoke_epoch()
    await mailbox.send_message(message())
    await place.clock.advance(30)
    assert await reason_of(mailbox.send_message(message())) == "revoked"
    await (await place.control.open_session(place.issue())).mailbox.send_message(message())


async def test_what_a_retired_key_signed_ends_with_the_overlap(place: MemoryPlace) -> None:
    old = place.issue()
    place.capabilities.rotate(overlap_ms=60_000)
    new = place.issue()
    for token in (old, new):
        await place.control.open_session(token)
    await place.clock.advance(61)
    assert await reason_of(place.control.open_session(old)) == "expired"
    await place.control.open_session(new)


async def test_nothing_is_allowed_while_revocations_cannot_be_read(
    place: MemoryPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = place.issue()
    mailbox = (await place.control.open_session(token)).mailbox

    reads: list[object] = []

    def fail(revocations: object) -> None:
        reads.append(revocations)
        raise Unavailable("The disk is gone.")

    monkeypatch.setattr(place.capabilities, "read_revocations", fail)
    await mailbox.send_message(message())
    await place.clock.advance(30)
    for call in (mailbox.send_message(message()), place.control.open_session(token)):
        with pytest.raises(Unavailable):
            await call
    assert len(reads) == 1, "Calls made within a second share a failed read."
    monkeypatch.undo()
    await place.clock.advance(1)
    await mailbox.send_message(message())


async def test_a_flood_of_refusals_empties_the_cache_once_in_a_while(place: MemoryPlace) -> None:
    token = place.issue()
    session = await place.control.open_session(token)
    assert await place.control.open_session(token) is session

    async def flood() -> None:
        for _ in range(100):
            with suppress(Unauthenticated):
                await place.control.open_session("prm1_junk")

    await flood()
    second = await place.control.open_session(token)
    assert second is not session
    await place.clock.advance(1)
    await flood()
    assert await place.control.open_session(token) is second


# -- Expiry and revocation with deliveries in flight (I-15) ---


@pytest.mark.parametrize("ending", ["expired", "revoked"])
async def test_what_was_received_before_the_end_can_be_settled(place: MemoryPlace, ending: str) -> None:
    await place.mailbox.send_batch([message() for _ in range(5)])
    token = place.issue(lifetime_ms=10_000)
    mailbox = (await place.control.open_session(token)).mailbox
    acked, nacked, extended = await mailbox.receive_messages(A, max_messages=3, visibility_ms=60_000)
    other = await mailbox_of(place)
    (of_another,) = await other.receive_messages(A, max_messages=1, visibility_ms=60_000)
    (of_nobody,) = await place.mailbox.receive_messages(A, visibility_ms=60_000)
    if ending == "expired":
        await place.clock.advance(10)
    else:
        place.capabilities.revoke(Token.decode(token).read_identifier().nonce)
        await place.control.refresh()
    mailbox = (await place.control.open_session(token)).mailbox
    for call in (
        mailbox.send_message(message()),
        mailbox.receive_messages(A),
        mailbox.extend_visibility([extended.receipt], 1_000),
        mailbox.ack_messages([of_another.receipt]),
        mailbox.nack_messages([of_nobody.receipt]),
    ):
        assert await reason_of(call) == ending
    assert await mailbox.ack_messages([acked.receipt]) == [None]
    assert await mailbox.nack_messages([nacked.receipt], delay_ms=0) == [None]
    await extended.ack()
    assert await reason_of(place.control.open_session(token)) == ending
    (again,) = await place.mailbox.receive_messages(A)
    assert again.message_id == nacked.message_id


Step = str | int
LIFETIME_SECONDS, CACHE_SECONDS, VISIBILITY_SECONDS = 100, 30, 60
CALLS: st.SearchStrategy[list[Step]] = st.lists(
    st.sampled_from(["send", "receive", "ack", "nack"]), max_size=5
)
ENDINGS: dict[str, list[Step]] = {
    "expired": [30],
    "revoked": ["revoke"],
    "revoked at once": ["revoke", "refresh"],
}
PAUSES = st.sampled_from([0, 1, CACHE_SECONDS - 1, CACHE_SECONDS, VISIBILITY_SECONDS - 1, VISIBILITY_SECONDS])


async def check_ending(steps: list[Step]) -> None:
    """Make calls with a capability that expires and may be revoked; numbers are seconds that pass."""
    async with controlled_mailbox() as place:
        clock = place.clock
        await place.mailbox.send_batch([message() for _ in range(20)])
        token = place.issue(lifetime_ms=LIFETIME_SECONDS * 1_000)
        mailbox = (await place.control.open_session(token)).mailbox
        now, revoked_at, refreshed = 0, None, False
        held: list[tuple[int, ReceivedMessage]] = []
        for step in steps:
            is_expired = now >= LIFETIME_SECONDS
            must_be_revoked = revoked_at is not None and (refreshed or now >= revoked_at + CACHE_SECONDS)
            match step:
                case int():
                    await clock.advance(step)
                    now += step
                case "revoke" if revoked_at is None:
                    place.capabilities.revoke(Token.decode(token).read_identifier().nonce)
                    revoked_at = now
                case "refresh":
                    await place.control.refresh()
                    refreshed = revoked_at is not None
                case "send" | "receive":
                    call: Any = (
                        mailbox.send_message(message())
                        if step == "send"
                        else mailbox.receive_messages(
                            A, max_messages=2, visibility_ms=VISIBILITY_SECONDS * 1_000
                        )
                    )
                    if is_expired or must_be_revoked:
                        reasons = {"expired": is_expired, "revoked": revoked_at is not None}
                        assert reasons[await reason_of(call)]
                    elif revoked_at is None:
                        answer = await call
                        held += [(now, each) for each in answer] if step == "receive" else []
                    else:  # whether the revocation is known yet is a matter of the cache
                        with suppress(Unauthenticated):
                            await call
                case "ack" | "nack" if held:
                    received_at, received = held.pop()
                    settle = mailbox.ack_messages if step == "ack" else mailbox.nack_messages
                    is_late = now >= received_at + VISIBILITY_SECONDS
                    if not is_late:
                        assert await settle([received.receipt]) == [None]
                    elif is_expired or must_be_revoked:
                        await reason_of(settle([received.receipt]))


@pytest.mark.parametrize("ending", ENDINGS)
@given(before=CALLS, waits=PAUSES, after=CALLS, later=PAUSES)
@settings(max_examples=examples(80))
def test_a_capability_that_ended_allows_only_to_settle_what_it_received_before(
    ending: str, before: list[Step], waits: int, after: list[Step], later: int
) -> None:
    """Within the time to live of the cache, or at once (svc-mailbox I-15, G-10)."""
    steps: list[Step] = [LIFETIME_SECONDS - 30] if ending == "expired" else []
    steps += [
        "receive",
        *before,
        *ENDINGS[ending],
        waits,
        "send",
        *after,
        "ack",
        later,
        "send",
        "nack",
        "ack",
    ]
    asyncio.run(check_ending(steps))


async def test_after_the_end_nothing_can_be_settled_beyond_its_visibility_timeout(place: MemoryPlace) -> None:
    await place.mailbox.send_message(message())
    mailbox = await mailbox_of(place, lifetime_ms=1_000)
    (received,) = await mailbox.receive_messages(A, visibility_ms=5_000)
    await place.clock.advance(6)
    assert await reason_of(mailbox.ack_messages([received.receipt])) == "expired"


async def test_an_attenuated_capability_may_settle_what_its_family_received(place: MemoryPlace) -> None:
    await place.mailbox.send_batch([message(), message(topic=B)])
    token = Token.decode(place.issue())
    narrower = attenuate(attenuate(token, Topics((A,))), Expires(place.clock.wall() // 1_000 + 1_000))
    family = [(await place.control.open_session(each.encode())).mailbox for each in (token, narrower)]
    received = await family[0].receive_messages([A, B], visibility_ms=60_000)
    own, other = sorted(received, key=lambda each: each.topic)
    await place.clock.advance(2)
    answers = await family[1].ack_messages([own.receipt, other.receipt])
    assert [type(each).__name__ for each in answers] == ["NoneType", "Forbidden"]


async def test_a_stream_ends_with_its_capability_and_leaves_deliveries_to_be_settled(
    place: MemoryPlace,
) -> None:
    await place.mailbox.send_message(message())
    mailbox = await mailbox_of(place)
    async with mailbox.stream_messages(A, heartbeat_ms=250, visibility_ms=60_000) as stream:
        received = await anext(stream)
        place.capabilities.revoke_epoch()
        await place.control.refresh()
        assert await reason_of(anext(stream)) == "revoked"
    assert [each.in_flight for each in (await place.mailbox.get_backlog()).shards] == [1]
    await received.ack()


async def test_a_stream_that_its_consumer_ends_returns_its_deliveries(place: MemoryPlace) -> None:
    await place.mailbox.send_message(message())
    async with (await mailbox_of(place)).stream_messages(A, visibility_ms=60_000) as stream:
        await anext(stream)
    assert [each.ready for each in (await place.mailbox.get_backlog()).shards] == [1]


async def test_a_revocation_also_ends_a_receive_that_waits(place: MemoryPlace) -> None:
    mailbox = await mailbox_of(place)
    receiving = asyncio.ensure_future(mailbox.receive_messages(A, wait_ms=20_000))
    await asyncio.sleep(0)
    place.capabilities.revoke_epoch()
    await place.control.refresh()
    await place.mailbox.send_message(message())
    assert await reason_of(receiving) == "revoked"
    (received,) = await place.mailbox.receive_messages(A)
    assert received.attempt == 2


async def test_calls_that_find_the_revocations_too_old_read_them_once(
    place: MemoryPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, read, reads = place.issue(), place.capabilities.read_revocations, 0

    def count(revocations: Revocations) -> None:
        nonlocal reads
        reads += 1
        read(revocations)

    monkeypatch.setattr(place.capabilities, "read_revocations", count)
    await asyncio.gather(*(place.control.open_session(token) for _ in range(5)))
    assert reads == 1


async def test_a_stream_stops_when_its_capability_is_revoked(place: MemoryPlace) -> None:
    await place.mailbox.send_batch([message(), message()])
    token = place.issue()
    mailbox = (await place.control.open_session(token)).mailbox
    async with mailbox.stream_messages(A, max_messages=1, visibility_ms=60_000) as stream:
        received = await anext(stream)
        place.capabilities.revoke_epoch()
        await place.control.refresh()
        await received.ack()
        assert await reason_of(anext(stream)) == "revoked"
    backlog = await place.mailbox.get_backlog()
    assert [(each.ready, each.in_flight) for each in backlog.shards] == [(1, 0)]


def test_the_oldest_deliveries_are_forgotten_first() -> None:
    class Message:
        def __init__(self, number: int) -> None:
            self.receipt, self.topic = Receipt(bytes([number]) * 16, 1, 1), A
            self.visible_at_us = 100

    deliveries, messages = Deliveries(capacity=3), [Message(n) for n in range(5)]
    deliveries.add(b"n", messages, 50)  # type: ignore[arg-type] # only these attributes are read
    assert [deliveries.get(each.receipt) is not None for each in messages] == [False, False, True, True, True]
    deliveries.add(b"n", [], 100)
    assert not deliveries.has_any(b"n")


async def test_revocations_are_read_while_there_are_calls_and_by_the_first_one_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(authority_module, "POLL_MS", 1)
    reads: list[None] = []

    class Log:
        def read_revocations(self, revocations: Revocations) -> None:
            reads.append(None)

    authority = Authority(MemoryKeyRing(), Log(), ManualClock(), 3_600_000)
    async with background_task(authority.run()):
        await until(lambda: len(reads) == authority_module.UNUSED_POLLS - 1)
        await asyncio.sleep(0.1)
        assert len(reads) == authority_module.UNUSED_POLLS - 1
        assert authority.is_stale
        await authority.ensure_fresh()
        assert len(reads) >= authority_module.UNUSED_POLLS
        await until(lambda: len(reads) > authority_module.UNUSED_POLLS)
