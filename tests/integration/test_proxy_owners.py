"""A proxy whose owners of mailboxes move, stop, crash, pause or are unknown."""

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from postroom.adapters.compose import open_mailbox
from postroom.adapters.grpc import connections, forwarding, owner_channels
from postroom.adapters.grpc.calls import DETAILS_KEY, METHODS, detailed_error
from postroom.adapters.grpc.client import GrpcTransport, connect_grpc
from postroom.adapters.grpc.forwarding import LocalMailboxes
from postroom.adapters.grpc.handlers import MailboxHandlers
from postroom.application.cluster.runner import ServedMailboxes
from postroom.application.service import SurfaceMetrics, unrestricted
from postroom.domain.errors import InvalidRequest, NotFound, PostroomError, Saturated, Unavailable, WrongOwner
from postroom.domain.mailbox.commands import Receive
from tests.support.fixed_control_plane import FixedControlPlane
from tests.support.messages import MAILBOX, message
from tests.support.proxies import RunningProxy, running_owner, running_proxy, service_of
from tests.support.servers.process import free_port, pause
from tests.support.waiting import SECONDS, until, within

NOBODY = "127.0.0.1:1"
"""An address at which nobody listens."""


@pytest.fixture
def control_plane() -> FixedControlPlane:
    return FixedControlPlane()


@pytest.fixture
async def proxy(control_plane: FixedControlPlane) -> AsyncIterator[RunningProxy]:
    async with running_proxy(control_plane) as running:
        yield running


