"""Consumers of subscriptions: each one gets every message, and workers of the same one share them."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from postroom import Forbidden, InvalidRequest, NewMessage, ReceivedMessage, Worker, open_mailbox
from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.compose.connect import connect_remote
from postroom.application.operations.mailbox import Mailbox
from postroom.domain.capability.rights import Right
from postroom.domain.errors import Unavailable
from postroom.domain.subscription import SubscriptionFilter
from tests.support.access import controlled_mailbox, mailbox_of
from tests.support.namespaces import open_namespace
from tests.support.surfaces import served
from tests.support.waiting import SECONDS, until, within
from tests.support.worker_runs import running, send, unsettled

COUNT = 200


class Recorder:
    """A worker with one consumer of a subscription, and the payloads that its handler got."""

    def __init__(self, subscription: str, *topics: str, **options: Any) -> None:
        self.worker = Worker(subscription)
        self.payloads: list[bytes] = []
        self.messages: list[ReceivedMessage] = []

        @self.worker.consumer(topics or "orders.*", subscription=subscription, **options)
        async def handle(message: ReceivedMessage) -> None:
            self.payloads.append(message.payload)
            self.messages.append(message)
            await asyncio.sleep(0)  # other workers get their turn


async def started(mailbox: Mailbox, *names: str) -> None:
    """Wait until subscriptions exist."""
    async with asyncio.timeout(SECONDS):
        while not {*names} <= {each.name for each in await mailbox.list_subscriptions()}:
            await asyncio.sleep(0.01)


def payloads(count: int = COUNT, first: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


async def test_two_workers_with_different_subscriptions_both_get_everything(mailbox: OwnedMailbox) -> None:
    mail, audit = Recorder("mail"), Recorder("audit", "*", concurrency=4)
    async with running(mail.worker, mailbox), running(audit.worker, mailbox):
        await started(mailbox, "mail", "audit")
        await send(mailbox, *payloads(), topic="orders.placed")
        await send(mailbox, b"invoice", topic="invoices")
        await until(lambda: len(audit.payloads) == COUNT + 1 and len(mail.payloads) == COUNT, SECONDS)
    assert mail.payloads == payloads()
    assert sorted(audit.payloads) == sorted([*payloads(), b"invoice"])
    assert {(each.topic, each.published_topic) for each in mail.messages} == {("mail", "orders.placed")}
    assert await unsettled(mailbox) == {"ready": COUNT + 1}  # of the topics themselves


async def test_one_worker_that_runs_twice_shares_the_messages_of_its_subscription(
    mailbox: OwnedMailbox,
) -> None:
    one, other = Recorder("mail"), Recorder("mail")
    async with running(one.worker, mailbox), running(other.worker, mailbox):
        await started(mailbox, "mail")
        await send(mailbox, *payloads(), topic="orders.placed")
        await until(lambda: len(one.payloads) + len(other.payloads) == COUNT, SECONDS)
    assert sorted(one.payloads + other.payloads) == sorted(payloads())
    assert one.payloads
    assert other.payloads


async def test_a_subscription_begins_with_the_first_run_and_misses_nothing_between_runs(
    tmp_path: Path,
) -> None:
    store, first, second = str(tmp_path / "store.db"), Recorder("mail"), Recorder("mail")
    async with open_mailbox(store) as mailbox:
        await send(mailbox, b"before", topic="orders.placed")
        await first.worker.run(mailbox, once=True)
        await send(mailbox, *payloads(5), topic="orders.placed")
        await first.worker.run(mailbox, once=True)
        await send(mailbox, *payloads(5, 5), topic="orders.placed")
    async with open_mailbox(store) as mailbox:
        await send(mailbox, *payloads(5, 10), topic="orders.placed")
        await second.worker.run(mailbox, once=True)
    assert first.payloads == payloads(5)
    assert second.payloads == payloads(10, 5)


async def test_a_consumer_takes_several_topics_and_headers(mailbox: OwnedMailbox) -> None:
    mail = Recorder("mail", "orders.*", "invoices", headers={"country": "de"})
    await mail.worker.run(mailbox, once=True)
    for topic in ("orders.placed", "invoices", "reports"):
        for country in ("de", "fr"):
            new = NewMessage(topic=topic, payload=f"{topic} {country}".encode(), attrs={"country": country})
            await mailbox.send_message(new)
    await mail.worker.run(mailbox, once=True)
    assert mail.payloads == [b"orders.placed de", b"invoices de"]


async def test_a_handler_that_fails_is_retried_and_dead_lettered_in_its_subscription_only(
    mailbox: OwnedMailbox,
) -> None:
    audit, worker, attempts = Recorder("audit"), Worker(), []

    @worker.consumer("orders.*", subscription="mail")
    async def handle(message: ReceivedMessage) -> None:
        attempts.append(message.attempt)
        raise ValueError("no address")

    for each in (audit.worker, worker):
        await each.run(mailbox, once=True)
    await send(mailbox, b"1", topic="orders.placed")
    async with running(worker, mailbox), running(audit.worker, mailbox):
        await until(lambda: len(attempts) == 2 and len(audit.payloads) == 1, SECONDS)
    assert attempts == [1, 2]
    dead = (await mailbox.list_dead_letters("mail")).items
    assert [(each.reason, each.last_error) for each in dead] == [("max_attempts", "ValueError: no address")]
    assert (await mailbox.list_dead_letters("audit")).items == ()


async def test_ordered_keys_are_handled_in_order_in_a_subscription(mailbox: OwnedMailbox) -> None:
    await mailbox.set_topic_policy("mail", {"ordered_keys": True})
    worker, handled = Worker(), []

    @worker.consumer("orders.*", subscription="mail", concurrency=8)
    async def handle(message: ReceivedMessage) -> None:
        handled.append(int(message.payload))
        if handled == [1, 2]:
            raise ValueError("it fails once")

    await worker.run(mailbox, once=True)
    await mailbox.send_batch(
        [NewMessage(topic="orders.placed", payload=each, sticky_key="k") for each in payloads(5, 1)]
    )
    async with running(worker, mailbox):
        await until(lambda: len(handled) == 6, SECONDS)
    assert handled == [1, 2, 2, 3, 4, 5]


async def test_a_worker_does_not_start_with_another_filter_than_the_subscription_has(
    mailbox: OwnedMailbox,
) -> None:
    await mailbox.set_subscription("mail", SubscriptionFilter(("orders.*", "invoices")))
    await Recorder("mail", "invoices", "orders.*").worker.run(mailbox, once=True)  # the order is no matter
    newer = Recorder("mail", "orders.*", headers={"country": "de"})
    with pytest.raises(InvalidRequest) as error:
        await newer.worker.run(mailbox)
    assert str(error.value) == (
        f"Subscription mail of mailbox {mailbox.name} gets messages of orders.*, invoices, but worker mail "
        "names orders.* with country=de; correct the worker, or change the subscription with "
        "`postroom subscription set mail 'orders.*' --header country=de`."
    )
    (report,) = await mailbox.list_subscriptions()
    assert (report.topics, report.headers) == (("orders.*", "invoices"), {})


async def test_of_two_versions_that_start_at_the_same_moment_one_creates_the_subscription(
    mailbox: OwnedMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = Recorder("mail"), Recorder("mail", "orders.*", "refunds")
    original, both = mailbox.list_subscriptions, asyncio.Barrier(2)

    async def list_together() -> Any:
        reports = await original()
        await within(both.wait())
        return reports

    monkeypatch.setattr(mailbox, "list_subscriptions", list_together)
    async with asyncio.timeout(SECONDS):
        answers = await asyncio.gather(
            *(each.worker.run(mailbox, once=True) for each in (old, new)), return_exceptions=True
        )
    (refusal,) = [each for each in answers if isinstance(each, BaseException)]
    (report,) = await original()
    assert report.topics == ("orders.*", "refunds")[: len(report.topics)]
    assert f"gets messages of {', '.join(report.topics)}, but worker mail names" in str(refusal)


async def test_a_token_that_may_not_create_the_subscription_is_told_the_command() -> None:
    async with controlled_mailbox() as place:
        rights = (Right.RECV, Right.ACK, Right.NACK, Right.READ_HEADERS)
        limited = await mailbox_of(place, topics=["mail"], operations=rights)
        mail = Recorder("mail")
        with pytest.raises(Forbidden) as error:
            await mail.worker.run(limited)
        assert str(error.value) == (
            f"Mailbox {place.mailbox.name} has no subscription mail, and the token of worker mail lacks "
            "`admin` of the whole mailbox to create it; create it with `postroom subscription set mail "
            "'orders.*'`."
        )
        await place.mailbox.set_subscription("mail", SubscriptionFilter(("orders.*",)))
        await send(place.mailbox, b"1", topic="orders.placed")
        assert (await mail.worker.run(limited, once=True)).handled == 1


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_workers_of_subscriptions_run_over_a_server(mailbox: OwnedMailbox, protocol: str) -> None:
    async with served(mailbox, protocol) as url, connect_remote(url, timeout_ms=30_000) as client:
        mail, audit = Recorder("mail"), Recorder("audit")
        async with running(mail.worker, client), running(audit.worker, client):
            await started(mailbox, "mail", "audit")
            await send(mailbox, *payloads(20), topic="orders.placed")
            await until(lambda: len(mail.payloads) == len(audit.payloads) == 20, SECONDS)
    assert sorted(mail.payloads) == sorted(audit.payloads) == sorted(payloads(20))
    assert {(each.topic, each.published_topic) for each in mail.messages} == {("mail", "orders.placed")}


async def test_a_worker_of_a_subscription_runs_with_a_namespace() -> None:
    async with open_namespace("acme@a", "acme@b") as namespace:
        mail, audit = Recorder("mail"), Recorder("audit")
        async with running(mail.worker, namespace), running(audit.worker, namespace):
            await started(namespace, "mail", "audit")
            for name in ("mail", "audit"):  # the worker may have created it in the first mailbox only
                await namespace.set_subscription(name, SubscriptionFilter(("orders.*",)))
            await namespace.send_batch(
                [
                    NewMessage(topic="orders.placed", payload=each, sticky_key=each.decode())
                    for each in payloads(20)
                ]
            )
            await until(lambda: len(mail.payloads) == len(audit.payloads) == 20, SECONDS)
    assert sorted(mail.payloads) == sorted(audit.payloads) == sorted(payloads(20))


async def test_a_worker_waits_for_a_mailbox_that_is_unavailable_and_stops_meanwhile(
    mailbox: OwnedMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, original, failures = [], mailbox.list_subscriptions, math.inf

    async def unavailable() -> Any:
        calls.append(1)
        if len(calls) <= failures:
            raise Unavailable("The owner changes.")
        return await original()

    monkeypatch.setattr(mailbox, "list_subscriptions", unavailable)
    mail = Recorder("mail")
    async with running(mail.worker, mailbox):
        await until(lambda: bool(calls), SECONDS)
    assert await original() == []
    failures = len(calls) + 2
    async with running(mail.worker, mailbox):
        async with asyncio.timeout(SECONDS):
            while not await original():
                await asyncio.sleep(0.01)
        await send(mailbox, b"1", topic="orders.placed")
        await until(lambda: mail.payloads == [b"1"], SECONDS)


@pytest.mark.parametrize(
    ("topic", "options", "problem"),
    [
        (["a", "b"], {}, "needs a subscription"),
        ("a", {"headers": {"b": "c"}}, "needs a subscription"),
        ((), {"subscription": "mail"}, "1 to 100 topics or globs"),
        ("a?", {"subscription": "mail"}, "characters without spaces"),
        ("a", {"subscription": "mail*"}, "characters without spaces"),
        ("a", {"subscription": "mail", "headers": []}, "must be of type dict"),
    ],
)
def test_a_malformed_registration_is_refused(topic: Any, options: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        Worker().consumer(topic, **options)


def test_a_subscription_has_one_consumer_in_a_worker() -> None:
    worker = Recorder("mail").worker
    with pytest.raises(InvalidRequest, match="has a handler of topic mail already"):
        worker.consumer("invoices", subscription="mail")(lambda message: None)
