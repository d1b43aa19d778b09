"""Namespaces of several mailboxes, used with tokens that allow little."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import uuid_utils

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.system.clock import SystemClock
from postroom.application.cluster.namespace_mailbox import NamespaceMailbox
from postroom.domain.capability.rights import Right
from postroom.domain.errors import Forbidden, Unavailable
from postroom.domain.policy import TopicPolicy
from tests.support.access import Controlled
from tests.support.messages import message
from tests.support.namespaces import Directory, Member

A, B = "acme@a", "acme@b"


class Place:
    """Two mailboxes in memory with access control, and clients with tokens for both."""

    def __init__(self, mailboxes: list[OwnedMailbox]) -> None:
        self._controlled = [Controlled(mailbox, SystemClock()) for mailbox in mailboxes]
        self._members = [Member(mailbox) for mailbox in mailboxes]

    async def client(
        self, *names: str, topics: tuple[str, ...], operations: tuple[Right, ...]
    ) -> NamespaceMailbox:
        """Return a client that knows some of the mailboxes, with a token."""
        members = {}
        for controlled, member in zip(self._controlled, self._members, strict=True):
            token = controlled.issue(topics=topics, operations=operations)
            session = await controlled.control.open_session(token)
            members[member.name] = member.seen_as(session.mailbox)
        return NamespaceMailbox(Directory("acme", members, names), 500, uuid_utils.uuid7)

    async def operator(self, *names: str) -> NamespaceMailbox:
        """Return a client that may do everything."""
        return await self.client(*names, topics=("*",), operations=tuple(Right))


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with AsyncExitStack() as opened:
        yield Place([await opened.enter_async_context(open_mailbox("memory:", name)) for name in (A, B)])


async def test_a_token_that_may_only_send_suffices_to_send(place: Place) -> None:
    sender = await place.client(A, topics=("orders",), operations=(Right.SEND,))
    assert not (await sender.send_message(message())).duplicate
    with pytest.raises(Forbidden):
        await sender.send_message(message(topic="others"))


async def test_a_token_for_some_topics_does_not_add_a_mailbox_but_uses_one_that_was_added(
    place: Place,
) -> None:
    sender = await place.client(A, B, topics=("orders",), operations=(Right.SEND,))
    with pytest.raises(Unavailable, match="have not recorded each other"):
        await sender.send_message(message())
    await (await place.operator(A)).set_topic_policy("others", TopicPolicy(max_attempts=1))
    operator = await place.operator(A, B)
    await operator.open()
    for number in range(8):
        await sender.send_message(message(sticky_key=f"key {number}"))
    assert sum(row.ready for row in (await operator.get_backlog()).shards) == 8
    for name in (A, B):
        (topic,) = [each for each in await (await place.operator(name)).list_topics() if each.policy]
        assert topic.topic == "others"


async def test_a_receiver_of_several_mailboxes_may_read_what_they_have_recorded(place: Place) -> None:
    operator = await place.operator(A, B)
    await operator.send_message(message())
    operations = (Right.RECV, Right.ACK, Right.READ_HEADERS, Right.READ_PAYLOAD)
    without = await place.client(A, B, topics=("orders",), operations=operations)
    with pytest.raises(Forbidden):
        await without.receive_messages("orders")
    receiver = await place.client(A, B, topics=("orders", "$members"), operations=operations)
    (received,) = await receiver.receive_messages("orders", wait_ms=20_000)
    await received.ack()
