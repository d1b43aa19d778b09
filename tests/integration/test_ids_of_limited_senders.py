"""Message ids of senders that are limited to topics: unique in their topic, and free elsewhere (ADR 0106)."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import ClientSession

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.compose.projections import LocalTaskRunner, rebuild_projections
from postroom.adapters.compose.queries import open_read_models, read_mailbox
from postroom.adapters.system.clock import SystemClock
from postroom.application.messages import Sent
from postroom.application.operations.mailbox import Mailbox
from postroom.application.queries.browse_log import BrowseLog
from postroom.application.queries.get_message import VerifyMessage
from postroom.application.queries.read_events import EventFilter as LogFilter
from postroom.application.queries.read_events import ReadEvents
from postroom.domain.capability.rights import Topics
from postroom.domain.errors import Forbidden, IdempotencyConflict, NotFound
from postroom.domain.policy import TopicPolicy
from postroom.domain.redrive.spec import RedriveSpec
from postroom.domain.search import EventFilter
from postroom.domain.subject import SubjectPolicy
from postroom.domain.subscription import SubscriptionFilter
from tests.support.access import Controlled
from tests.support.erasure import new_erasure
from tests.support.redrives import ended
from tests.support.stores import MAILBOX, message
from tests.support.surfaces import served

UUID = "0190f5e2-7c4f-7000-8000-000000000001"
IDS = ("order-9", UUID)
Place = Controlled[Any, Any]


@pytest_asyncio.fixture
async def place(mailbox: OwnedMailbox) -> Place:
    return Controlled(mailbox, SystemClock())


async def limited(place: Place, *topics: str) -> Mailbox:
    return (await place.control.open_session(place.issue(Topics(topics)))).mailbox


async def send_to_three_topics(place: Place, id_: str) -> dict[str, Mailbox]:
    """Send a message of one id to each of three topics, two of them by senders limited to them."""
    senders = {"a.x": await limited(place, "a.*"), "b.x": await limited(place, "b.*"), "c": place.mailbox}
    for topic, sender in senders.items():
        answer = await sender.send_message(message(f"for {topic}".encode(), topic, message_id=id_))
        assert answer == Sent(id_, duplicate=False)
    return senders


@pytest.mark.parametrize("id_", IDS)
async def test_an_id_that_a_limited_sender_used_prevents_no_message_of_another_topic(
    place: Place, id_: str
) -> None:
    for topic, sender in (await send_to_three_topics(place, id_)).items():
        (received,) = await sender.receive_messages(topic)
        assert (received.message_id, received.payload) == (id_, f"for {topic}".encode())
        assert await sender.ack_messages([received.receipt]) == [None]
        again = message(f"for {topic}".encode(), topic, message_id=id_)
        assert await sender.send_message(again) == Sent(id_, duplicate=True)


@pytest.mark.parametrize("id_", IDS)
async def test_on_one_topic_an_id_is_one_message_whoever_sends_it(place: Place, id_: str) -> None:
    sender = await limited(place, "a.*")
    for topic, first, second in (("a.x", sender, place.mailbox), ("a.y", place.mailbox, sender)):
        own_id = f"{id_[:-1]}{'01'[topic == 'a.y']}"
        again = message(topic=topic, message_id=own_id)
        assert await first.send_message(again) == Sent(own_id, duplicate=False)
        assert await second.send_message(again) == Sent(own_id, duplicate=True)
        with pytest.raises(IdempotencyConflict):
            await second.send_message(message(b"another", topic, message_id=again.message_id))
        both = [message(topic=topic, message_id=f"{topic} both") for _ in range(2)]
        answers = await asyncio.gather(*(each.send_batch(both) for each in (first, second)))
        assert sorted(each.duplicate for batch in answers for each in batch) == [False, True, True, True]


@pytest.mark.parametrize("id_", IDS)
async def test_each_caller_finds_the_message_that_it_caller_covers_by_an_id(place: Place, id_: str) -> None:
    senders = await send_to_three_topics(place, id_)
    for topic, sender in senders.items():
        detail = await sender.get_message(id_)
        assert (detail.message_id, detail.topic, detail.intact) == (id_, topic, True)
        assert (await sender.explain_message(id_)).topic == topic
        assert (await place.mailbox.get_message(detail.stream_id)).topic == topic
    with pytest.raises(Forbidden):
        await (await limited(place, "d")).get_message(id_)
    both = await limited(place, "a.*", "b.*")
    assert (await both.get_message(id_)).topic == "a.x"  # the first that was sent
    await senders["b.x"].send_message(message(topic="b.x", message_id="only-b"))
    assert (await place.mailbox.get_message("only-b")).topic == "b.x"
    with pytest.raises(NotFound):
        await place.mailbox.get_message("none")


@pytest.mark.parametrize("id_", IDS)
async def test_each_copy_names_its_original_although_other_topics_have_its_id(place: Place, id_: str) -> None:
    await place.mailbox.set_subscription("all", SubscriptionFilter(("*",)))
    await send_to_three_topics(place, id_)
    copies = await place.mailbox.receive_messages("all")
    assert {each.published_topic for each in copies} == {"a.x", "b.x", "c"}
    for copy in copies:
        detail = await place.mailbox.get_message(copy.message_id)
        assert detail.intact
        original = await place.mailbox.get_message(detail.copy_of or "")
        assert (original.topic, original.message_id) == (copy.published_topic, id_)
        assert (detail.copy_of == id_) == (copy.published_topic == "c")


@pytest.mark.parametrize("id_", IDS)
async def test_dead_letters_are_redriven_by_their_id_on_their_topic_only(place: Place, id_: str) -> None:
    senders = await send_to_three_topics(place, id_)
    for topic in senders:
        await place.mailbox.set_topic_policy(topic, TopicPolicy(max_attempts=1))
        (received,) = await place.mailbox.receive_messages(topic)
        await place.mailbox.nack_messages([received.receipt])
    for topic, sender in senders.items():
        started = await sender.start_redrive(RedriveSpec(topics=(topic,), message_ids=(id_,)))
        job = await ended(place.mailbox, started)
        assert (job.matched, job.moved) == (1, 1)
        (received,) = await sender.receive_messages(topic)
        await sender.nack_messages([received.receipt])
        assert await sender.redrive_dead_letters(topic, message_ids=[id_, "none"]) == 1
    job = await place.mailbox.start_redrive(RedriveSpec(message_ids=(id_,)))
    assert job.matched == 0


@pytest.mark.parametrize("store", ["sqlite", "postgres"], indirect=True)
async def test_read_models_and_the_log_have_all_messages_of_an_id(store: str, place: Place) -> None:
    for id_ in IDS:
        await send_to_three_topics(place, id_)
    await asyncio.to_thread(rebuild_projections, store, runner=LocalTaskRunner())
    models = open_read_models(store)
    try:
        for id_ in IDS:
            page = models.search(EventFilter(message_id=id_))
            assert {each.topic for each in page.items} == {"a.x", "b.x", "c"}
    finally:
        models.close()
    with read_mailbox(store, MAILBOX) as reader:
        for id_ in IDS:
            events = {each.topic for each in ReadEvents(reader.log)(LogFilter(message_id=id_))}
            browsed = {each.topic for each in BrowseLog(reader.log).events(LogFilter(message_id=id_)).items}
            assert events == browsed == {"a.x", "b.x", "c"}
            assert all(each.matches for each in VerifyMessage(reader.log)(id_).hashes)
        for digits in (13, 30):
            found = reader.find_message_ids(UUID[:digits], 10)
            assert {(each.message_id, each.topic) for each in found} == {
                (UUID, each) for each in ("a.x", "b.x", "c")
            }
        assert reader.find_message_ids("0190f5e3", 10) == []
        assert reader.verify_log().messages == 6


async def test_an_encrypted_message_of_a_limited_sender_has_its_id(store: str, tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    erasure = new_erasure(tmp_path / "secrets", {"*": SubjectPolicy(subject="principal")})
    async with open_mailbox(store, MAILBOX, erasure=erasure) as mailbox:
        place: Place = Controlled(mailbox, SystemClock())
        sender = await limited(place, "a.*")
        for id_ in IDS:
            for each, topic in ((sender, "a.x"), (mailbox, "b.x")):
                sent = message(topic.encode(), topic, message_id=id_, principal="alice")
                assert await each.send_message(sent) == Sent(id_, duplicate=False)
            (received,) = await sender.receive_messages("a.x")
            assert (received.message_id, received.payload) == (id_, b"a.x")
            assert (await sender.get_message(id_)).intact
            await sender.ack_messages([received.receipt])


@pytest.mark.parametrize("id_", IDS)
async def test_an_ack_without_a_receipt_settles_the_message_that_the_token_covers(
    place: Place, id_: str
) -> None:
    access = place.control.open_session
    async with served(place.mailbox, "http", access=lambda *_: access) as address:
        await send_to_three_topics(place, id_)
        await place.mailbox.receive_messages(["a.x", "b.x", "c"])
        headers = {"Authorization": f"Bearer {place.issue(topics=['b.*'])}"}
        async with ClientSession(headers=headers) as client:
            for _ in range(2):
                async with client.post(f"{address}/v1/ack/{id_}", json={}) as answer:
                    assert answer.status == 200, await answer.text()
        unsettled = {shard.topic for shard in (await place.mailbox.get_backlog()).shards if shard.in_flight}
        assert unsettled == {"a.x", "c"}
