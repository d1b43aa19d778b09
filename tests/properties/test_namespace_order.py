"""The messages of a key are received in the order in which they were sent, while mailboxes are added."""

import asyncio
from collections import defaultdict
from contextlib import AsyncExitStack
from typing import Any

import pytest
import uuid_utils
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postroom.adapters.compose import open_mailbox
from postroom.application.cluster import namespace_receiver
from postroom.application.cluster.namespace_mailbox import NamespaceMailbox
from postroom.domain.namespace import home_of
from tests.support.messages import message
from tests.support.namespaces import Directory, Member

NAMES = ("acme@b", "acme@c", "acme@a")
"""In the order in which they are added, which is not that of their names."""
KEYS = [f"key {number}" for number in range(6)]
CLIENTS = 3
STEPS = st.one_of(
    st.tuples(st.just("send"), st.integers(0, CLIENTS - 1), st.sampled_from(KEYS)),
    st.tuples(st.just("send"), st.integers(0, CLIENTS - 1), st.sampled_from(KEYS)),
    st.tuples(st.just("receive"), st.integers(0, CLIENTS - 1), st.integers(1, 3)),
    st.tuples(st.just("add"), st.just(0), st.just(0)),
    st.tuples(st.just("look"), st.integers(0, CLIENTS - 1), st.just(0)),
    st.tuples(st.just("restart"), st.integers(0, CLIENTS - 1), st.just(0)),
)
Step = tuple[str, int, Any]


class World:
    """Clients of a namespace, each of which learns of its mailboxes at another time.

    Attributes:
        received: numbers of the messages of each key, in the order of their deliveries.
    """

    def __init__(self, members: dict[str, Member]) -> None:
        self._members = members
        self._count = 1
        self._clients = [self._open() for _ in range(CLIENTS)]
        self._sent: dict[str, int] = defaultdict(int)
        self._sending: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._receiving = asyncio.Lock()
        self.received: dict[str, list[int]] = defaultdict(list)

    def _open(self) -> tuple[Directory, NamespaceMailbox]:
        directory = Directory("acme", self._members, NAMES[: self._count])
        return directory, NamespaceMailbox(directory, 10_000, uuid_utils.uuid7)

    async def run(self, step: Step) -> None:
        kind, client, argument = step
        if kind == "send":
            async with self._sending[argument]:
                number = self._sent[argument]
                sent = message(f"{argument}/{number}".encode(), sticky_key=argument)
                await self._clients[client][1].send_message(sent)
                self._sent[argument] = number + 1
        elif kind == "receive":
            await self._receive(client, argument)
        elif kind == "add":
            self._count = min(self._count + 1, len(NAMES))
        elif kind == "look":
            directory, namespace = self._clients[client]
            directory.names = NAMES[: self._count]
            namespace.refresh()
        else:
            await self._clients[client][1].close()
            self._clients[client] = self._open()

    async def drain(self) -> None:
        """Receive what is left, as new clients."""
        self._clients = [self._open() for _ in range(CLIENTS)]
        async with asyncio.timeout(60):
            while sum(map(len, self.received.values())) < sum(self._sent.values()):
                await self._receive(0, 5)
        assert await self._clients[0][1].receive_messages("orders") == []

    async def close(self) -> None:
        for _, namespace in self._clients:
            await namespace.close()

    async def _receive(self, client: int, count: int) -> None:
        async with self._receiving:  # so that the order of the answers is that of the deliveries
            for each in await self._clients[client][1].receive_messages("orders", max_messages=count):
                key, _, number = each.payload.decode().partition("/")
                self.received[key].append(int(number))
                await each.ack()

    @property
    def is_ordered(self) -> bool:
        return all(numbers == list(range(self._sent[key])) for key, numbers in self.received.items())


async def simulate(rounds: list[list[Step]], *, is_fenced: bool = True) -> World:
    """Run the steps of each round at the same time, and receive everything at the end."""
    async with AsyncExitStack() as opened:
        members = {
            name: Member(await opened.enter_async_context(open_mailbox("memory:", name)), is_fenced=is_fenced)
            for name in NAMES
        }
        world = World(members)
        opened.push_async_callback(world.close)
        for steps in rounds:
            await asyncio.gather(*(world.run(step) for step in steps))
        await world.drain()
        return world


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace_receiver, "CHECK_SECONDS", 0)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(STEPS, min_size=1, max_size=4), max_size=12))
def test_no_message_is_lost_or_overtaken_by_a_later_one_of_its_key(rounds: list[list[Step]]) -> None:
    world = asyncio.run(simulate(rounds))
    assert world.is_ordered, dict(world.received)


def moved_key() -> str:
    """Return a key that the second mailbox takes from the first one."""
    return next(key for key in KEYS if home_of(key, NAMES[:2]) == NAMES[1])


def scenario() -> list[list[Step]]:
    """Return rounds in which a sender that does not know the second mailbox comes last."""
    key = moved_key()
    steps: list[Step] = [("send", 0, key), ("add", 0, 0), ("look", 1, 0), ("send", 1, key), ("send", 0, key)]
    return [[step] for step in steps]


async def test_a_key_that_moved_keeps_its_order() -> None:
    assert (await simulate(scenario())).is_ordered


async def test_without_the_fence_a_sender_that_knows_fewer_mailboxes_breaks_the_order() -> None:
    assert not (await simulate(scenario(), is_fenced=False)).is_ordered


async def test_without_waiting_for_older_mailboxes_receivers_break_the_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(namespace_receiver, "undrained_topics", lambda counts, cutoff: set())
    key = moved_key()
    orders = set()
    for turns in range(2):  # each begins with another mailbox
        rounds = [*scenario()[:4], *[[("receive", 2, 1)]] * turns]
        orders.add(tuple((await simulate([[step] for steps in rounds for step in steps])).received[key]))
    assert (1, 0) in orders
