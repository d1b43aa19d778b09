"""What each call over a network surface leaves, and where, as the table in docs/capabilities.md says."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from postroom.application.access.audit import AuditEntry
from postroom.application.operations.mailbox import Mailbox
from postroom.application.received_messages import ReceivedMessage
from postroom.application.service import Session
from postroom.application.worker_reports import WorkerState
from postroom.domain.capability.rights import Right
from postroom.domain.capability.token import Token
from postroom.domain.errors import Forbidden, InvalidRequest
from postroom.domain.policy import TopicPolicy
from postroom.domain.redrive.spec import RedriveSpec
from postroom.domain.saved_search import search_id
from postroom.domain.schedule import ScheduleSpec
from postroom.domain.search import EventFilter
from postroom.domain.settings import SettingsChanges
from postroom.domain.subscription import SubscriptionFilter
from tests.support.access import MemoryPlace, controlled_mailbox, mailbox_of
from tests.support.messages import message
from tests.support.waiting import until_answer

PAGE = Path(__file__).parents[3] / "docs/capabilities.md"
A = "orders"
JOB = "01890a5d-ac96-774b-bcce-b302099a8057"
NIGHTLY = ScheduleSpec(A, "0 3 * * *")
SPEC = RedriveSpec(topics=(A,))
QUERY = f"topics={A}"
CHANGES = SettingsChanges(topics={A: {"max_attempts": 9}})


class Row(NamedTuple):
    """A row of the table, for one of its calls."""

    call: str
    right: str
    leaves: str


def rows() -> list[Row]:
    section = PAGE.read_text("utf-8").partition("### What each operation leaves")[2].partition("\n## ")[0]
    cells = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return [
        Row(call, right.strip(" `"), leaves.strip())
        for calls, right, leaves in cells
        for call in re.findall(r"`(\w+)`", calls)
    ]


async def read_stream(mailbox: Mailbox) -> None:
    async with mailbox.stream_messages(A, wait_ms=1) as stream:
        async for _ in stream:
            pass


Call = Callable[[Session, ReceivedMessage], Awaitable[Any]]
CALLS: dict[str, Call] = {
    "send_message": lambda s, r: s.mailbox.send_message(message()),
    "send_batch": lambda s, r: s.mailbox.send_batch([message()]),
    "receive_messages": lambda s, r: s.mailbox.receive_messages(A, max_messages=1),
    "stream_messages": lambda s, r: read_stream(s.mailbox),
    "ack_messages": lambda s, r: s.mailbox.ack_messages([r.receipt]),
    "nack_messages": lambda s, r: s.mailbox.nack_messages([r.receipt], reason="broken"),
    "extend_visibility": lambda s, r: s.mailbox.extend_visibility([r.receipt], 60_000),
    "get_message": lambda s, r: s.mailbox.get_message(r.message_id),
    "wait_for_result": lambda s, r: s.mailbox.wait_for_result(r.message_id),
    "peek_messages": lambda s, r: s.mailbox.peek_messages(A),
    "read_headers": lambda s, r: s.read_headers(r.message_id),
    "explain_message": lambda s, r: s.mailbox.explain_message(r.message_id),
    "search_messages": lambda s, r: s.mailbox.search_messages(EventFilter(topics=(A,))),
    "list_dead_letters": lambda s, r: s.mailbox.list_dead_letters(),
    "get_backlog": lambda s, r: s.mailbox.get_backlog(),
    "list_topics": lambda s, r: s.mailbox.list_topics(),
    "describe_topic": lambda s, r: s.mailbox.describe_topic(A),
    "list_consumers": lambda s, r: s.mailbox.list_consumers(),
    "list_workers": lambda s, r: s.mailbox.list_workers(),
    "report_worker": lambda s, r: s.mailbox.report_worker(JOB, WorkerState("shop")),
    "get_settings": lambda s, r: s.mailbox.get_settings(),
    "get_topic_policy": lambda s, r: s.mailbox.get_topic_policy(A),
    "redrive_dead_letters": lambda s, r: s.mailbox.redrive_dead_letters(A),
    "preview_redrive": lambda s, r: s.mailbox.preview_redrive(SPEC),
    "start_redrive": lambda s, r: s.mailbox.start_redrive(SPEC),
    "change_redrive": lambda s, r: s.mailbox.change_redrive(JOB, "undo"),
    "list_redrives": lambda s, r: s.mailbox.list_redrives(),
    "get_redrive": lambda s, r: s.mailbox.get_redrive(JOB),
    "list_redrive_messages": lambda s, r: s.mailbox.list_redrive_messages(JOB),
    "cancel_messages": lambda s, r: s.mailbox.cancel_messages([r.message_id]),
    "reschedule_messages": lambda s, r: s.mailbox.reschedule_messages(["later"], deliver_after_ms=0),
    "purge_topic": lambda s, r: s.mailbox.purge_topic(A),
    "set_topic_policy": lambda s, r: s.mailbox.set_topic_policy(A, TopicPolicy(max_attempts=9)),
    "pause_topic": lambda s, r: s.mailbox.pause_topic(A),
    "resume_topic": lambda s, r: s.mailbox.resume_topic(A),
    "list_schedules": lambda s, r: s.mailbox.list_schedules(),
    "set_schedule": lambda s, r: s.mailbox.set_schedule("nightly", NIGHTLY),
    "pause_schedule": lambda s, r: s.mailbox.pause_schedule("nightly"),
    "resume_schedule": lambda s, r: s.mailbox.resume_schedule("nightly"),
    "run_schedule": lambda s, r: s.mailbox.run_schedule("nightly"),
    "delete_schedule": lambda s, r: s.mailbox.delete_schedule("nightly"),
    "list_subscriptions": lambda s, r: s.mailbox.list_subscriptions(),
    "set_subscription": lambda s, r: s.mailbox.set_subscription("mail", SubscriptionFilter((A,))),
    "rewind_subscription": lambda s, r: s.mailbox.rewind_subscription("audit", 0),
    "delete_subscription": lambda s, r: s.mailbox.delete_subscription("audit"),
    "save_search": lambda s, r: s.mailbox.save_search("mine", QUERY),
    "list_searches": lambda s, r: s.mailbox.list_searches(),
    "delete_search": lambda s, r: s.mailbox.delete_search(search_id("mine", QUERY)),
    "set_settings": lambda s, r: s.mailbox.set_settings(CHANGES),
    "preview_settings": lambda s, r: s.mailbox.preview_settings(CHANGES),
    "delete_old_events": lambda s, r: s.mailbox.delete_old_events(1 << 60),
}


@pytest.fixture
async def place() -> AsyncIterator[MemoryPlace]:
    async with controlled_mailbox() as opened:
        yield opened


async def session_of(place: MemoryPlace, **options: Any) -> tuple[Session, str]:
    """Return the session of a new capability, and its nonce in hexadecimal."""
    token = place.issue(**options)
    return await place.control.open_session(token), Token.decode(token).read_identifier().nonce.hex()


async def prepare(place: MemoryPlace, call: str, session: Session) -> ReceivedMessage:
    """Bring a mailbox into a state that the call changes; return a delivery to the session's capability."""
    owner = place.mailbox
    await owner.send_message(message())
    (settled,) = await owner.receive_messages(A)
    await settled.ack()
    await place.clock.advance(1)
    await owner.set_topic_policy(A, TopicPolicy(max_attempts=1))
    await owner.send_batch([message(), message(), message(message_id="later")])
    (dead,) = await owner.receive_messages(A, max_messages=1)
    await dead.nack(reason="broken")
    await owner.set_topic_policy(A, TopicPolicy(max_attempts=5))
    if call in ("change_redrive", "get_redrive", "list_redrive_messages"):
        await owner.start_redrive(SPEC, job_id=JOB)

        async def is_done() -> bool:
            return not (await owner.get_redrive(JOB)).is_active

        await until_answer(is_done)
    (received,) = await session.mailbox.receive_messages(A, max_messages=1)
    if call == "delete_search":
        await owner.save_search("mine", QUERY)
    if call == "resume_topic":
        await owner.pause_topic(A)
    if call in ("rewind_subscription", "delete_subscription"):
        await owner.set_subscription("audit", SubscriptionFilter((A,)))
    if call in ("pause_schedule", "resume_schedule", "run_schedule", "delete_schedule"):
        await owner.set_schedule("nightly", NIGHTLY)
    if call == "resume_schedule":
        await owner.pause_schedule("nightly")
    return received


