"""Several mailboxes on one gRPC server: each call names its own, and they come and go."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.compose.connect import connect_remote
from postroom.adapters.grpc.client import GrpcTransport, connect_grpc
from postroom.adapters.grpc.handlers import MailboxHandlers
from postroom.adapters.grpc.server import serve_handlers
from postroom.adapters.sockets.address import resolve
from postroom.application.cluster.runner import ServedMailboxes
from postroom.application.mailbox.settle import DeliveryWindows
from postroom.application.service import Service, SurfaceMetrics, WriteHealth, unrestricted
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable, WrongOwner
from postroom.domain.mailbox.commands import Receive
from tests.support.messages import message
from tests.support.waiting import SECONDS, until

FIRST, SECOND = "acme@one", "köln-50%@two"


def service_of(mailbox: OwnedMailbox) -> Service:
    return Service(
        mailbox,
        unrestricted(mailbox, mailbox.search_messages),
        asyncio.Event(),
        DeliveryWindows(),
        SurfaceMetrics(),
        WriteHealth(),
    )


class CountedMailboxes(ServedMailboxes):
    """Served mailboxes that count the calls for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def find(self, mailbox: str | None) -> Service:
        self.calls[str(mailbox)] += 1
        return super().find(mailbox)


@pytest.fixture
def mailboxes() -> CountedMailboxes:
    return CountedMailboxes()


@pytest.fixture
async def address(mailboxes: ServedMailboxes) -> AsyncIterator[str]:
    handlers = MailboxHandlers(mailboxes.find, SurfaceMetrics())
    async with serve_handlers(resolve("127.0.0.1:0"), [handlers]) as url:
        yield url.removeprefix("grpc://")


@asynccontextmanager
async def opened(mailboxes: ServedMailboxes, *names: str) -> AsyncIterator[list[OwnedMailbox]]:
    async with AsyncExitStack() as stack:
        owned = [await stack.enter_async_context(open_mailbox("memory:", name)) for name in names]
        for mailbox in owned:
            stack.callback(mailboxes.add(service_of(mailbox)))
        yield owned


async def test_each_call_reaches_the_mailbox_that_it_names(mailboxes: ServedMailboxes, address: str) -> None:
    async with (
        opened(mailboxes, FIRST, SECOND),
        connect_grpc(address, timeout_ms=10_000, mailbox=FIRST) as first,
        connect_remote(f"grpc://{address}", SECOND, timeout_ms=10_000) as second,
    ):
        assert (first.name, second.name) == (FIRST, SECOND)
        await first.send_message(message(b"1"))
        await second.send_message(message(b"2"))
        assert [each.payload for each in await second.receive_messages("orders")] == [b"2"]
        assert [each.payload for each in await first.receive_messages("orders")] == [b"1"]


async def test_a_receipt_of_another_mailbox_is_refused(mailboxes: ServedMailboxes, address: str) -> None:
    async with (
        opened(mailboxes, FIRST, SECOND),
        connect_grpc(address, timeout_ms=10_000, mailbox=FIRST) as first,
        connect_grpc(address, timeout_ms=10_000, mailbox=SECOND) as second,
    ):
        await first.send_message(message())
        (received,) = await first.receive_messages("orders")
        (refused,) = await second.ack_messages([received.receipt])
        assert isinstance(refused, NotFound)
        assert await first.ack_messages([received.receipt]) == [None]


async def test_a_call_for_a_mailbox_of_another_process_is_refused(
    mailboxes: ServedMailboxes, address: str
) -> None:
    async with opened(mailboxes, FIRST):
        with pytest.raises(WrongOwner, match="does not own mailbox none@one"):
            async with connect_grpc(address, timeout_ms=10_000, mailbox="none@one"):
                pass


async def test_a_call_may_leave_out_the_name_of_the_only_mailbox(
    mailboxes: ServedMailboxes, address: str
) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(Unavailable, match="serves no mailbox now"):
            await GrpcTransport(channel, address).get_name()
    async with opened(mailboxes, FIRST), connect_grpc(address, timeout_ms=10_000) as only:
        assert only.name == FIRST
    async with opened(mailboxes, FIRST, SECOND):
        with pytest.raises(InvalidRequest, match="several mailboxes"):
            async with connect_grpc(address, timeout_ms=10_000):
                pass


async def test_a_mailbox_that_goes_ends_its_own_streams_alone(
    mailboxes: CountedMailboxes, address: str
) -> None:
    command = Receive(("orders",), 10, 1_000)
    async with (
        open_mailbox("memory:", FIRST) as mailbox,
        opened(mailboxes, SECOND) as (other,),
        grpc.aio.insecure_channel(address) as channel,
        asyncio.timeout(SECONDS),
    ):
        remove = mailboxes.add(service_of(mailbox))
        first, second = (GrpcTransport(channel, address, mailbox=name) for name in (FIRST, SECOND))
        await mailbox.send_message(message(b"1"))
        stream = first.stream(command, 5_000)
        ((delivery,), beside) = (await anext(stream), asyncio.create_task(second.receive(command, 60_000)))
        waiting = asyncio.create_task(first.receive(command, 60_000))
        await until(lambda: mailboxes.calls == {FIRST: 2, SECOND: 1})
        remove()
        for ended in (waiting, anext(stream)):
            with pytest.raises(Unavailable, match="acme@one is stopping here; connect again"):
                await ended
        mailboxes.add(service_of(mailbox))  # it comes again, and the receipts of its streams are valid
        assert await first.ack([delivery.receipt]) == [None]
        await other.send_message(message(b"2"))
        assert len(await beside) == 1


async def test_the_next_owner_of_a_name_gets_its_calls(mailboxes: ServedMailboxes, address: str) -> None:
    async with AsyncExitStack() as stack:
        async with opened(mailboxes, FIRST):
            caller = await stack.enter_async_context(connect_grpc(address, timeout_ms=10_000, mailbox=FIRST))
            await caller.send_message(message(b"1"))
        async with opened(mailboxes, FIRST) as (second,):
            await caller.send_message(message(b"2"))
            assert [each.payload for each in await second.receive_messages("orders")] == [b"2"]
