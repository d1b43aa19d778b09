"""Access control: what capabilities permit, and when they end."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from postroom.adapters.compose.testing import ManualClock, MemoryMailbox
from postroom.application.access.deliveries import Deliveries
from postroom.application.access.settings import AccessSettings
from postroom.application.messages import ReceivedMessage
from postroom.application.ports.mailbox import Mailbox
from postroom.domain.capability.rights import Expires, MaxMessages, Operation, Quota, Topics
from postroom.domain.capability.token import Token, attenuate
from postroom.domain.errors import (
    Forbidden,
    InvalidRequest,
    NotFound,
    Saturated,
    Unauthenticated,
    Unavailable,
)
from postroom.domain.message import Receipt
from postroom.domain.policy import TopicPolicy
from postroom.domain.search import EventFilter
from tests.support.access import Controlled, controlled_mailbox
from tests.support.messages import message

Place = Controlled[MemoryMailbox, ManualClock]
A, B = "orders", "payments"


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with controlled_mailbox() as opened:
        yield opened


async def mailbox_of(place: Place, *arguments: Any, **options: Any) -> Mailbox:
    return (await place.control.open_session(place.issue(*arguments, **options))).mailbox


async def reason_of(call: Awaitable[object]) -> str:
    with pytest.raises((Unauthenticated, Forbidden)) as error:
        await call
    return str(error.value.reason)  # type: ignore[attr-defined] # of both


async def refusals(mailbox: Mailbox, receipt: Receipt) -> list[type | None]:
    answers = [
        *await mailbox.ack_messages([receipt]),
        *await mailbox.nack_messages([receipt]),
        *await mailbox.extend_visibility([receipt], 1_000),
    ]
    return [None if each is None else type(each) for each in answers]


# -- Tokens ---


@pytest.mark.parametrize(
    ("token", "reason"),
    [(None, "missing"), ("", "missing"), ("junk", "malformed"), ("prm1_junk", "malformed"), (5, "missing")],
    ids=repr,
)
async def test_a_call_without_a_token_of_ours_is_refused(place: Place, token: Any, reason: str) -> None:
    assert await reason_of(place.control.open_session(token)) == reason


async def test_a_token_of_another_service_is_refused(place: Place) -> None:
    async with controlled_mailbox() as other:
        assert await reason_of(place.control.open_session(other.issue())) == "signature"


async def test_no_error_contains_a_token(place: Place) -> None:
    token = place.issue(topics=[A])
    place.capabilities.revoke_epoch()
    for text in (token, token[:-1], token + "A", token[:-4] + "AAAA"):
        with pytest.raises(Unauthenticated) as error:
            await place.control.open_session(text)
        assert token[5:40] not in str(error.value)


async def test_a_capability_ends_at_its_expiry(place: Place) -> None:
    token = place.issue(lifetime_ms=10_000)
    mailbox = (await place.control.open_session(token)).mailbox
    await mailbox.send_message(message())
    await place.clock.advance(10)
    assert await reason_of(mailbox.send_message(message())) == "expired"
    assert await reason_of(place.control.open_session(token)) == "expired"


async def test_a_revoked_capability_and_what_was_attenuated_from_it_end_together(place: Place) -> None:
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


async def test_a_revocation_takes_effect_within_the_time_to_live_without_polling(place: Place) -> None:
    token = place.issue()
    mailbox = (await place.control.open_session(token)).mailbox
    place.capabilities.revoke_epoch()
    await mailbox.send_message(message())
    await place.clock.advance(30)
    assert await reason_of(mailbox.send_message(message())) == "revoked"
    await (await place.control.open_session(place.issue())).mailbox.send_message(message())


async def test_what_a_retired_key_signed_ends_with_the_overlap(place: Place) -> None:
    old = place.issue()
    place.capabilities.rotate(overlap_ms=60_000)
    new = place.issue()
    for token in (old, new):
        await place.control.open_session(token)
    await place.clock.advance(61)
    assert await reason_of(place.control.open_session(old)) == "expired"
    await place.control.open_session(new)


async def test_nothing_is_allowed_while_revocations_cannot_be_read(
    place: Place, monkeypatch: pytest.MonkeyPatch
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


async def test_a_flood_of_refusals_empties_the_cache_once_in_a_while(place: Place) -> None:
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


# -- Operations ---


@dataclass
class Call:
    operations: tuple[Operation, ...]
    run: Callable[[Mailbox, str, ReceivedMessage], Awaitable[object]]


async def first(answers: Awaitable[Any]) -> Any:
    (answer,) = await answers
    if isinstance(answer, Exception):
        raise answer
    return answer


READ = (Operation.READ_HEADERS,)
PAYLOAD = (Operation.READ_HEADERS, Operation.READ_PAYLOAD)
CALLS = {
    "send": Call((Operation.SEND,), lambda m, t, _: m.send_message(message(topic=t))),
    "send batch": Call((Operation.SEND,), lambda m, t, _: first(m.send_batch([message(topic=t)]))),
    "receive": Call((Operation.RECV,), lambda m, t, _: m.receive_messages(t)),
    "receive of several": Call((Operation.RECV,), lambda m, t, _: m.receive_messages([A, t])),
    "ack": Call((Operation.ACK,), lambda m, t, r: first(m.ack_messages([r.receipt]))),
    "nack": Call((Operation.NACK,), lambda m, t, r: first(m.nack_messages([r.receipt]))),
    "extend": Call((Operation.EXTEND,), lambda m, t, r: first(m.extend_visibility([r.receipt], 1_000))),
    "redrive": Call((Operation.REDRIVE,), lambda m, t, _: m.redrive_dead_letters(t)),
    "purge": Call((Operation.ADMIN,), lambda m, t, _: m.purge_topic(t)),
    "policy": Call((Operation.ADMIN,), lambda m, t, _: m.set_topic_policy(t, TopicPolicy())),
    "pause": Call((Operation.ADMIN,), lambda m, t, _: m.pause_topic(t)),
    "resume": Call((Operation.ADMIN,), lambda m, t, _: m.resume_topic(t)),
    "get": Call(PAYLOAD, lambda m, t, r: m.get_message(r.message_id)),
    "explain": Call(READ, lambda m, t, r: m.explain_message(r.message_id)),
    "backlog": Call(READ, lambda m, t, _: m.get_backlog(t)),
    "dead letters": Call(READ, lambda m, t, _: m.list_dead_letters(t)),
    "get policy": Call(READ, lambda m, t, _: m.get_topic_policy(t)),
    "peek": Call(PAYLOAD, lambda m, t, _: m.peek_messages(t)),
}


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_needs_its_operation_its_topic_and_its_mailbox(place: Place, name: str) -> None:
    """So a capability of one topic can't touch another one, by name, receipt or message id."""
    call = CALLS[name]
    await place.mailbox.send_batch([message(topic=A), message(topic=B), message(topic=A), message(topic=B)])
    deliveries = {topic: (await place.mailbox.receive_messages(topic, max_messages=1))[0] for topic in (A, B)}
    covered = await mailbox_of(place, topics=[A], operations=call.operations)
    await call.run(covered, A, deliveries[A])
    assert await reason_of(call.run(covered, B, deliveries[B])) == "topic"
    everything = await mailbox_of(place, operations=call.operations)
    await call.run(everything, B, deliveries[B])
    for missing in call.operations:
        other = await mailbox_of(place, operations=[each for each in Operation if each != missing])
        assert await reason_of(call.run(other, A, deliveries[A])) == "operation"
    elsewhere = await mailbox_of(place, mailboxes=["acme@two"])
    assert await reason_of(call.run(elsewhere, A, deliveries[A])) == "mailbox"


