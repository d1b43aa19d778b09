"""Clients of a cluster find the owners of mailboxes, wherever they move."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from postroom.adapters.compose.cluster_client import parse_cluster_url
from postroom.adapters.compose.connect import ClientTls, connect
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable
from postroom.domain.namespace import home_of
from tests.support.local_cluster import UNUSED_ADDRESS, LocalCluster, silent_server
from tests.support.messages import message

A, B = "acme@a", "acme@b"


@pytest.fixture
async def cluster() -> AsyncIterator[LocalCluster]:
    async with LocalCluster() as opened:
        yield opened


async def test_a_mailbox_is_called_at_its_owner_and_not_through_the_proxy(cluster: LocalCluster) -> None:
    await cluster.move(A, await cluster.add_owner())
    async with connect(f"postroom://{cluster.proxy}/{A}", timeout_ms=20_000) as mailbox:
        assert mailbox.name == A
        for payload in (b"1", b"2"):
            await mailbox.send_message(message(payload))
        received = await mailbox.receive_messages("orders")
        assert [each.payload for each in received] == [b"1", b"2"]
        await received[0].ack()
    assert cluster.forwarded_calls == 0


async def test_a_call_follows_its_mailbox_to_the_next_owner(cluster: LocalCluster) -> None:
    first, second = await cluster.add_owner(), await cluster.add_owner()
    await cluster.move(A, first)
    async with connect(f"postroom://{cluster.proxy}/{A}", timeout_ms=20_000) as mailbox:
        await mailbox.send_message(message(b"1"))
        await cluster.move(A, second, epoch=2)
        await mailbox.send_message(message(b"2"))
        async with mailbox.stream_messages("orders") as stream:
            assert [(await anext(stream)).payload for _ in range(2)] == [b"1", b"2"]
            await cluster.move(A, first, epoch=3)
            await mailbox.send_message(message(b"3"))
            payloads = set()
            while b"3" not in payloads:
                payloads.add((await anext(stream)).payload)


async def test_an_owner_that_cannot_be_reached_is_called_through_the_proxy(cluster: LocalCluster) -> None:
    await cluster.move_to_proxy(A)
    async with connect(f"postroom://{cluster.proxy}/{A}", timeout_ms=20_000) as mailbox:
        await mailbox.send_message(message())
        assert len(await mailbox.receive_messages("orders")) == 1


async def test_a_proxy_that_is_paused_or_gone_is_passed_over(cluster: LocalCluster) -> None:
    await cluster.move(A, await cluster.add_owner())
    with silent_server() as paused:
        proxies = f"{UNUSED_ADDRESS},{paused},{cluster.proxy}"
        async with connect(f"postroom://{proxies}/{A}", timeout_ms=30_000) as mailbox:
            await mailbox.send_message(message())
            assert len(await mailbox.receive_messages("orders")) == 1


async def test_a_namespace_is_used_through_its_proxies(cluster: LocalCluster) -> None:
    await cluster.move(A, await cluster.add_owner())
    async with connect(f"postroom://{cluster.proxy}/acme", timeout_ms=20_000) as namespace:
        assert namespace.name == "acme"
        keys = [f"key {number}" for number in range(20)]
        await namespace.send_batch([message(key.encode(), sticky_key=key) for key in keys])
        await cluster.move(B, await cluster.add_owner())
        # Another client learns of the second mailbox first; the owners then tell this one.
        async with connect(f"postroom://{cluster.proxy}/acme", timeout_ms=20_000) as other:
            await other.send_batch([message(key.encode(), sticky_key=key) for key in keys])
        await namespace.send_batch([message(key.encode(), sticky_key=key) for key in keys])
        async with (
            connect(f"postroom://{cluster.proxy}/{A}", timeout_ms=20_000) as a,
            connect(f"postroom://{cluster.proxy}/{B}", timeout_ms=20_000) as b,
        ):
            backlogs = [
                sum(row.ready for row in (await each.get_backlog("orders")).shards) for each in (a, b)
            ]
        assert sum(backlogs) == 60
        assert min(backlogs) > 0
        payloads: list[bytes] = []
        while len(payloads) < 60:
            received = await namespace.receive_messages("orders", wait_ms=20_000)
            assert await namespace.ack_messages([each.receipt for each in received]) == [None] * len(received)
            payloads += [each.payload for each in received]
        assert sorted(payloads) == sorted([key.encode() for key in keys] * 3)


async def test_a_namespace_is_used_while_one_of_its_mailboxes_has_no_owner(cluster: LocalCluster) -> None:
    for name in (A, B):
        await cluster.move(name, await cluster.add_owner())
    url = f"postroom://{cluster.proxy}/acme"
    async with connect(url, timeout_ms=20_000) as namespace:
        await namespace.send_batch([message(sticky_key=f"key {number}") for number in range(20)])
    cluster.take_down(A)
    async with connect(url, timeout_ms=20_000) as namespace:  # which learns of it from the other one
        key = next(key for key in map(str, range(100)) if home_of(key, [A, B]) == B)
        await namespace.send_message(message(b"last", sticky_key=key))
        payloads: list[bytes] = []
        while b"last" not in payloads:
            payloads += [each.payload for each in await namespace.receive_messages("orders", wait_ms=20_000)]


async def test_nobody_waits_longer_than_a_call_for_a_mailbox_without_an_owner(cluster: LocalCluster) -> None:
    await cluster.move(A, await cluster.add_owner())
    cluster.take_down(A)
    for name in ("acme", A):
        with pytest.raises(Unavailable, match="owner"):
            async with connect(f"postroom://{cluster.proxy}/{name}", timeout_ms=300):
                pass
    with pytest.raises(Unavailable):
        async with connect(f"postroom://{UNUSED_ADDRESS}/acme", timeout_ms=300):
            pass
    with pytest.raises(NotFound, match=f"no mailbox {B}"):
        async with connect(f"postroom://{cluster.proxy}/{B}", timeout_ms=20_000):
            pass


async def test_a_receiver_of_a_namespace_waits_for_a_message_in_any_mailbox(cluster: LocalCluster) -> None:
    for name in (A, B):
        await cluster.move(name, await cluster.add_owner())
    async with connect(f"postroom://{cluster.proxy}/acme", timeout_ms=20_000) as namespace:
        for key in ("one", "two", "three", "four"):
            waiting = asyncio.create_task(namespace.receive_messages("orders", wait_ms=60_000))
            await asyncio.sleep(0)
            await namespace.send_message(message(key.encode(), sticky_key=key))
            (received,) = await waiting
            assert received.payload == key.encode()
            await received.ack()


@pytest.mark.parametrize(
    ("url", "proxies", "namespace", "mailbox"),
    [
        ("postroom://proxy/acme", ("proxy:7400",), "acme", None),
        ("postrooms://one:1,two,one:1/acme@a/", ("one:1", "two:7400"), "acme", "acme@a"),
        ("postroom://[::1]:7/%24admin", ("[::1]:7",), "$admin", None),
    ],
)
def test_a_url_names_proxies_and_a_namespace_or_mailbox(
    url: str, proxies: tuple[str, ...], namespace: str, mailbox: str | None
) -> None:
    assert parse_cluster_url(url) == (proxies, namespace, mailbox)


@pytest.mark.parametrize(
    "url",
    [
        "postroom:",
        "postroom://",
        "postroom:///acme",
        "postroom://proxy",
        "postroom://proxy/",
        "postroom://proxy:0/acme",
        "postroom://proxy:65536/acme",
        "postroom://proxy,/acme",
        "postroom://proxy/acme?x=1",
        "postroom://proxy/acme/x",
        "postroom://proxy/acme@",
        "postroom://user:secret@proxy/acme",
    ],
)
async def test_a_malformed_url_is_refused_without_showing_a_password(url: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        async with connect(url):
            pass
    assert "secret" not in str(refused.value)


async def test_a_url_and_a_mailbox_that_differ_are_refused() -> None:
    for url, name in ((f"postroom://proxy/{A}", B), ("postroom://proxy/acme", "other@a")):
        with pytest.raises(NotFound, match="names the mailbox"):
            async with connect(url, name):
                pass
    with pytest.raises(InvalidRequest, match="tls is for"):
        async with connect("postroom://proxy/acme", tls=ClientTls()):
            pass
