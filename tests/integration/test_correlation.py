"""One id links the calls, log events and messages of a request (svc-mailbox P-8)."""

import asyncio
from pathlib import Path
from typing import Any
from uuid import UUID

import aiohttp
import grpc
import pytest

from postroom import NewMessage, OwnedMailbox, ReceivedMessage, Worker, connect, open_mailbox
from postroom.adapters.grpc.calls import METHODS
from postroom.application.telemetry import logger
from postroom.application.tracing import correlate, current_corr_id
from tests.support.logs import capture_logs
from tests.support.surfaces import served

ORDER = NewMessage(topic="orders", payload=b"1")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_a_client_and_its_server_use_one_correlation_id(protocol: str) -> None:
    async with (
        open_mailbox("memory:") as mailbox,
        served(mailbox, protocol) as url,
        connect(url) as client,
    ):
        with correlate("request-1"):
            await client.send_message(ORDER)
        (message,) = await client.receive_messages("orders")
        assert message.correlation_id == "request-1"
        with capture_logs() as events, correlate("request-2"):
            await client.get_backlog()
        assert {each["corr_id"] for each in events} <= {"request-2"}
        if protocol == "http":
            assert [each["event"] for each in events] == ["http.request"]


async def test_an_http_request_without_a_correlation_id_gets_a_uuidv7() -> None:
    async with (
        open_mailbox("memory:") as mailbox,
        served(mailbox, "http") as url,
        aiohttp.ClientSession(url) as session,
    ):
        with capture_logs() as events:
            async with session.get("/v1/backlog") as response:
                corr_id = response.headers["X-Corr-Id"]
                await response.read()
            async with session.get("/v1/backlog", headers={"X-Corr-Id": "a b"}) as response:
                assert response.status == 400
    assert UUID(corr_id).version == 7
    assert events[0]["corr_id"] == corr_id


async def test_a_grpc_call_without_a_correlation_id_is_told_the_one_it_gets() -> None:
    async with open_mailbox("memory:") as mailbox, served(mailbox, "grpc") as url:
        method = METHODS["backlog"]
        async with grpc.aio.insecure_channel(url.removeprefix("grpc://")) as channel:
            call = channel.unary_unary(
                method.path, method.request.SerializeToString, method.response.FromString
            )(method.request())
            await call
            trailers: dict[str, Any] = dict(await call.trailing_metadata())
            send: Any = channel.unary_unary(method.path)
            refused = send(b"\xff", metadata=(("x-corr-id", "mine"),))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await refused
    assert UUID(trailers["x-corr-id"]).version == 7
    assert dict(error.value.trailing_metadata() or ())["x-corr-id"] == "mine"


async def test_the_owner_of_a_mailbox_uses_the_correlation_id_of_the_process_that_calls_it(
    tmp_path: Path,
) -> None:
    class LoggingMailbox(OwnedMailbox):
        async def list_topics(self) -> Any:
            logger().info("mailbox.listed")
            return await super().list_topics()

    store = str(tmp_path / "store.db")
    async with open_mailbox(store) as owner:
        owner.__class__ = LoggingMailbox
        async with connect(store) as client:
            with capture_logs() as events, correlate("request-1"):
                await client.list_topics()
            with correlate("request-2"):
                await client.send_message(ORDER)
            (message,) = await client.receive_messages("orders")
    assert [(each["event"], each["corr_id"]) for each in events] == [("mailbox.listed", "request-1")]
    assert message.correlation_id == "request-2"


async def test_a_message_keeps_its_own_correlation_id_and_has_its_id_without_any() -> None:
    async with open_mailbox("memory:") as mailbox:
        with correlate("request-1"):
            await mailbox.send_message(NewMessage(topic="orders", payload=b"1", correlation_id="own"))
        sent = await mailbox.send_message(NewMessage(topic="orders", payload=b"2"))
        messages = await mailbox.receive_messages("orders")
    assert {each.correlation_id for each in messages} == {"own", sent.message_id}


@pytest.mark.parametrize("is_async", [True, False])
async def test_what_a_worker_logs_and_sends_for_a_message_has_its_correlation_id(is_async: bool) -> None:
    worker, seen = Worker(), []

    if is_async:

        @worker.consumer("orders")
        async def confirm(message: ReceivedMessage) -> None:
            seen.append(current_corr_id())
            await mailbox.send_message(NewMessage(topic="confirmations", payload=b""))
            raise ValueError

    else:

        @worker.consumer("orders")
        def refuse(message: ReceivedMessage) -> None:
            seen.append(current_corr_id())
            raise ValueError

    async with open_mailbox("memory:") as mailbox:
        await mailbox.send_message(NewMessage(topic="orders", payload=b"1", correlation_id="request-1"))
        with capture_logs() as events:
            await worker.run(mailbox, once=True)
        confirmations = await mailbox.receive_messages("confirmations")
    assert seen == ["request-1"]
    assert [each["corr_id"] for each in events if each["event"] == "worker.handler_failed"] == ["request-1"]
    assert [each.correlation_id for each in confirmations] == ["request-1"] * is_async


async def test_tasks_of_two_requests_do_not_share_a_correlation_id() -> None:
    async def request(name: str) -> str | None:
        with correlate(name):
            await asyncio.sleep(0)
            return current_corr_id()

    assert list(await asyncio.gather(request("a"), request("b"))) == ["a", "b"]
    assert current_corr_id() is None


@pytest.mark.parametrize("text", ["", "x" * 129, "with space", "ümlaut", "line\nbreak"])
def test_what_is_no_correlation_id_is_replaced_by_a_uuidv7(text: str) -> None:
    with correlate(text) as corr_id:
        assert UUID(corr_id).version == 7