async def test_answers_about_all_topics_have_the_covered_ones_only(place: Place) -> None:
    await place.mailbox.set_topic_policy(B, TopicPolicy(max_attempts=1))
    await place.mailbox.set_topic_policy(A, TopicPolicy(max_attempts=1))
    await place.mailbox.send_batch([message(topic=each) for each in (B, A, B, A)])
    received = await place.mailbox.receive_messages([A, B])
    await place.mailbox.nack_messages([each.receipt for each in received])
    await place.mailbox.send_batch([message(topic=each) for each in (A, B)])
    for topic in (A, B):
        await place.mailbox.pause_topic(topic)
    mailbox = await mailbox_of(place, topics=[A])
    assert [each.topic for each in await mailbox.list_topics()] == [A]
    backlog = await mailbox.get_backlog()
    assert {each.topic for each in backlog.shards} == {*backlog.paused_topics} == {A}
    letters = await mailbox.list_dead_letters(limit=1)
    letters += await mailbox.list_dead_letters(limit=1, cursor=letters[-1].position)
    assert [each.topic for each in letters] == [A, A]
    assert await mailbox.list_dead_letters(cursor=letters[-1].position) == []
    assert await mailbox.list_dead_letters(at=backlog.position) == letters
    assert await mailbox.list_dead_letters(at=backlog.position, limit=1) == letters[:1]
    assert await reason_of(mailbox.delete_old_events(0)) == "topic"


