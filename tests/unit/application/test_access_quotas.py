"""Quotas: how many operations and bytes capabilities permit in a time."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from postroom.application.access.guard import AccessSettings
from postroom.application.messages import NewMessage
from postroom.application.operations.mailbox import Mailbox
from postroom.domain.capability.rights import Quota
from postroom.domain.capability.token import Token, attenuate
from postroom.domain.errors import InvalidRequest, Saturated
from tests.support.access import MemoryPlace, controlled_mailbox, first, mailbox_of
from tests.support.messages import message

A = "orders"


@pytest.fixture
async def place() -> AsyncIterator[MemoryPlace]:
    async with controlled_mailbox() as opened:
        yield opened


async def test_a_quota_is_shared_by_what_was_attenuated(place: MemoryPlace) -> None:
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


async def test_bytes_sent_and_received_count(place: MemoryPlace) -> None:
    mailbox = await mailbox_of(place, Quota(None, 1_000, 60_000))
    await mailbox.send_message(message(b"x" * 900))
    with pytest.raises(Saturated):
        await mailbox.send_message(message(b"x" * 101))
    (received,) = await mailbox.receive_messages(A)
    with pytest.raises(Saturated):
        await mailbox.receive_messages(A)
    await received.ack()


@pytest.mark.parametrize(
    "fields",
    [
        {"attrs": {"note": "x" * 900}},
        {"attrs": {"x" * 250: b"x" * 650}},
        {"attrs": {"note": "\u00fc" * 450}},
        {"correlation_id": "x" * 900},
        {"schema_url": "x" * 900},
        {"idem_key": "x" * 255, "sticky_key": "x" * 255, "message_id": "x" * 255, "content_type": "x" * 150},
    ],
)
async def test_bytes_of_headers_and_attributes_count(place: MemoryPlace, fields: dict[str, Any]) -> None:
    sends: list[Callable[[Mailbox, NewMessage], Awaitable[object]]] = [
        lambda mailbox, new: mailbox.send_message(new),
        lambda mailbox, new: first(mailbox.send_batch([new])),
    ]
    for send in sends:
        mailbox = await mailbox_of(place, Quota(None, 1_000, 60_000))
        await send(mailbox, message(b"", **fields))
        with pytest.raises(Saturated, match="1000 bytes"):
            await send(mailbox, message(b"x" * 101))


async def test_attributes_of_a_wrong_type_are_refused_by_the_mailbox(place: MemoryPlace) -> None:
    mailbox = await mailbox_of(place, Quota(None, 1_000, 60_000))
    for attrs in (None, 1, ["a"], {1: "a"}, {"a": 1}):
        with pytest.raises(InvalidRequest, match="attrs"):
            await mailbox.send_message(message(attrs=attrs))


async def test_bytes_of_headers_that_are_read_count(place: MemoryPlace) -> None:
    await place.mailbox.send_message(message(b"", message_id="m", attrs={"note": "x" * 1_000}))
    session = await place.control.open_session(place.issue(Quota(None, 1_000, 60_000)))
    await session.read_headers("m")
    with pytest.raises(Saturated):
        await session.read_headers("m")


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