async def leaves(place: MemoryPlace, call: Callable[[], Awaitable[Any]]) -> tuple[bool, list[AuditEntry]]:
    """Make a call; return whether the log of the mailbox has grown, and the new entries of the audit log."""
    before, entries = (await place.mailbox.get_backlog()).position, len(place.audit.entries)
    await call()
    after = (await place.mailbox.get_backlog()).position
    return after > before, place.audit.entries[entries:]


def test_the_table_has_every_call() -> None:
    calls = {name for name in vars(Mailbox) if not name.startswith("_")} - {"name"}
    assert sorted(each.call for each in rows()) == sorted({*calls, "read_headers"})
    assert CALLS.keys() == {each.call for each in rows()}


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.call)
async def test_a_call_leaves_what_the_table_says(place: MemoryPlace, row: Row) -> None:
    session, nonce = await session_of(place, principal="shop")
    received = await prepare(place, row.call, session)
    is_logged, entries = await leaves(place, lambda: CALLS[row.call](session, received))
    is_audited = "audit log" in row.leaves and "if another" not in row.leaves
    if row.call != "delete_old_events":  # what is removed also makes the log longer by one
        assert is_logged == ("log:" in row.leaves)
    assert [(each.principal, each.capability, each.outcome) for each in entries] == [
        ("shop", nonce, "allowed")
    ] * is_audited
    if is_audited:
        assert entries[0].operation == row.right
        assert A in (*entries[0].topics, A)
    else:
        assert "if another" in row.leaves or "audit" not in row.leaves


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.call)
async def test_a_refused_call_leaves_who_was_refused(place: MemoryPlace, row: Row) -> None:
    session, _ = await session_of(place)
    received = await prepare(place, row.call, session)
    others = [each for each in Right if each != row.right]
    refused, nonce = await session_of(place, principal="stranger", operations=others)

    async def call() -> None:
        with suppress(Forbidden):
            await CALLS[row.call](refused, received)

    is_logged, entries = await leaves(place, call)
    assert not is_logged
    assert [(e.principal, e.capability, e.operation, e.outcome) for e in entries] == [
        ("stranger", nonce, row.right, "E_CAP_SCOPE")
    ]


