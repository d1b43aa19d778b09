"""Access control: what capabilities permit."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from postroom.application.access.guard import AccessSettings
from postroom.application.operations.mailbox import Mailbox
from postroom.application.received_messages import ReceivedMessage
from postroom.application.worker_reports import WorkerState
from postroom.domain.capability.rights import BindPrincipal, MaxMessages, Right
from postroom.domain.capability.token import Token, attenuate
from postroom.domain.errors import Forbidden, InvalidRequest, NotFound
from postroom.domain.message import Receipt
from postroom.domain.policy import TopicPolicy
from postroom.domain.redrive.spec import RedriveSpec
from postroom.domain.schedule import ScheduleSpec
from postroom.domain.search import EventFilter
from postroom.domain.settings import SettingsChanges
from postroom.domain.subscription import SubscriptionFilter
from tests.support.access import MemoryPlace, controlled_mailbox, first, mailbox_of, reason_of
from tests.support.messages import message

A, B = "orders", "payments"


@pytest.fixture
async def place() -> AsyncIterator[MemoryPlace]:
    async with controlled_mailbox() as opened:
        yield opened


async def refusals(mailbox: Mailbox, receipt: Receipt) -> list[type | None]:
    answers = [
        *await mailbox.ack_messages([receipt]),
        *await mailbox.nack_messages([receipt]),
        *await mailbox.extend_visibility([receipt], 1_000),
    ]
    return [None if each is None else type(each) for each in answers]


# -- Operations ---


@dataclass
class Call:
    operations: tuple[Right, ...]
    run: Callable[[Mailbox, str, ReceivedMessage], Awaitable[object]]


READ = (Right.READ_HEADERS,)
PAYLOAD = (Right.READ_HEADERS, Right.READ_PAYLOAD)
CALLS = {
    "send": Call((Right.SEND,), lambda m, t, _: m.send_message(message(topic=t))),
    "send batch": Call((Right.SEND,), lambda m, t, _: first(m.send_batch([message(topic=t)]))),
    "receive": Call((Right.RECV,), lambda m, t, _: m.receive_messages(t)),
    "receive of several": Call((Right.RECV,), lambda m, t, _: m.receive_messages([A, t])),
    "ack": Call((Right.ACK,), lambda m, t, r: first(m.ack_messages([r.receipt]))),
    "nack": Call((Right.NACK,), lambda m, t, r: first(m.nack_messages([r.receipt]))),
    "extend": Call((Right.EXTEND,), lambda m, t, r: first(m.extend_visibility([r.receipt], 1_000))),
    "redrive": Call((Right.REDRIVE,), lambda m, t, _: m.redrive_dead_letters(t)),
    "redrive job": Call((Right.REDRIVE,), lambda m, t, _: m.start_redrive(RedriveSpec(topics=(t,)))),
    "redrive job with copies": Call(
        (Right.REDRIVE, Right.SEND),
        lambda m, t, _: m.start_redrive(RedriveSpec(topics=(t,), set_headers={"a": "b"})),
    ),
    "job that cancels": Call(
        (Right.ADMIN,), lambda m, t, _: m.start_redrive(RedriveSpec(topics=(t,), action="cancel"))
    ),
    "job that reschedules by keys": Call(
        (Right.ADMIN, Right.READ_HEADERS),
        lambda m, t, _: m.start_redrive(RedriveSpec(topics=(t,), action="reschedule", keys=("k",))),
    ),
    "preview of a job that cancels": Call(
        (Right.READ_HEADERS, Right.ADMIN),
        lambda m, t, _: m.preview_redrive(RedriveSpec(topics=(t,), action="cancel")),
    ),
    "redrive job by words": Call(
        (Right.REDRIVE, *PAYLOAD),
        lambda m, t, _: m.start_redrive(RedriveSpec(topics=(t,), match="word")),
    ),
    "purge job": Call(
        (Right.ADMIN,), lambda m, t, _: m.start_redrive(RedriveSpec(topics=(t,), action="purge"))
    ),
    "preview": Call(
        (Right.READ_HEADERS, Right.REDRIVE),
        lambda m, t, _: m.preview_redrive(RedriveSpec(topics=(t,))),
    ),
    "purge": Call((Right.ADMIN,), lambda m, t, _: m.purge_topic(t)),
    "policy": Call((Right.ADMIN,), lambda m, t, _: m.set_topic_policy(t, TopicPolicy())),
    "pause": Call((Right.ADMIN,), lambda m, t, _: m.pause_topic(t)),
    "resume": Call((Right.ADMIN,), lambda m, t, _: m.resume_topic(t)),
    "get": Call(PAYLOAD, lambda m, t, r: m.get_message(r.message_id)),
    "explain": Call(READ, lambda m, t, r: m.explain_message(r.message_id)),
    "backlog": Call(READ, lambda m, t, _: m.get_backlog(t)),
    "dead letters": Call(READ, lambda m, t, _: m.list_dead_letters(t)),
    "get policy": Call(READ, lambda m, t, _: m.get_topic_policy(t)),
    "peek": Call(PAYLOAD, lambda m, t, _: m.peek_messages(t)),
}


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_needs_its_operation_its_topic_and_its_mailbox(place: MemoryPlace, name: str) -> None:
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
        other = await mailbox_of(place, operations=[each for each in Right if each != missing])
        assert await reason_of(call.run(other, A, deliveries[A])) == "operation"
    elsewhere = await mailbox_of(place, mailboxes=["acme@two"])
    assert await reason_of(call.run(elsewhere, A, deliveries[A])) == "mailbox"


JOB = "01890a5d-ac96-774b-bcce-b302099a8057"
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "send_message": (message(),),
    "send_batch": ([message()],),
    "receive_messages": (A,),
    "stream_messages": (A,),
    "ack_messages": ([Receipt(bytes(16), 1, 1)],),
    "nack_messages": ([Receipt(bytes(16), 1, 1)],),
    "extend_visibility": ([Receipt(bytes(16), 1, 1)], 1_000),
    "redrive_dead_letters": (A,),
    "cancel_messages": (["id"],),
    "reschedule_messages": (["id"],),
    "purge_topic": (A,),
    "set_topic_policy": (A, TopicPolicy()),
    "pause_topic": (A,),
    "resume_topic": (A,),
    "set_subscription": ("mail", SubscriptionFilter((A,))),
    "list_subscriptions": (),
    "set_schedule": ("nightly", ScheduleSpec(A, "0 3 * * *")),
    "list_schedules": (),
    "pause_schedule": ("nightly",),
    "resume_schedule": ("nightly",),
    "run_schedule": ("nightly",),
    "delete_schedule": ("nightly",),
    "rewind_subscription": ("mail", 0),
    "delete_subscription": ("mail",),
    "delete_old_events": (0,),
    "get_message": ("id",),
    "wait_for_result": ("id",),
    "explain_message": ("id",),
    "get_backlog": (),
    "list_dead_letters": (),
    "get_topic_policy": (A,),
    "list_topics": (),
    "describe_topic": (A,),
    "list_consumers": (),
    "list_workers": (),
    "report_worker": (JOB, WorkerState("shop")),
    "peek_messages": (A,),
    "search_messages": (EventFilter(topics=(A,)),),
    "preview_redrive": (RedriveSpec(topics=(A,)),),
    "start_redrive": (RedriveSpec(topics=(A,)),),
    "list_redrives": (),
    "get_redrive": (JOB,),
    "list_redrive_messages": (JOB,),
    "change_redrive": (JOB, "cancel"),
    "save_search": ("mine", f"topics={A}"),
    "list_searches": (),
    "delete_search": (JOB,),
    "get_settings": (),
    "preview_settings": (SettingsChanges(),),
    "set_settings": (SettingsChanges(),),
}
"""Of every call of a mailbox."""


def test_the_calls_here_are_those_of_the_port() -> None:
    calls = {name for name in vars(Mailbox) if not name.startswith("_")} - {"name"}
    assert calls == ARGUMENTS.keys()


@pytest.mark.parametrize("name", ARGUMENTS)
async def test_no_call_is_allowed_after_the_capability_expired(place: MemoryPlace, name: str) -> None:
    mailbox = await mailbox_of(place, lifetime_ms=1_000)
    await place.mailbox.send_message(message())
    await place.clock.advance(1)

    async def call() -> None:
        answer = getattr(mailbox, name)(*ARGUMENTS[name])
        if name != "stream_messages":
            await answer
            return
        async with answer as stream:
            await anext(stream)

    assert await reason_of(call()) == "expired"
    (received,) = await place.mailbox.receive_messages(A)
    assert received.attempt == 1


async def test_answers_about_all_topics_have_the_covered_ones_only(place: MemoryPlace) -> None:
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
    page = await mailbox.list_dead_letters(limit=1)
    rest = await mailbox.list_dead_letters(limit=1, cursor=page.next_cursor)
    letters = page.items + rest.items
    assert ([each.topic for each in letters], rest.next_cursor) == ([A, A], None)
    assert (await mailbox.list_dead_letters(at=backlog.position)).items == letters
    assert (await mailbox.list_dead_letters(at=backlog.position, limit=1)).items == letters[:1]
    assert await reason_of(mailbox.delete_old_events(0)) == "topic"


async def test_what_does_not_exist_looks_like_what_is_of_another_topic(place: MemoryPlace) -> None:
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


@pytest.mark.parametrize("name", ["cancel_messages", "reschedule_messages"])
async def test_only_messages_of_covered_topics_are_changed(place: MemoryPlace, name: str) -> None:
    """An id of another topic, of a message of whatever state, is as unknown as one that nobody has."""
    names = [f"{topic} {kind}" for topic in (A, B) for kind in ("waits", "is settled", "is in flight")]
    for each in names:
        await place.mailbox.send_message(message(topic=each.split()[0], message_id=each))
    for topic in (A, B):
        waiting, settled, _ = await place.mailbox.receive_messages(topic)
        await settled.ack()
        await waiting.nack(delay_ms=0)
    mailbox = await mailbox_of(place, topics=[A], operations=(Right.ADMIN,))
    how = {} if name == "cancel_messages" else {"deliver_after_ms": 0}
    changes = await getattr(mailbox, name)([*names, "nobody"], **how)
    last = "changed" if name == "cancel_messages" else "in_flight"
    assert [each.outcome for each in changes] == ["changed", "settled", last, *["unknown"] * 4]
    entry = place.audit.entries[-1]
    matches = 2 if last == "changed" else 1
    assert (entry.operation, entry.matches, entry.criteria) == (Right.ADMIN, matches, (name,))
    (event, *_) = (await place.mailbox.get_message(names[0])).history[::-1]
    assert event.facts["principal"] == "tester"
    other = await mailbox_of(place, operations=[each for each in Right if each != Right.ADMIN])
    assert await reason_of(getattr(other, name)(names[:1])) == "operation"
    few = await mailbox_of(place, MaxMessages(2), topics=[A])
    assert await reason_of(getattr(few, name)(names[:3])) == "messages"


async def test_the_topic_of_a_receipt_is_found_also_for_ids_of_senders(place: MemoryPlace) -> None:
    for topic in (A, B):
        await place.mailbox.send_message(message(topic=topic, message_id=f"own-{topic}"))
    mailbox = await mailbox_of(place, topics=[A])
    (own,) = await place.mailbox.receive_messages(A)
    (other,) = await place.mailbox.receive_messages(B)
    assert await refusals(mailbox, other.receipt) == [Forbidden, Forbidden, Forbidden]
    assert await mailbox.ack_messages([own.receipt]) == [None]


async def test_messages_that_are_not_covered_are_refused_alone(place: MemoryPlace) -> None:
    mailbox = await mailbox_of(place, MaxMessages(4), topics=[A])
    junk: Any = "no message"
    batch = [message(topic=A), message(topic=B), junk, message(topic=A), message(topic=A)]
    answers = [type(each).__name__ for each in await mailbox.send_batch(batch)]
    assert answers == ["Sent", "Forbidden", "InvalidRequest", "Sent", "Forbidden"]
    assert len(await mailbox.receive_messages(A, max_messages=99)) == 2


async def test_a_call_returns_at_most_as_many_messages_as_the_capability_covers(place: MemoryPlace) -> None:
    await place.mailbox.send_batch([message() for _ in range(5)])
    mailbox = await mailbox_of(place, MaxMessages(2))
    assert len(await mailbox.peek_messages(A)) == 2
    assert len(await mailbox.receive_messages(A)) == 2


async def test_a_subclass_of_text_is_no_topic(place: MemoryPlace) -> None:
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


# -- What is of other topics ---


@pytest.mark.parametrize(
    "call",
    [
        lambda mailbox: mailbox.pause_topic("orders.nwe"),
        lambda mailbox: mailbox.resume_topic("orders.nwe"),
        lambda mailbox: mailbox.purge_topic("orders.nwe"),
        lambda mailbox: mailbox.redrive_dead_letters("orders.nwe"),
    ],
)
async def test_the_error_of_an_unknown_topic_names_covered_topics_only(
    place: MemoryPlace, call: Callable[[Mailbox], Awaitable[object]]
) -> None:
    for topic in ("orders.new", "orders.eu", "order.new", "payments"):
        await place.mailbox.send_message(message(topic=topic))
    with pytest.raises(NotFound) as everything:
        await call(await mailbox_of(place))
    assert "order.new" in str(everything.value)
    with pytest.raises(NotFound) as limited:
        await call(await mailbox_of(place, topics=["orders.*"]))
    assert str(limited.value).endswith("did you mean orders.new or orders.eu?")
    with pytest.raises(NotFound) as alone:
        await call(await mailbox_of(place, topics=["orders.nwe"]))
    assert str(alone.value).endswith("has no topic orders.nwe; there is none yet.")


# -- The principal of messages ---


async def test_a_capability_that_binds_its_principal_sends_in_its_name_only(place: MemoryPlace) -> None:
    token = Token.decode(place.issue(principal="shop"))
    bound = (await place.control.open_session(attenuate(token, BindPrincipal()).encode())).mailbox
    assert await reason_of(bound.send_message(message(principal="bank"))) == "principal"
    (refused,) = await bound.send_batch([message(principal="bank")])
    assert isinstance(refused, Forbidden)
    await bound.send_message(message(b"1"))
    await bound.send_batch([message(b"2", principal="shop"), message(b"3", principal="")])
    free = (await place.control.open_session(token.encode())).mailbox
    await free.send_message(message(b"4", principal="bank"))
    received = await place.mailbox.receive_messages(A)
    assert [(each.payload, each.principal) for each in received] == [
        *((b"1", "shop"), (b"2", "shop"), (b"3", "shop"), (b"4", "bank"))
    ]


# -- Keys ---


@pytest.mark.parametrize("overlap_ms", [0, 60_000])
async def test_a_session_ends_when_the_key_of_its_token_retires(place: MemoryPlace, overlap_ms: int) -> None:
    token = place.issue()
    mailbox = (await place.control.open_session(token)).mailbox
    await mailbox.send_message(message())
    place.capabilities.rotate(overlap_ms)
    await place.control.refresh()
    if overlap_ms:
        await mailbox.send_message(message())
        await place.clock.advance(overlap_ms / 1_000)
    assert await reason_of(mailbox.send_message(message())) == "expired"
    assert await reason_of(place.control.open_session(token)) == "expired"
    renewed = (await place.control.open_session(place.issue())).mailbox
    await renewed.send_message(message())


@pytest.mark.parametrize("ttl", [0, 4_999, 120_001, "30"])
def test_the_time_to_live_of_the_cache_is_bounded(ttl: Any) -> None:
    with pytest.raises(InvalidRequest):
        AccessSettings(cap_cache_ttl_ms=ttl).validate()


# -- Searches and the audit log ---


async def test_a_search_of_a_capability_limited_to_topics_names_covered_ones(place: MemoryPlace) -> None:
    session = await place.control.open_session(place.issue(topics=["orders.*"], operations=READ))
    for topics in (["orders.new"], ["orders.*"], ["orders.*.x", "orders.eu*"]):
        await session.search(EventFilter(topics=tuple(topics)))
    for topics in ([], ["payments"], ["*"], ["orders*"], ["orders.new", "payments"]):
        assert await reason_of(session.search(EventFilter(topics=tuple(topics)))) == "topic"
    assert await reason_of(session.search(EventFilter(topics=("orders.a",), match="x"))) == "operation"
    assert await reason_of(session.search(EventFilter(topics=("orders.a",), mailbox="acme@two"))) == "mailbox"
    assert {each.mailbox for each in place.filters} == {"acme@one"}


async def test_reads_and_searches_are_audited_with_their_outcome(place: MemoryPlace) -> None:
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


async def test_headers_are_read_without_the_right_to_read_payloads(place: MemoryPlace) -> None:
    sent = await place.mailbox.send_message(message(b"secret", attrs={"tenant": "acme"}))
    reader = await place.control.open_session(place.issue(operations=[Right.READ_HEADERS], topics=[A]))
    detail = await reader.read_headers(sent.message_id)
    assert detail.item.custom_headers == {"tenant": "acme"}
    assert [each.event for each in detail.history] == ["MessageSent"]
    assert b"secret" not in detail.item.envelope_blob
    assert detail.item.reconstruct_envelope().extensions == {"tenant": b"acme"}
    assert await reason_of(reader.mailbox.get_message(sent.message_id)) == "operation"
    other = await place.mailbox.send_message(message(topic=B))
    assert await reason_of(reader.read_headers(other.message_id)) == "topic"
    assert await reason_of(reader.read_headers("nobody")) == "topic"
    assert [(each.operation, each.target, each.outcome) for each in place.audit.entries] == [
        ("read-headers", sent.message_id, "allowed"),
        ("read-payload", sent.message_id, "E_CAP_SCOPE"),
        ("read-headers", other.message_id, "E_CAP_SCOPE"),
        ("read-headers", "nobody", "E_CAP_SCOPE"),
    ]


async def test_calls_on_the_whole_service_need_a_capability_of_all_topics(place: MemoryPlace) -> None:
    session = await place.control.open_session(place.issue(operations=READ))
    session.require(Right.READ_HEADERS)
    with pytest.raises(Forbidden):
        session.require(Right.ADMIN)
    limited = await place.control.open_session(place.issue(topics=[A]))
    with pytest.raises(Forbidden):
        limited.require(Right.READ_HEADERS)