@asynccontextmanager
async def transport(address: str, mailbox: str | None = MAILBOX) -> AsyncIterator[GrpcTransport]:
    """Call a server without repetitions."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield GrpcTransport(channel, address, mailbox=mailbox)


async def refusal(channel: grpc.aio.Channel, *metadata: tuple[str, str]) -> tuple[PostroomError, int | None]:
    """Return the error of a call, and the time in ms after which to repeat it."""
    call: Any = channel.unary_unary(METHODS["info"].path)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(b"", metadata=metadata, timeout=SECONDS)
    trailers = tuple(refused.value.trailing_metadata() or ())
    status = Status.FromString(dict(trailers)[DETAILS_KEY])
    assert status.code == refused.value.code().value[0]
    retry = RetryInfo()
    error = detailed_error(trailers)
    assert error is not None
    has_retry = any(each.Unpack(retry) for each in status.details)
    return error, retry.retry_delay.ToMilliseconds() if has_retry else None


# -- mailboxes without an owner ---


async def test_a_call_for_an_unknown_mailbox_is_not_found(proxy: RunningProxy) -> None:
    async with transport(proxy.address, "none@one") as caller:
        with pytest.raises(NotFound, match="no mailbox none@one"):
            await caller.get_name()


async def test_a_mailbox_whose_lease_expired_is_unavailable_for_now(
    control_plane: FixedControlPlane,
) -> None:
    control_plane.lease(MAILBOX, NOBODY)
    control_plane.expire(MAILBOX)
    async with running_proxy(control_plane) as proxy, grpc.aio.insecure_channel(proxy.address) as channel:
        error, retry_ms = await refusal(channel, ("postroom-mailbox", MAILBOX))
    assert isinstance(error, Unavailable)
    assert "no owner at the moment" in str(error)
    assert retry_ms == error.retry_after_ms


async def test_an_owner_that_is_down_is_unavailable_for_now(control_plane: FixedControlPlane) -> None:
    control_plane.lease(MAILBOX, NOBODY)
    async with running_proxy(control_plane) as proxy, grpc.aio.insecure_channel(proxy.address) as channel:
        error, retry_ms = await refusal(channel, ("postroom-mailbox", MAILBOX))
    assert isinstance(error, Unavailable)
    assert f"runner-1 at {NOBODY}, which owns mailbox {MAILBOX}, can't be reached; nothing was done" in str(
        error
    )
    assert retry_ms == error.retry_after_ms


@pytest.mark.parametrize(
    ("name", "kind"),
    [("", InvalidRequest), ("one", InvalidRequest), ("a b@one", InvalidRequest), ("a@b@c", InvalidRequest)],
)
async def test_a_malformed_name_is_refused(proxy: RunningProxy, name: str, kind: type[PostroomError]) -> None:
    async with transport(proxy.address, name) as caller:
        with pytest.raises(kind, match="namespace@proxy"):
            await caller.get_name()


async def test_a_call_names_its_mailbox_unless_there_is_only_one(control_plane: FixedControlPlane) -> None:
    async with running_owner() as owner, running_proxy(control_plane) as proxy:
        await owner.own(MAILBOX)
        async with transport(proxy.address, None) as caller:
            with pytest.raises(InvalidRequest, match="routes to 0"):
                await caller.get_name()
            proxy.proxy.update_route(control_plane.lease(MAILBOX, owner.address))
            assert await caller.get_name() == MAILBOX
            proxy.proxy.update_route(control_plane.lease("other@one", owner.address))
            with pytest.raises(InvalidRequest, match="routes to 2"):
                await caller.get_name()


async def test_a_flood_of_unknown_names_asks_admins_for_few_tables(
    control_plane: FixedControlPlane, proxy: RunningProxy
) -> None:
    async with transport(proxy.address, "known@one") as caller:
        with pytest.raises(NotFound):
            await caller.get_name()
    before = len(control_plane.registrations)
    async with grpc.aio.insecure_channel(proxy.address) as channel:
        callers = [GrpcTransport(channel, proxy.address, mailbox=f"{number}@one") for number in range(100)]
        answers = await asyncio.gather(*(each.get_name() for each in callers), return_exceptions=True)
    assert {type(each) for each in answers} <= {NotFound, Unavailable}
    assert len(control_plane.registrations) - before <= 50  # as many as tenths of a second, on a slow machine
    assert proxy.metric("routes") == 0


async def test_a_proxy_without_a_routing_table_is_unavailable(control_plane: FixedControlPlane) -> None:
    control_plane.is_away = True
    async with running_proxy(control_plane, waits=False) as proxy, transport(proxy.address) as caller:
        with pytest.raises(Unavailable, match="No admin has answered this proxy yet"):
            await caller.get_name()


async def test_a_mailbox_that_no_admin_can_tell_of_is_unavailable(
    control_plane: FixedControlPlane, proxy: RunningProxy
) -> None:
    control_plane.is_away = True
    async with transport(proxy.address, "new@one") as caller:
        with pytest.raises(Unavailable, match="No admin answers"):
            await caller.get_name()


# -- owners that move ---


async def test_a_route_that_no_push_told_of_is_asked_for(
    control_plane: FixedControlPlane, proxy: RunningProxy
) -> None:
    async with running_owner() as owner, transport(proxy.address) as caller:
        await owner.own(MAILBOX)
        control_plane.lease(MAILBOX, owner.address)
        assert await caller.get_name() == MAILBOX


@pytest.mark.parametrize("end", ["stops serving", "crashed"])
async def test_a_call_follows_a_mailbox_to_its_new_owner_once(
    control_plane: FixedControlPlane, end: str
) -> None:
    async with running_owner() as first, running_owner() as second:
        await first.own(MAILBOX)
        mailbox = await second.own(MAILBOX)
        control_plane.lease(MAILBOX, first.address if end == "stops serving" else NOBODY, runner="first")
        async with running_proxy(control_plane) as proxy, transport(proxy.address) as caller:
            first.stop_serving(MAILBOX)
            control_plane.lease(MAILBOX, second.address, runner="second", epoch=2)
            sent = [
                await caller.send(message(str(number).encode(), message_id=str(number)))
                for number in range(3)
            ]
            assert [each.duplicate for each in sent] == [False] * 3
            assert len(await mailbox.receive_messages("orders", max_messages=10)) == 3
            assert proxy.metric("retries") == 1


async def test_a_mailbox_on_its_way_to_another_owner_is_unavailable_for_now(
    control_plane: FixedControlPlane,
) -> None:
    async with running_owner() as owner:
        control_plane.lease(MAILBOX, owner.address)
        async with running_proxy(control_plane) as proxy, grpc.aio.insecure_channel(proxy.address) as channel:
            error, retry_ms = await refusal(channel, ("postroom-mailbox", MAILBOX))
            assert isinstance(error, Unavailable)
            assert retry_ms is not None
            assert proxy.metric("retries") == 0


async def test_calls_in_flight_while_a_mailbox_moves_store_each_message_once(
    control_plane: FixedControlPlane,
) -> None:
    async with running_owner() as first, running_owner() as second:
        mailbox = await first.own(MAILBOX)
        control_plane.lease(MAILBOX, first.address)
        async with (
            running_proxy(control_plane) as proxy,
            connect_grpc(proxy.address, timeout_ms=60_000, mailbox=MAILBOX) as client,
        ):
            sends = [asyncio.create_task(client.send_message(message(b"%d" % n))) for n in range(40)]
            await until(lambda: sum(each.done() for each in sends) >= 5)
            for epoch, owner in enumerate((second, first, second), 2):
                (first if owner is second else second).stop_serving(MAILBOX)
                await asyncio.sleep(0.05)
                owner.serve(mailbox)
                control_plane.lease(MAILBOX, owner.address, epoch=epoch)
            sent = await asyncio.gather(*sends)
        received = await mailbox.receive_messages("orders", max_messages=100)
        assert sorted(each.payload for each in received) == sorted(b"%d" % n for n in range(40))
        assert {each.message_id for each in sent} == {each.message_id for each in received}


async def test_the_last_routes_are_used_while_all_admins_are_away(control_plane: FixedControlPlane) -> None:
    async with running_owner() as owner:
        await owner.own(MAILBOX)
        control_plane.lease(MAILBOX, owner.address)
        async with running_proxy(control_plane) as proxy, transport(proxy.address) as caller:
            control_plane.is_away = True
            proxy.proxy.request_refresh()
            await until(lambda: not proxy.proxy.is_connected)
            assert await caller.get_name() == MAILBOX
            assert proxy.proxy.is_ready
            control_plane.is_away = False
            await until(lambda: proxy.proxy.is_connected)


# -- one hop ---


async def test_two_proxies_that_name_each_other_do_not_forward_in_a_circle() -> None:
    first, second = FixedControlPlane(), FixedControlPlane()
    async with running_proxy(first) as one, running_proxy(second) as other, transport(one.address) as caller:
        one.proxy.update_route(first.lease(MAILBOX, other.address))
        other.proxy.update_route(second.lease(MAILBOX, one.address))
        with pytest.raises(Unavailable, match="no owner at the moment"):
            await caller.get_name()
        assert other.metric("forwarded", status="FAILED_PRECONDITION") == 1
        assert one.metric("forwarded") == 1


async def test_a_forwarded_call_is_not_forwarded_again(control_plane: FixedControlPlane) -> None:
    async with running_owner() as owner:
        await owner.own(MAILBOX)
        control_plane.lease(MAILBOX, owner.address)
        async with running_proxy(control_plane) as proxy, grpc.aio.insecure_channel(proxy.address) as channel:
            metadata = (("postroom-mailbox", MAILBOX), ("postroom-forwarded", "1"))
            error, _ = await refusal(channel, *metadata)
            assert isinstance(error, WrongOwner)


async def test_a_mailbox_of_the_proxys_own_process_is_answered_there(
    control_plane: FixedControlPlane,
) -> None:
    served = ServedMailboxes()
    local = LocalMailboxes(served, MailboxHandlers(served.find, SurfaceMetrics()))
    async with (
        open_mailbox("memory:", MAILBOX) as mailbox,
        running_proxy(control_plane, local=local) as proxy,
        running_proxy(control_plane) as other,
    ):
        served.add(service_of(mailbox, unrestricted))
        other.proxy.update_route(control_plane.lease(MAILBOX, proxy.address))
        for address in (proxy.address, other.address):  # at once, or by one hop
            async with connect_grpc(address, timeout_ms=60_000, mailbox=MAILBOX) as client:
                await client.send_message(message())
                async with client.stream_messages("orders", wait_ms=60_000) as stream:
                    await (await anext(aiter(stream))).ack()
                with pytest.raises(NotFound):
                    await client.get_message("none")
        assert proxy.metric("forwarded") == 0
        assert proxy.metric("answered", method="send") == 2
        assert other.metric("forwarded", method="send", status="OK") == 1


# -- streams ---


async def test_a_stream_that_its_caller_cancels_makes_its_messages_ready_at_once(
    control_plane: FixedControlPlane,
) -> None:
    async with running_owner() as owner:
        mailbox = await owner.own(MAILBOX)
        control_plane.lease(MAILBOX, owner.address)
        async with running_proxy(control_plane) as proxy, transport(proxy.address) as caller:
            await mailbox.send_message(message())
            stream = caller.stream(Receive(("orders",), 10, 1_000, visibility_ms=600_000), 5_000)
            async with asyncio.timeout(SECONDS):
                assert len(await anext(stream)) == 1
                assert await mailbox.receive_messages("orders") == []
                await stream.aclose()
                (again,) = await mailbox.receive_messages("orders", wait_ms=60_000)
            assert again.attempt == 2
            await until(lambda: proxy.metric("calls_in_progress") == 0)


async def test_a_caller_that_does_not_read_does_not_fill_the_memory_of_the_proxy(
    control_plane: FixedControlPlane,
) -> None:
    payload = bytes(250_000)
    async with running_owner() as owner:
        mailbox = await owner.own(MAILBOX)
        control_plane.lease(MAILBOX, owner.address)
        async with running_proxy(control_plane) as proxy, transport(proxy.address) as caller:
            for _ in range(80):
                await mailbox.send_message(message(payload))
            stream = caller.stream(Receive(("orders",), 80, 250_000, visibility_ms=600_000), 5_000)
            assert len(await anext(stream)) == 1

            async def count_in_flight() -> int:
                return sum(each.in_flight for each in (await mailbox.get_backlog()).shards)

            before = -1
            while (now := await count_in_flight()) != before:  # until the stream stands still
                before = now
                await asyncio.sleep(0.5)
            assert now < 80
            await stream.aclose()


async def test_a_proxy_that_stops_ends_streams_and_long_polls(control_plane: FixedControlPlane) -> None:
    async with running_owner() as owner, contextlib.AsyncExitStack() as stack:
        mailbox = await owner.own(MAILBOX)
        control_plane.lease(MAILBOX, owner.address)
        async with running_proxy(control_plane) as proxy:
            caller = await stack.enter_async_context(transport(proxy.address))
            await mailbox.send_message(message())
            stream = caller.stream(Receive(("orders",), 10, 1_000, visibility_ms=600_000), 5_000)
            await anext(stream)
            polling = asyncio.create_task(caller.receive(Receive(("none",), 1, 1_000), 60_000))
            await until(lambda: proxy.metric("calls_in_progress") == 2)
        for ended in (anext(stream), polling):
            with pytest.raises(Unavailable, match="The proxy is stopping; connect again"):
                await ended
        assert len(await mailbox.receive_messages("orders", wait_ms=60_000)) == 1


# -- owners that crash or pause ---

OWNER = """
import asyncio, sys
from tests.support.proxies import running_owner

