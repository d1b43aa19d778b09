"""Several mailboxes on one gRPC server: each call names its own, and they come and go."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest

from postroom.adapters.compose import Postroom, open_mailbox
from postroom.adapters.compose.remote import connect_remote
from postroom.adapters.grpc.client import GrpcTransport, connect_grpc
from postroom.adapters.grpc.handlers import MailboxHandlers
from postroom.adapters.grpc.server import serve_handlers
from postroom.adapters.sockets.address import resolve
from postroom.application.delivery_window import DeliveryWindows
from postroom.application.service import Service, unrestricted
from postroom.application.surface_metrics import SurfaceMetrics
from postroom.application.write_health import WriteHealth
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable
from postroom.domain.mailbox.commands import Receive
from postroom.domain.policy import TopicPolicy
from postroom.domain.search import EventFilter, SearchPage
from tests.support.messages import message
from tests.support.waiting import SECONDS

FIRST, SECOND = "acme@one", "köln-50%@two"


class Mailboxes:
    """The mailboxes that a server serves at the moment."""

    def __init__(self) -> None:
        self.services: dict[str, Service] = {}

    def look_up(self, name: str | None) -> Service:
        if name is None:
            raise InvalidRequest("Name a mailbox.")
        if name not in self.services:
            raise NotFound(f"There is no mailbox {name}.")
        return self.services[name]

    def add(self, mailbox: Postroom) -> Service:
        async def search(filter_: EventFilter) -> SearchPage:
            raise NotFound("There are no read models.")

        service = self.services[mailbox.name] = Service(
            mailbox,
            unrestricted(mailbox, search),
            TopicPolicy(),
            asyncio.Event(),
            DeliveryWindows(),
            SurfaceMetrics(),
            WriteHealth(),
        )
        return service


@pytest.fixture
def mailboxes() -> Mailboxes:
    return Mailboxes()


@pytest.fixture
async def address(mailboxes: Mailboxes) -> AsyncIterator[str]:
    handlers = MailboxHandlers(mailboxes.look_up, SurfaceMetrics())
    async with serve_handlers(resolve("127.0.0.1:0"), [handlers]) as url:
        yield url.removeprefix("grpc://")


@asynccontextmanager
async def opened(mailboxes: Mailboxes, *names: str) -> AsyncIterator[list[Postroom]]:
    async with AsyncExitStack() as stack:
        owned = [await stack.enter_async_context(open_mailbox("memory:", name)) for name in names]
        for mailbox in owned:
            mailboxes.add(mailbox)
        yield owned


async def test_each_call_reaches_the_mailbox_that_it_names(mailboxes: Mailboxes, address: str) -> None:
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


async def test_a_receipt_of_another_mailbox_is_refused(mailboxes: Mailboxes, address: str) -> None:
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


@pytest.mark.parametrize(("name", "error"), [("none@one", NotFound), (None, InvalidRequest)])
async def test_a_call_for_no_mailbox_of_the_server_is_refused(
    mailboxes: Mailboxes, address: str, name: str | None, error: type[Exception]
) -> None:
    async with opened(mailboxes, FIRST):
        with pytest.raises(error):
            async with connect_grpc(address, timeout_ms=10_000, mailbox=name):
                pass


async def test_a_mailbox_that_goes_ends_its_own_streams_alone(mailboxes: Mailboxes, address: str) -> None:
    command = Receive(("orders",), 10, 1_000)
    async with (
        opened(mailboxes, FIRST, SECOND) as (mailbox, other),
        grpc.aio.insecure_channel(address) as channel,
        asyncio.timeout(SECONDS),
    ):
        first, second = (GrpcTransport(channel, address, mailbox=name) for name in (FIRST, SECOND))
        await mailbox.send_message(message(b"1"))
        stream = first.stream(command, 5_000)
        ((delivery,), beside) = (await anext(stream), asyncio.create_task(second.receive(command, 60_000)))
        waiting = asyncio.create_task(first.receive(command, 60_000))
        await asyncio.sleep(0.1)
        mailboxes.services.pop(FIRST).stopping.set()
        for ended in (waiting, anext(stream)):
            with pytest.raises(Unavailable, match="acme@one is stopping here; connect again"):
                await ended
        mailboxes.add(mailbox)  # it comes again, and the receipts of its streams are valid
        assert await first.ack([delivery.receipt]) == [None]
        await other.send_message(message(b"2"))
        assert len(await beside) == 1


async def test_the_next_owner_of_a_name_gets_its_calls(mailboxes: Mailboxes, address: str) -> None:
    async with AsyncExitStack() as stack:
        async with opened(mailboxes, FIRST):
            caller = await stack.enter_async_context(connect_grpc(address, timeout_ms=10_000, mailbox=FIRST))
            await caller.send_message(message(b"1"))
        async with opened(mailboxes, FIRST) as (second,):
            await caller.send_message(message(b"2"))
            assert [each.payload for each in await second.receive_messages("orders")] == [b"2"]