@pytest.mark.parametrize(
    ("changes", "replace", "topics", "criteria"),
    [
        ({"topics": {"b.*": {"shards": 1}, A: None}}, False, ("b.*", A), ("topics.b.*", f"topics.{A}")),
        ({"topics": {A: {"shards": 1}}}, True, (), (f"topics.{A}",)),
        (
            {"limits": {"topics": 5}, "topics": {A: {"shards": 1}}},
            False,
            (),
            ("limits.topics", f"topics.{A}"),
        ),
        ({"default_policy": {"shards": 3}}, False, (), ("policy.shards",)),
        ({"limits": {"topicz": 5}}, False, (), ()),
        ({}, True, (), ()),
    ],
)
@pytest.mark.parametrize("call", ["preview_settings", "set_settings"])
async def test_the_entry_of_a_change_of_settings_names_what_was_changed(
    place: MemoryPlace, call: str, changes: Any, replace: bool, topics: Any, criteria: Any
) -> None:
    session, _ = await session_of(place)

    async def change() -> None:
        with suppress(InvalidRequest):
            await getattr(session.mailbox, call)(SettingsChanges(**changes), replace=replace)

    _, (entry,) = await leaves(place, change)
    assert (entry.target, entry.topics) == ("" if topics else session.mailbox.name, topics)
    assert entry.criteria == (call, *criteria)


SETTLEMENTS = [each for each in rows() if "if another" in each.leaves]


@pytest.mark.parametrize("row", SETTLEMENTS, ids=lambda row: row.call)
async def test_a_settlement_of_what_another_capability_received_is_audited(
    place: MemoryPlace, row: Row
) -> None:
    receiver, _ = await session_of(place)
    received = await prepare(place, row.call, receiver)
    other, nonce = await session_of(place, principal="other")
    is_logged, (entry,) = await leaves(place, lambda: CALLS[row.call](other, received))
    assert is_logged
    assert (entry.principal, entry.capability, entry.operation) == ("other", nonce, row.right)
    assert (entry.target, entry.matches, entry.outcome) == (received.message_id, 1, "allowed")


async def test_a_delivery_names_the_principal_and_the_capability_that_received_it(place: MemoryPlace) -> None:
    await place.mailbox.send_message(message())
    session, nonce = await session_of(place, principal="shop")
    (received,) = await session.mailbox.receive_messages(A, consumer="worker-1")
    detail = await place.mailbox.get_message(received.message_id)
    facts = {entry.event: entry.facts for entry in detail.history}
    assert {name: facts["MessageReceived"][name] for name in ("consumer", "principal", "capability")} == {
        "consumer": "worker-1",
        "principal": "shop",
        "capability": nonce,
    }
    explanation = await place.mailbox.explain_message(received.message_id)
    assert (explanation.deliveries[0].principal, explanation.deliveries[0].capability) == ("shop", nonce)
    assert f"Delivered to worker-1 with capability {nonce} of shop as attempt 1" in explanation.story[1].text
    await received.nack(delay_ms=0)
    (own,) = await place.mailbox.receive_messages(A)
    later = (await place.mailbox.get_message(own.message_id)).history[-1].facts
    assert "principal" not in later