async def main():
    async with running_owner(sys.argv[1]) as owner:
        await owner.own(sys.argv[2])
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def owner_process() -> AsyncIterator[tuple[Process, str]]:
    address = f"127.0.0.1:{free_port()}"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", OWNER, address, MAILBOX, stdout=PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(SECONDS):
            assert await process.stdout.readline() == b"ready\n"
        yield process, address
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await within(process.wait())


async def test_calls_to_an_owner_that_is_killed_are_unavailable_until_another_one_takes_over(
    control_plane: FixedControlPlane,
) -> None:
    async with owner_process() as (process, address), running_owner() as second:
        await second.own(MAILBOX)
        control_plane.lease(MAILBOX, address)
        async with running_proxy(control_plane) as proxy, transport(proxy.address) as caller:
            assert await caller.get_name() == MAILBOX
            polling = asyncio.create_task(caller.receive(Receive(("orders",), 1, 1_000), 60_000))
            await until(lambda: proxy.metric("calls_in_progress") == 1)
            process.kill()
            with pytest.raises(Unavailable, match="whether the command took effect is unknown"):
                await polling
            with pytest.raises(Unavailable, match="can't be reached; nothing was done"):
                await caller.send(message())
            control_plane.lease(MAILBOX, second.address, epoch=2)
            assert not (await caller.send(message())).duplicate