async def test_what_does_not_exist_looks_like_what_is_of_another_topic(place: Place) -> None:
    sent = await place.mailbox.send_message(message(topic=B))
    (received,) = await place.mailbox.receive_messages(B)
    mailbox = await mailbox_of(place, topics=[A])
    errors: list[str] = []
    for id_ in (sent.message_id, "0199d2c4-6f00-7a10-8c21-3b5b0f6f9e01", "nobody"):
        for read in (mailbox.get_message, mailbox.explain_message):
            with pytest.raises(Forbidden) as error:
                await read(id_)
            errors.append(str(error.value))
    for receipt in (received.receipt, Receipt(bytes(16), 1, 1)):
        errors += [str(each) for each in await mailbox.ack_messages([receipt])]
    assert len(set(errors)) == 1
    with pytest.raises(NotFound):
        await (await mailbox_of(place)).get_message("nobody")


async def test_the_topic_of_a_receipt_is_found_also_for_ids_of_senders(place: Place) -> None:
    for topic in (A, B):
        await place.mailbox.send_message(message(topic=topic, message_id=f"own-{topic}"))
    mailbox = await mailbox_of(place, topics=[A])
    (own,) = await place.mailbox.receive_messages(A)
    (other,) = await place.mailbox.receive_messages(B)
    assert await refusals(mailbox, other.receipt) == [Forbidden, Forbidden, Forbidden]
    assert await mailbox.ack_messages([own.receipt]) == [None]


async def test_messages_that_are_not_covered_are_refused_alone(place: Place) -> None:
    mailbox = await mailbox_of(place, MaxMessages(4), topics=[A])
    junk: Any = "no message"
    batch = [message(topic=A), message(topic=B), junk, message(topic=A), message(topic=A)]
    answers = [type(each).__name__ for each in await mailbox.send_batch(batch)]
    assert answers == ["Sent", "Forbidden", "InvalidRequest", "Sent", "Forbidden"]
    assert len(await mailbox.receive_messages(A, max_messages=99)) == 2


async def test_a_call_returns_at_most_as_many_messages_as_the_capability_covers(place: Place) -> None:
    await place.mailbox.send_batch([message() for _ in range(5)])
    mailbox = await mailbox_of(place, MaxMessages(2))
    assert len(await mailbox.peek_messages(A)) == 2
    assert len(await mailbox.receive_messages(A)) == 2


async def test_a_subclass_of_text_is_no_topic(place: Place) -> None:
    class Anything(str):
        __slots__ = ()

        def startswith(self, *_: object) -> bool:
            return True

        def __eq__(self, _: object) -> bool:
            return True

        __hash__ = str.__hash__

    mailbox = await mailbox_of(place, topics=[A])
    for call in (
        mailbox.receive_messages(Anything(B)),
        mailbox.peek_messages(Anything(B)),
        mailbox.get_backlog(Anything(B)),
        mailbox.send_message(message(topic=Anything(B))),
    ):
        with pytest.raises(InvalidRequest):
            await call


# -- Expiry and revocation with deliveries in flight (I-15) ---


@pytest.mark.parametrize("ending", ["expired", "revoked"])
async def test_what_was_received_before_the_end_can_be_settled(place: Place, ending: str) -> None:
    await place.mailbox.send_batch([message() for _ in range(4)])
    token = place.issue(lifetime_ms=10_000)
    mailbox = (await place.control.open_session(token)).mailbox
    acked, nacked, extended = await mailbox.receive_messages(A, max_messages=3, visibility_ms=60_000)
    (of_another,) = await place.mailbox.receive_messages(A, visibility_ms=60_000)
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
    ):
        assert await reason_of(call) == ending
    assert await mailbox.ack_messages([acked.receipt]) == [None]
    assert await mailbox.nack_messages([nacked.receipt], delay_ms=0) == [None]
    await extended.ack()
    assert await reason_of(place.control.open_session(token)) == ending
    (again,) = await place.mailbox.receive_messages(A)
    assert again.message_id == nacked.message_id


async def test_after_the_end_nothing_can_be_settled_beyond_its_visibility_timeout(place: Place) -> None:
    await place.mailbox.send_message(message())
    mailbox = await mailbox_of(place, lifetime_ms=1_000)
    (received,) = await mailbox.receive_messages(A, visibility_ms=5_000)
    await place.clock.advance(6)
    assert await reason_of(mailbox.ack_messages([received.receipt])) == "expired"


async def test_an_attenuated_capability_may_settle_what_its_family_received(place: Place) -> None:
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
    place: Place,
) -> None:
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


# -- Quotas ---


async def test_a_quota_is_shared_by_what_was_attenuated(place: Place) -> None:
    token = Token.decode(place.issue(Quota(4, None, 60_000)))
    narrower = attenuate(token, Quota(2, None, 60_000))
    wide, narrow = [(await place.control.open_session(each.encode())).mailbox for each in (token, narrower)]
    for mailbox in (narrow, narrow):
        await mailbox.send_message(message())
    with pytest.raises(Saturated) as error:
        await narrow.send_message(message())
    assert 0 < error.value.retry_after_ms <= 60_000
    answers = await wide.send_batch([message() for _ in range(3)])
    assert [type(each).__name__ for each in answers] == ["Sent", "Sent", "Saturated"]
    await place.clock.advance(error.value.retry_after_ms / 1_000)
    await narrow.send_message(message())