async def test_the_refused_items_of_a_batch_are_one_entry(place: MemoryPlace) -> None:
    mailbox = await mailbox_of(place, topics=[A])
    answers = await mailbox.send_batch([message(topic=each) for each in (A, "payments", "x", "payments")])
    assert [type(each).__name__ for each in answers] == ["Sent", "Forbidden", "Forbidden", "Forbidden"]
    (entry,) = place.audit.entries
    assert (entry.operation, entry.topics, entry.matches) == ("send", ("payments", "x"), 3)


async def test_the_records_of_subscriptions_name_them_and_the_principal_that_changed_them(
    place: MemoryPlace,
) -> None:
    session, _ = await session_of(place, principal="shop")
    mailbox, log = session.mailbox, place.mailbox.engine.log
    start = (await place.mailbox.get_backlog()).position
    await mailbox.set_subscription("mail", SubscriptionFilter((A,)))
    await mailbox.rewind_subscription("mail", start)
    await mailbox.delete_subscription("mail", dry_run=True)
    await mailbox.delete_subscription("mail")
    changes = ["SubscriptionSet", "SubscriptionRewound", "SubscriptionDeleted"]
    events = [each.event for each in log.read(start) if each.type in changes]
    assert [(type(each).__name__, getattr(each, "principal", "")) for each in events] == [
        (name, "shop") for name in changes
    ]
    assert [(each.topics, each.criteria) for each in place.audit.entries] == [
        (("mail",), ("set_subscription",)),
        (("mail",), ("rewind_subscription",)),
        (("mail",), ("delete_subscription", "dry_run")),
        (("mail",), ("delete_subscription",)),
    ]


async def test_the_records_of_schedules_name_them_and_the_principal_that_changed_them(
    place: MemoryPlace,
) -> None:
    session, _ = await session_of(place, principal="shop")
    mailbox, log = session.mailbox, place.mailbox.engine.log
    start = (await place.mailbox.get_backlog()).position
    await mailbox.set_schedule("nightly", NIGHTLY)
    await mailbox.pause_schedule("nightly")
    await mailbox.resume_schedule("nightly")
    await mailbox.run_schedule("nightly")
    await mailbox.delete_schedule("nightly")
    events = [each.event for each in log.read(start) if each.type.startswith("Schedule")]
    assert [(type(each).__name__, getattr(each, "principal", "")) for each in events] == [
        (f"Schedule{name}", "shop") for name in ("Set", "Paused", "Resumed", "Ran", "Deleted")
    ]
    calls = [f"{name}_schedule" for name in ("set", "pause", "resume", "run", "delete")]
    assert [(each.topics, each.criteria) for each in place.audit.entries] == [
        (("nightly",), (call,)) for call in calls
    ]


async def test_a_capability_of_some_topics_sees_the_schedules_that_send_to_them_and_changes_none(
    place: MemoryPlace,
) -> None:
    for name, topic in (("one", A), ("other", "mail")):
        await place.mailbox.set_schedule(name, ScheduleSpec(topic, "0 3 * * *"))
    mailbox = await mailbox_of(place, topics=[A])
    assert [each.name for each in await mailbox.list_schedules()] == ["one"]
    for call in (
        mailbox.set_schedule("one", NIGHTLY),
        mailbox.pause_schedule("one"),
        mailbox.resume_schedule("one"),
        mailbox.run_schedule("one"),
        mailbox.delete_schedule("one"),
    ):
        with pytest.raises(Forbidden):
            await call


async def test_a_capability_of_some_topics_sees_their_subscriptions_and_changes_none(
    place: MemoryPlace,
) -> None:
    for name in (A, "mail"):
        await place.mailbox.set_subscription(name, SubscriptionFilter(("others",)))
    mailbox = await mailbox_of(place, topics=[A])
    assert [each.name for each in await mailbox.list_subscriptions()] == [A]
    for call in (
        mailbox.set_subscription(A, SubscriptionFilter((A,))),
        mailbox.rewind_subscription(A, 0),
        mailbox.delete_subscription(A),
    ):
        with pytest.raises(Forbidden):
            await call