async def test_an_owner_that_is_paused_is_unavailable_and_then_serves_again(
    control_plane: FixedControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = {"grpc.keepalive_time_ms": 1_000, "grpc.http2.ping_timeout_ms": 1_000}
    monkeypatch.setattr(connections, "OPTIONS", list((dict(connections.OPTIONS) | quick).items()))
    async with owner_process() as (process, address):
        control_plane.lease(MAILBOX, address)
        async with (
            running_proxy(control_plane, connect_seconds=1) as proxy,
            transport(proxy.address) as caller,
        ):
            async with connect_grpc(proxy.address, timeout_ms=60_000, mailbox=MAILBOX) as client:
                assert client.name == MAILBOX
            pause(process.pid)
            with pytest.raises(Unavailable, match="took effect is unknown"):
                await caller.send(message())
            for _ in range(2):
                with pytest.raises(Unavailable, match="can't be reached; nothing was done"):
                    await caller.send(message())
            process.send_signal(signal.SIGCONT)
            async with connect_grpc(proxy.address, timeout_ms=60_000, mailbox=MAILBOX) as client:
                assert not (await client.send_message(message())).duplicate


# -- connections ---


async def test_waiting_calls_of_many_callers_share_connections_and_have_a_limit(
    control_plane: FixedControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_channels, "CALLS_PER_CONNECTION", 2)
    monkeypatch.setattr(owner_channels, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(owner_channels, "IDLE_SECONDS", 0.0)
    async with running_owner() as owner:
        mailbox = await owner.own(MAILBOX)
        control_plane.lease(MAILBOX, owner.address)
        async with running_proxy(control_plane) as proxy, transport(proxy.address) as caller:
            receive = Receive(("orders",), 1, 1_000)
            polls = [asyncio.create_task(caller.receive(receive, 60_000)) for _ in range(4)]
            await until(lambda: proxy.metric("calls_in_progress") == 4)
            with pytest.raises(Saturated, match="4 calls through this proxy"):
                await caller.get_name()
            assert proxy.metric("owner_connections") == 2
            for number in range(4):
                await mailbox.send_message(message(b"%d" % number, sticky_key=str(number)))
            assert sum(map(len, await asyncio.gather(*polls))) == 4
            assert await caller.get_name() == MAILBOX
            await proxy.channels.close_idle({owner.address})
            assert proxy.metric("owner_connections") == 2
            await proxy.channels.close_idle(())
            assert proxy.metric("owner_connections") == 0
            assert await caller.get_name() == MAILBOX


async def test_requests_of_all_callers_have_a_limit(
    control_plane: FixedControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "MAX_REQUEST_BYTES", 1_000)
    async with running_owner() as owner:
        await owner.own(MAILBOX)
        control_plane.lease(MAILBOX, owner.address)
        async with running_proxy(control_plane) as proxy, transport(proxy.address) as caller:
            with pytest.raises(Saturated, match="calls through this proxy are in progress"):
                await caller.send(message(bytes(1_000)))
            assert not (await caller.send(message(bytes(100)))).duplicate