async def test_bytes_sent_and_received_count(place: Place) -> None:
    mailbox = await mailbox_of(place, Quota(None, 1_000, 60_000))
    await mailbox.send_message(message(b"x" * 900))
    with pytest.raises(Saturated):
        await mailbox.send_message(message(b"x" * 101))
    (received,) = await mailbox.receive_messages(A)
    with pytest.raises(Saturated):
        await mailbox.receive_messages(A)
    await received.ack()


async def test_a_principal_has_one_quota_for_all_its_capabilities() -> None:
    settings = AccessSettings(principal_quotas={"*": Quota(1, None, 1_000), "batch": Quota(2, None, 1_000)})
    async with controlled_mailbox(settings) as place:
        for principal, limit in (("a", 1), ("b", 1), ("batch", 2)):
            mailboxes = [await mailbox_of(place, principal=principal) for _ in range(limit + 1)]
            for mailbox in mailboxes[:-1]:
                await mailbox.send_message(message())
            with pytest.raises(Saturated):
                await mailboxes[-1].send_message(message())


async def test_quotas_of_principals_can_be_changed_while_usage_is_counted_on() -> None:
    def quota(operations: int) -> AccessSettings:
        return AccessSettings(principal_quotas={"*": Quota(operations, None, 1_000)})

    async with controlled_mailbox(quota(1)) as place:
        token = place.issue()

        async def send() -> None:
            await (await place.control.open_session(token)).mailbox.send_message(message())

        await send()
        with pytest.raises(Saturated):
            await send()
        place.control.set_quotas(quota(2))
        await send()
        with pytest.raises(Saturated):
            await send()
        with pytest.raises(InvalidRequest):
            place.control.set_quotas(AccessSettings(cap_cache_ttl_ms=1))
        place.control.set_quotas(AccessSettings())
        await send()


@pytest.mark.parametrize("ttl", [0, 4_999, 120_001, "30"])
def test_the_time_to_live_of_the_cache_is_bounded(ttl: Any) -> None:
    with pytest.raises(InvalidRequest):
        AccessSettings(cap_cache_ttl_ms=ttl).validate()


# -- Searches and the audit log ---


async def test_a_search_of_a_capability_limited_to_topics_names_covered_ones(place: Place) -> None:
    session = await place.control.open_session(place.issue(topics=["orders.*"], operations=READ))
    for topics in (["orders.new"], ["orders.*"], ["orders.*.x", "orders.eu*"]):
        await session.search(EventFilter(topics=tuple(topics)))
    for topics in ([], ["payments"], ["*"], ["orders*"], ["orders.new", "payments"]):
        assert await reason_of(session.search(EventFilter(topics=tuple(topics)))) == "topic"
    assert await reason_of(session.search(EventFilter(topics=("orders.a",), match="x"))) == "operation"
    assert await reason_of(session.search(EventFilter(topics=("orders.a",), mailbox="acme@two"))) == "mailbox"
    assert {each.mailbox for each in place.filters} == {"acme@one"}


async def test_reads_and_searches_are_audited_with_their_outcome(place: Place) -> None:
    sent = await place.mailbox.send_message(message())
    session = await place.control.open_session(place.issue(topics=[A], principal="eve"))
    await session.mailbox.get_message(sent.message_id)
    await session.mailbox.peek_messages(A)
    await session.search(EventFilter(topics=(A,), match="secret"))
    await reason_of(session.mailbox.peek_messages(B))
    await reason_of(session.search(EventFilter()))
    assert [
        (each.principal, each.operation, each.topics, each.target, each.matches, each.outcome)
        for each in place.audit.entries
    ] == [
        ("eve", "read-payload", (), sent.message_id, 1, "allowed"),
        ("eve", "read-payload", (A,), "", 1, "allowed"),
        ("eve", "read-headers", (A,), "", 0, "allowed"),
        ("eve", "read-payload", (B,), "", 0, "E_CAP_SCOPE"),
        ("eve", "read-headers", (), "", 0, "E_CAP_SCOPE"),
    ]
    assert place.audit.entries[2].criteria == ("topics", "match")
    assert "secret" not in repr(place.audit.entries)


async def test_calls_on_the_whole_service_need_a_capability_of_all_topics(place: Place) -> None:
    session = await place.control.open_session(place.issue(operations=READ))
    session.require(Operation.READ_HEADERS)
    with pytest.raises(Forbidden):
        session.require(Operation.ADMIN)
    limited = await place.control.open_session(place.issue(topics=[A]))
    with pytest.raises(Forbidden):
        limited.require(Operation.READ_HEADERS)
