"""Subscriptions of namespaces with several mailboxes."""

from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path

import pytest
import uuid_utils

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.application.cluster.namespace_mailbox import NamespaceMailbox
from postroom.application.operations.mailbox import Mailbox
from postroom.application.reports import DeletionReport, RewindReport
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable
from postroom.domain.subscription import SubscriptionFilter
from tests.support.messages import message
from tests.support.namespaces import Directory, Member
from tests.support.waiting import until_answer

ORDERS = SubscriptionFilter(("orders",))
KEYS = [f"key {number}" for number in range(8)]
"""Of messages in both mailboxes."""


class Place:
    """Two mailboxes, and namespaces that know one or both of them."""

    def __init__(self, mailboxes: list[OwnedMailbox], opened: AsyncExitStack) -> None:
        self.one, self.two = mailboxes
        self.members = {each.name: Member(each) for each in mailboxes}
        self._opened = opened

    async def namespace(self, *names: str) -> NamespaceMailbox:
        directory = Directory("acme", self.members, names or None)
        namespace = NamespaceMailbox(directory, 3_000, uuid_utils.uuid7)
        self._opened.push_async_callback(namespace.close)
        await namespace.open()
        return namespace


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    async with AsyncExitStack() as opened:
        mailboxes = [
            await opened.enter_async_context(open_mailbox(str(tmp_path / name), f"acme@{name}"))
            for name in ("one", "two")
        ]
        yield Place(mailboxes, opened)


async def send(mailbox: Mailbox, text: str = "") -> None:
    await mailbox.send_batch([message(text.encode(), sticky_key=key) for key in KEYS])


async def received(mailbox: Mailbox, topic: str, count: int) -> list[bytes]:
    """Return the payloads of so many messages, which are acked."""
    payloads: list[bytes] = []

    async def is_done() -> bool:
        messages = await mailbox.receive_messages(topic)
        await mailbox.ack_messages([each.receipt for each in messages])
        payloads.extend(each.payload for each in messages)
        return len(payloads) >= count

    await until_answer(is_done)
    return payloads


async def is_live(mailbox: Mailbox) -> bool:
    return all(each.status == "live" for each in await mailbox.list_subscriptions())


async def test_a_subscription_gets_the_messages_of_all_mailboxes(place: Place) -> None:
    namespace = await place.namespace()
    await send(namespace, "old")
    report = await namespace.set_subscription("mail", ORDERS, start=0)
    assert (report.name, report.topics, report.paused) == ("mail", ("orders",), False)
    await send(namespace, "new")
    assert sorted(await received(namespace, "mail", 16)) == [b"new"] * 8 + [b"old"] * 8
    for each in (place.one, place.two):
        assert [each.name for each in await each.list_subscriptions()] == ["mail"]


async def test_the_list_has_each_subscription_once_with_the_sums_of_its_numbers(place: Place) -> None:
    namespace = await place.namespace()
    await namespace.set_subscription("mail", ORDERS)
    await namespace.set_subscription("audit", SubscriptionFilter(("*",), {"region": "eu"}))
    await send(namespace)
    await place.one.receive_messages("mail", max_messages=1)
    await place.two.pause_topic("mail")
    audit, mail = await namespace.list_subscriptions()
    assert (audit.name, audit.headers, audit.ready, audit.paused) == ("audit", {"region": "eu"}, 0, False)
    assert (mail.name, mail.ready, mail.in_flight, mail.paused) == ("mail", 7, 1, True)
    assert mail.status == "live"
    positions = [(await each.get_backlog()).position for each in (place.one, place.two)]
    assert mail.position == sum(positions)


async def test_a_rewind_copies_again_in_all_mailboxes(place: Place) -> None:
    namespace = await place.namespace()
    before = datetime(2026, 1, 31, tzinfo=UTC)
    await namespace.set_subscription("mail", ORDERS)
    await send(namespace)
    expected = RewindReport("mail", 0, 8, 8)
    assert await namespace.rewind_subscription("mail", before, dry_run=True) == expected
    assert len(await received(namespace, "mail", 8)) == 8
    await until_answer(lambda: is_live(namespace))
    assert (await namespace.rewind_subscription("mail", before)).removed == 0
    assert len(await received(namespace, "mail", 8)) == 8


