"""Subscriptions; a part of `MailboxConformance`."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, cast

import pytest

from postroom.application.operations.mailbox import Mailbox
from postroom.application.received_messages import ReceivedMessage
from postroom.application.reports import DeletionReport
from postroom.domain.errors import InvalidRequest, NotFound, StaleReceipt
from postroom.domain.subscription import SubscriptionFilter
from tests.support.stores import message

ORDERS = SubscriptionFilter(("orders.*",))
WAIT_SECONDS = 60


async def receive_all(mailbox: Mailbox, name: str, count: int) -> list[ReceivedMessage]:
    """Receive a number of messages, for which a subscription that copies from the log may need a while."""
    received: list[ReceivedMessage] = []
    async with asyncio.timeout(WAIT_SECONDS):
        while len(received) < count:
            received += await mailbox.receive_messages(name, max_messages=count, wait_ms=500)
    return received


def payloads(received: Sequence[ReceivedMessage]) -> list[bytes]:
    return [each.payload for each in received]


class MailboxSubscriptionConformance:
    async def test_a_subscription_gets_a_copy_of_each_message_that_matches(self, mailbox: Mailbox) -> None:
        await mailbox.set_topic_policy("mail", {"shards": 1})
        report = await mailbox.set_subscription("mail", SubscriptionFilter(("orders.*",), {"kind": "a"}))
        assert (report.name, report.topics, report.headers) == ("mail", ("orders.*",), {"kind": "a"})
        assert (report.status, report.behind) == ("live", 0)
        a, b = {"kind": "a"}, {"kind": "b"}
        sent = await mailbox.send_message(message(b"1", topic="orders.eu", attrs=a, idem_key="k"))
        again = await mailbox.send_message(message(b"1", topic="orders.eu", attrs=a, idem_key="k"))
        assert again.duplicate
        await mailbox.send_batch(
            [message(b"2", topic="orders.us", attrs=a), message(b"no", topic="news", attrs=a)]
        )
        await mailbox.send_batch(
            [message(b"no", topic="orders.us", attrs=b), message(b"3", topic="orders.us", attrs=a)]
        )
        received = await receive_all(mailbox, "mail", 3)
        assert payloads(received) == [b"1", b"2", b"3"]
        assert {each.topic for each in received} == {"mail"}
        assert received[0].message_id != sent.message_id
        assert received[0].attrs == a
        detail = await mailbox.get_message(received[0].message_id)
        assert (detail.topic, detail.intact) == ("mail", True)
        assert await mailbox.receive_messages("mail") == []
        await received[0].ack()
        await received[1].reject("no such customer")
        assert payloads(await mailbox.receive_messages("orders.eu")) == [b"1"]
        assert await mailbox.redrive_dead_letters("mail") == 1
        assert payloads(await mailbox.receive_messages("mail")) == [b"2"]
        (listed,) = await mailbox.list_subscriptions()
        assert (listed.name, listed.ready, listed.in_flight, listed.dead) == ("mail", 0, 2, 0)

    async def test_a_subscription_is_set_again_without_effect_changed_and_deleted(
        self, mailbox: Mailbox
    ) -> None:
        first = await mailbox.set_subscription("mail", ORDERS)
        await mailbox.send_message(message(b"1", topic="orders.eu"))
        again = await mailbox.set_subscription("mail", ORDERS, start=None)
        assert again.created_at == first.created_at
        kept = await mailbox.set_subscription("mail", SubscriptionFilter(("news",)), if_missing=True)
        assert kept.topics == ORDERS.topics
        await mailbox.set_subscription("mail", SubscriptionFilter(("news",)))
        await mailbox.send_message(message(b"no", topic="orders.eu"))
        await mailbox.send_message(message(b"2", topic="news"))
        with pytest.raises(InvalidRequest, match="queue of subscription mail"):
            await mailbox.send_message(message(topic="mail"))
        expected = DeletionReport("mail", 2, 2, 0, 0, 0)
        assert await mailbox.delete_subscription("mail", dry_run=True) == expected
        assert [each.name for each in await mailbox.list_subscriptions()] == ["mail"]
        assert await mailbox.delete_subscription("mail") == expected
        await mailbox.send_message(message(b"no", topic="news"))
        assert await mailbox.list_subscriptions() == []
        assert sorted(payloads(await receive_all(mailbox, "mail", 2))) == [b"1", b"2"]

    async def test_a_subscription_that_can_not_be_is_refused(self, mailbox: Mailbox) -> None:
        await mailbox.send_message(message(topic="taken"))
        for name, filter_ in (
            ("taken", ORDERS),
            ("mail", SubscriptionFilter(())),
            ("mail", SubscriptionFilter(("a b",))),
            ("mail", SubscriptionFilter(("*",), {"": "x"})),
            ("ma*", ORDERS),
        ):
            with pytest.raises(InvalidRequest):
                await mailbox.set_subscription(name, filter_)
        with pytest.raises(InvalidRequest, match=r"future|no history"):
            await mailbox.set_subscription("mail", ORDERS, start=datetime.now(UTC) + timedelta(days=1))
        with pytest.raises(InvalidRequest, match="start must be"):
            await mailbox.set_subscription("mail", ORDERS, start=True)
        end = datetime.max.replace(tzinfo=timezone(timedelta(hours=-14)))
        with pytest.raises(InvalidRequest, match=r"years 1 to 9999|out of range|no history"):
            await mailbox.set_subscription("mail", ORDERS, start=end)
        assert await mailbox.list_subscriptions() == []
        for call in (
            mailbox.delete_subscription("mail"),
            mailbox.delete_subscription("mail", dry_run=True),
            mailbox.delete_subscription("mail", dry_run=cast(Any, 1)),
            mailbox.rewind_subscription("mail", datetime(2020, 1, 1, tzinfo=UTC)),
        ):
            with pytest.raises((NotFound, InvalidRequest)):
                await call

    async def test_a_subscription_begins_in_the_past_and_is_rewound(self, mailbox: Mailbox) -> None:
        beginning = datetime(2020, 1, 1, tzinfo=UTC)
        await mailbox.set_topic_policy("mail", {"shards": 1})
        for number in range(3):
            await mailbox.send_message(message(b"%d" % number, topic="orders.eu"))
        try:
            await mailbox.set_subscription("mail", ORDERS, start=beginning)
        except InvalidRequest as refusal:
            assert "no history" in str(refusal)  # noqa: PT017 # of mailboxes in memory alone
            return
        await mailbox.send_message(message(b"3", topic="orders.eu"))
        received = await receive_all(mailbox, "mail", 4)
        assert payloads(received) == [b"0", b"1", b"2", b"3"]
        await received[0].ack()
        preview = await mailbox.rewind_subscription("mail", beginning, dry_run=True)
        assert (preview.removed, preview.copied) == (3, 4)
        assert await mailbox.receive_messages("mail") == []
        report = await mailbox.rewind_subscription("mail", beginning)
        assert (report.removed, report.copied) == (3, 4)
        again = await receive_all(mailbox, "mail", 4)
        assert payloads(again) == [b"0", b"1", b"2", b"3"]
        assert {each.message_id for each in again}.isdisjoint({each.message_id for each in received})
        (stale,) = await mailbox.ack_messages([received[1].receipt])
        assert isinstance(stale, StaleReceipt)

    async def test_messages_for_subscriptions_only_wait_for_nobody_else(self, mailbox: Mailbox) -> None:
        await mailbox.set_topic_policy("orders.eu", {"subscriptions_only": True, "shard_capacity": 1})
        await mailbox.set_subscription("mail", ORDERS)
        for number in range(3):
            await mailbox.send_message(message(b"%d" % number, topic="orders.eu", sticky_key="k"))
        assert await mailbox.receive_messages("orders.eu") == []
        assert payloads(await receive_all(mailbox, "mail", 3)) == [b"0", b"1", b"2"]
        with pytest.raises(InvalidRequest, match="deliver_after_ms"):
            await mailbox.send_message(message(topic="orders.eu", deliver_after_ms=1_000))