async def test_a_position_is_of_one_mailbox_so_a_namespace_of_several_refuses_it(place: Place) -> None:
    namespace = await place.namespace()
    refusal = "2 mailboxes of the namespace have no position in common; name a time for start"
    with pytest.raises(InvalidRequest, match=refusal):
        await namespace.set_subscription("mail", ORDERS, start=1)
    assert await namespace.list_subscriptions() == []
    await namespace.set_subscription("mail", ORDERS)
    with pytest.raises(InvalidRequest, match=refusal):
        await namespace.rewind_subscription("mail", 1)


async def test_a_deleted_subscription_is_deleted_in_all_mailboxes(place: Place) -> None:
    namespace = await place.namespace()
    await namespace.set_subscription("mail", ORDERS)
    await send(namespace)
    expected = DeletionReport("mail", 8, 8, 0, 0, 0)
    assert await namespace.delete_subscription("mail", dry_run=True) == expected
    assert len(await place.one.list_subscriptions()) == len(await place.two.list_subscriptions()) == 1
    assert await namespace.delete_subscription("mail") == expected
    assert await place.one.list_subscriptions() == await place.two.list_subscriptions() == []
    for call in (namespace.delete_subscription("mail"), namespace.rewind_subscription("mail", 0)):
        with pytest.raises(NotFound, match="has no subscription mail"):
            await call


async def test_a_change_that_fails_in_one_mailbox_is_told_and_mended_when_it_is_repeated(
    place: Place,
) -> None:
    namespace, wide = await place.namespace(), SubscriptionFilter(("*",))

    async def fails(call: Awaitable[object]) -> str:
        place.members["acme@two"].is_down_for = {"set_subscription", "delete_subscription"}
        with pytest.raises(Unavailable) as error:
            await call
        place.members["acme@two"].is_down_for = set()
        return str(error.value)

    told = "The subscription has changed in acme@one, but not in acme@two; repeat the call."
    assert told in await fails(namespace.set_subscription("mail", ORDERS))
    (report,) = await namespace.list_subscriptions()
    assert (report.missing_in, report.differs_in) == (("acme@two",), ())
    await namespace.set_subscription("mail", wide, if_missing=True)  # all get the filter that there is
    (report,) = await namespace.list_subscriptions()
    assert (report.topics, report.missing_in, report.differs_in) == (("orders",), (), ())
    assert told in await fails(namespace.set_subscription("mail", wide))
    (report,) = await namespace.list_subscriptions()
    assert (report.topics, report.missing_in, report.differs_in) == (("*",), (), ("acme@two",))
    await namespace.set_subscription("mail", wide)
    (report,) = await namespace.list_subscriptions()
    assert (report.missing_in, report.differs_in) == ((), ())
    assert told in await fails(namespace.delete_subscription("mail"))
    (report,) = await namespace.list_subscriptions()
    assert report.missing_in == ("acme@one",)
    await namespace.delete_subscription("mail")
    assert await namespace.list_subscriptions() == []


async def test_the_records_of_members_are_no_queue_of_a_subscription(place: Place) -> None:
    with pytest.raises(InvalidRequest, match="is reserved"):
        await (await place.namespace()).set_subscription("$members", ORDERS)


async def test_a_new_member_gets_the_subscriptions_with_what_it_was_sent_before(place: Place) -> None:
    alone = await place.namespace("acme@one")
    await alone.set_subscription("mail", ORDERS)
    await alone.set_subscription("own", ORDERS)
    await send(place.two)  # by a client that names the mailbox
    await place.two.set_subscription("own", SubscriptionFilter(("others",)))
    namespace = await place.namespace()
    await send(namespace)
    assert len(await received(namespace, "mail", 16)) == 16
    reports = {each.name: each.topics for each in await place.two.list_subscriptions()}
    assert reports == {"mail": ("orders",), "own": ("others",)}


async def test_a_new_member_with_messages_in_the_topic_goes_without_the_subscription(place: Place) -> None:
    await (await place.namespace("acme@one")).set_subscription("mail", ORDERS)
    await place.two.send_message(message(b"its own", topic="mail"))
    namespace = await place.namespace()
    await send(namespace)
    assert await place.two.list_subscriptions() == []
    assert [each.name for each in await namespace.list_subscriptions()] == ["mail"]
