"""Results of messages: encryption, capabilities, amnesia, restarts, changes of owner, and workers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from aiohttp import ClientSession

from postroom import ErasureSettings, MessageResult, NewMessage, Worker
from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.connect import connect_remote
from postroom.adapters.compose.queries import read_mailbox
from postroom.adapters.compose.testing import ManualClock, MemoryMailbox
from postroom.adapters.grpc.calls import METHODS
from postroom.adapters.grpc.v1 import mailbox_pb2 as pb
from postroom.adapters.memory.amnesia_log import AmnesiaEventLog
from postroom.application.mailbox.codec import decode_events
from postroom.application.messages import write_receipt
from postroom.application.queries.read_events import ReadEvents
from postroom.domain.capability.rights import Right, Topics
from postroom.domain.capability.token import Token
from postroom.domain.errors import Forbidden, NotFound, PostroomError, Unauthenticated, Unavailable
from postroom.domain.message import MessageAcked, MessageDeadLettered
from postroom.domain.policy import MailboxLimits, TopicPolicy
from tests.support.access import Controlled, controlled_mailbox
from tests.support.erasure import files_with, keys_of, new_erasure
from tests.support.stores import MAILBOX, message, receive_one
from tests.support.surfaces import served
from tests.support.waiting import until
from tests.support.worker_runs import running

WAIT_MS = 30_000
ALICE, RESULT = "alice-of-the-shop", b"the balance of alice is 5,000"
Place = Controlled[MemoryMailbox, ManualClock]


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with controlled_mailbox() as controlled:
        yield controlled


@pytest.fixture
def erasure(tmp_path: Path) -> ErasureSettings:
    return new_erasure(tmp_path)


def order(payload: bytes = b"{}") -> NewMessage:
    return NewMessage(topic="orders", payload=payload, principal=ALICE)


# -- encryption ---


async def test_the_result_of_an_encrypted_message_is_stored_encrypted_and_read_in_the_clear(
    tmp_path: Path, erasure: ErasureSettings
) -> None:
    store = tmp_path / "store" / "store.db"
    store.parent.mkdir()
    async with open_mailbox(str(store), erasure=erasure) as mailbox:
        sent = [await mailbox.send_message(order()) for _ in range(2)]
        for received in await mailbox.receive_messages("orders"):
            await received.ack(result=RESULT, content_type="text/plain")
        for each in sent:
            assert (await mailbox.wait_for_result(each.message_id)).payload == RESULT
            assert (await mailbox.get_message(each.message_id)).result == MessageResult(RESULT, "text/plain")
        events = [event for commit in mailbox.engine.log.commits() for event in decode_events(commit)]
        stored = {event.result for event in events if isinstance(event, MessageAcked)}
        assert len(stored) == 2  # of equal results
    assert files_with(store.parent, [RESULT.decode()]) == {}


async def test_a_destroyed_key_makes_results_unreadable(tmp_path: Path, erasure: ErasureSettings) -> None:
    async with open_mailbox(str(tmp_path / "store.db"), erasure=erasure) as mailbox:
        done, late = [await mailbox.send_message(order()) for _ in range(2)]
        first, second = await mailbox.receive_messages("orders")
        await first.ack(result=RESULT)
        keys = keys_of(erasure)
        keys.destroy(keys.get([ALICE])[ALICE].pseudonym, 1)
        await second.ack(result=RESULT)
        outcome = await mailbox.wait_for_result(done.message_id)
        assert (outcome.status, outcome.result, outcome.erased) == ("acked", None, True)
        with pytest.raises(NotFound, match="the key of its subject was destroyed"):
            outcome.payload  # noqa: B018 # raises
        detail = await mailbox.get_message(done.message_id)
        assert (detail.result, detail.erased, detail.intact) == (None, True, True)
        assert (await mailbox.wait_for_result(late.message_id)).result is None
    with read_mailbox(str(tmp_path / "store.db"), erasure=erasure) as reader:
        assert reader.get_message(done.message_id).result is None


async def test_the_traceback_of_an_encrypted_message_is_encrypted_and_destroyed_with_its_key(
    tmp_path: Path, erasure: ErasureSettings
) -> None:
    store = tmp_path / "store" / "store.db"
    store.parent.mkdir()
    text = f"ValueError: {RESULT.decode()}"
    async with open_mailbox(str(store), erasure=erasure) as mailbox:
        dead, late = [await mailbox.send_message(order()) for _ in range(2)]
        first, second = await mailbox.receive_messages("orders")
        await mailbox.nack_messages([first.receipt], traceback=text, action="reject")
        assert (await mailbox.get_message(dead.message_id)).traceback == text
        assert files_with(store.parent, [RESULT.decode()]) == {}
        keys = keys_of(erasure)
        keys.destroy(keys.get([ALICE])[ALICE].pseudonym, 1)
        await mailbox.nack_messages([second.receipt], traceback=text, action="reject")
        for each in (dead, late):
            detail = await mailbox.get_message(each.message_id)
            assert (detail.status, detail.traceback, detail.erased) == ("dead", None, True)
    assert files_with(store.parent, [RESULT.decode()]) == {}


async def test_no_result_is_stored_in_the_clear_while_the_keys_can_not_be_used(
    tmp_path: Path, erasure: ErasureSettings
) -> None:
    keys, elsewhere = Path(erasure.keys), tmp_path / "elsewhere"
    async with open_mailbox(str(tmp_path / "store.db"), erasure=erasure) as mailbox:
        sent = await mailbox.send_message(order())
        received = await receive_one(mailbox)
        await asyncio.to_thread(keys.rename, elsewhere)
        with pytest.raises(PostroomError):
            await received.ack(result=RESULT)
        await asyncio.to_thread(elsewhere.rename, keys)
        assert (await mailbox.wait_for_result(sent.message_id)).status == "in_flight"
        await received.ack(result=RESULT)
        assert (await mailbox.wait_for_result(sent.message_id)).payload == RESULT


async def test_the_result_of_a_message_in_the_clear_stays_in_the_clear(
    tmp_path: Path, erasure: ErasureSettings
) -> None:
    async with open_mailbox(str(tmp_path / "store.db"), erasure=erasure) as mailbox:
        sent = await mailbox.send_message(message(topic="plain"))
        await (await receive_one(mailbox, "plain")).ack(result=RESULT)
        assert (await mailbox.wait_for_result(sent.message_id)).payload == RESULT
    assert files_with(tmp_path, [RESULT.decode()]) != {}


# -- capabilities ---


async def test_a_token_limited_to_topics_gets_no_result_of_others(place: Place) -> None:
    shop = await open_as(place, Topics(("shop.*",)))
    bank = await open_as(place, Topics(("bank.*",)))
    own = await shop.send_message(message(topic="shop.a", message_id="order 1"))
    other = await bank.send_message(message(topic="bank.a", message_id="order 1"))
    secret = await bank.send_message(message(topic="bank.a", message_id="order 2"))
    for mailbox, topic in ((shop, "shop.a"), (bank, "bank.a")):
        for each in await mailbox.receive_messages(topic):
            await each.ack(result=topic.encode())
    assert own.message_id == other.message_id
    assert (await shop.wait_for_result("order 1")).payload == b"shop.a"
    assert (await bank.wait_for_result("order 1")).payload == b"bank.a"
    async with asyncio.timeout(WAIT_MS / 2_000):
        for id_ in (secret.message_id, "unknown"):
            with pytest.raises(Forbidden):
                await shop.wait_for_result(id_, wait_ms=WAIT_MS)


async def test_who_waits_is_not_woken_by_a_message_of_the_same_id_on_another_topic(place: Place) -> None:
    shop = await open_as(place, Topics(("shop.*",)))
    bank = await open_as(place, Topics(("bank.*",)))
    await shop.send_message(message(topic="shop.a", message_id="order 1"))
    await bank.send_message(message(topic="bank.a", message_id="order 1"))
    waiting = asyncio.create_task(shop.wait_for_result("order 1", wait_ms=WAIT_MS))
    await (await receive_one(bank, "bank.a")).ack(result=b"of the bank")
    await (await receive_one(shop, "shop.a")).ack(result=b"of the shop")
    assert (await waiting).payload == b"of the shop"


async def test_a_token_needs_the_right_to_read_payloads_for_results(place: Place) -> None:
    sent = await place.mailbox.send_message(message())
    worker = await open_as(place, operations=[Right.RECV, Right.ACK, Right.READ_HEADERS])
    await (await receive_one(worker)).ack(result=RESULT)
    for call in (worker.wait_for_result, worker.get_message):
        with pytest.raises(Forbidden, match="read-payload"):
            await call(sent.message_id)
    session = await place.control.open_session(place.issue(operations=[Right.READ_HEADERS]))
    detail = await session.read_headers(sent.message_id)
    assert detail.result is None
    assert RESULT not in msgspec.msgpack.encode(detail.history)
    assert RESULT.decode() not in repr(await session.mailbox.explain_message(sent.message_id))
    dead = await place.mailbox.send_message(message())
    received = await receive_one(place.mailbox)
    await place.mailbox.nack_messages([received.receipt], traceback=RESULT.decode(), action="reject")
    shown = [
        await session.read_headers(dead.message_id),
        await session.mailbox.explain_message(dead.message_id),
    ]
    assert RESULT.decode() not in repr(shown)
    assert (await place.mailbox.get_message(dead.message_id)).traceback == RESULT.decode()


async def test_a_token_that_is_revoked_during_the_wait_gets_no_result(place: Place) -> None:
    sent = await place.mailbox.send_message(message())
    token = place.issue()
    mailbox = (await place.control.open_session(token)).mailbox
    waiting = asyncio.create_task(mailbox.wait_for_result(sent.message_id, wait_ms=WAIT_MS))
    await until(lambda: place.mailbox.engine.long_polls.watches)
    place.capabilities.revoke(Token.decode(token).read_identifier().nonce)
    await place.control.refresh()
    await (await receive_one(place.mailbox)).ack(result=RESULT)
    with pytest.raises(Unauthenticated):
        await waiting


async def open_as(place: Place, *caveats: Any, **rights: Any) -> Any:
    return (await place.control.open_session(place.issue(*caveats, **rights))).mailbox


async def test_the_events_of_the_log_are_shown_without_results(tmp_path: Path) -> None:
    async with open_mailbox(str(tmp_path / "store.db")) as mailbox:
        await mailbox.send_message(message())
        await (await receive_one(mailbox)).ack(result=RESULT, content_type="text/plain")
        await mailbox.send_message(message())
        received = await receive_one(mailbox)
        await mailbox.nack_messages([received.receipt], traceback=RESULT.decode(), action="reject")
        events = [each.fields() for each in ReadEvents(mailbox.engine.log)()]
        assert events[-4]["event"] == "MessageAcked"
        assert events[-4]["result_type"] == "text/plain"
        assert events[-1]["event"] == "MessageDeadLettered"
        assert RESULT.hex() not in repr(events)
        assert RESULT.decode() not in repr(events)


# -- amnesia, restarts and owners ---


async def test_in_amnesia_mode_a_result_reaches_those_who_wait_and_nobody_later() -> None:
    async with open_mailbox("memory:", MAILBOX, amnesia=True) as mailbox:
        assert isinstance(mailbox.engine.log, AmnesiaEventLog)
        sent = await mailbox.send_message(message())
        waiting = asyncio.create_task(mailbox.wait_for_result(sent.message_id, wait_ms=WAIT_MS))
        received = await receive_one(mailbox)
        await until(lambda: mailbox.engine.long_polls.watches)
        await received.ack(result=RESULT, content_type="text/plain")
        outcome = await waiting
        assert (outcome.message_id, outcome.payload) == (sent.message_id, RESULT)
        with pytest.raises(NotFound, match=r"in amnesia mode .* forgotten, and so are results"):
            await mailbox.wait_for_result(sent.message_id)
        events = [event for commit in mailbox.engine.log.commits() for event in decode_events(commit)]
        assert [event.result for event in events if isinstance(event, MessageAcked)] == [None]


async def test_in_amnesia_mode_a_dead_letter_has_its_traceback_until_it_is_settled() -> None:
    async with open_mailbox("memory:", MAILBOX, amnesia=True) as mailbox:
        assert isinstance(mailbox.engine.log, AmnesiaEventLog)
        sent = await mailbox.send_message(message())
        received, empty = await receive_one(mailbox), mailbox.engine.log.used_bytes
        await mailbox.nack_messages([received.receipt], traceback="t" * 10_000, action="reject")
        assert (await mailbox.get_message(sent.message_id)).traceback == "t" * 10_000
        assert mailbox.engine.log.used_bytes > empty + 10_000
        await mailbox.redrive_dead_letters("orders")
        await (await receive_one(mailbox)).ack()
        assert mailbox.engine.log.used_bytes < empty + 10_000
        events = [event for commit in mailbox.engine.log.commits() for event in decode_events(commit)]
        assert [each.traceback for each in events if isinstance(each, MessageDeadLettered)] == [None]


async def test_results_outlast_the_owner(tmp_path: Path) -> None:
    store = str(tmp_path / "store.db")
    async with open_mailbox(store) as mailbox:
        sent = await mailbox.send_message(message())
        await (await receive_one(mailbox)).ack(result=RESULT)
    async with open_mailbox(store) as mailbox:
        assert (await mailbox.wait_for_result(sent.message_id)).payload == RESULT
    with read_mailbox(store) as reader:
        assert reader.get_message(sent.message_id).result == MessageResult(RESULT)


async def test_a_mailbox_that_is_closed_ends_waits_with_an_error(tmp_path: Path) -> None:
    async with open_mailbox(str(tmp_path / "store.db")) as mailbox:
        sent = await mailbox.send_message(message())
        waiting = asyncio.create_task(mailbox.wait_for_result(sent.message_id, wait_ms=WAIT_MS))
        await until(lambda: mailbox.engine.long_polls.watches)
    async with asyncio.timeout(WAIT_MS / 2_000):
        with pytest.raises(PostroomError, match="closed"):
            await waiting


async def test_a_wait_that_is_cancelled_leaves_nothing_behind(tmp_path: Path) -> None:
    async with open_mailbox(str(tmp_path / "store.db")) as mailbox:
        sent = await mailbox.send_message(message())
        waiting = asyncio.create_task(mailbox.wait_for_result(sent.message_id, wait_ms=WAIT_MS))
        await until(lambda: mailbox.engine.long_polls.watches)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert not mailbox.engine.long_polls.watches


async def test_large_results_are_stored_in_several_commits(tmp_path: Path) -> None:
    limits = MailboxLimits(result_bytes=8 << 20)
    async with open_mailbox(str(tmp_path / "store.db"), limits=limits) as mailbox:
        await mailbox.send_batch([message(b"%d" % n) for n in range(5)])
        received = await mailbox.receive_messages("orders")
        results = [MessageResult(each.payload * (8 << 20)) for each in received]
        before = len([*mailbox.engine.log.commits()])
        receipts = [each.receipt for each in received]
        assert await mailbox.ack_messages(receipts, results=results) == [None] * 5
        assert len([*mailbox.engine.log.commits()]) - before == 3
        assert (await mailbox.wait_for_result(received[4].message_id)).result == results[4]


# -- HTTP ---


async def test_results_are_given_and_waited_for_over_http(place: Place) -> None:
    token = {"Authorization": f"Bearer {place.issue()}"}
    async with (
        served(place.mailbox, "http", access=lambda *_: place.control.open_session) as url,
        ClientSession(url, headers=token) as session,
    ):
        sent = await place.mailbox.send_message(message())
        path = f"/v1/messages/{sent.message_id}/result"
        waiting = asyncio.create_task(session.get(path, params={"wait_ms": str(WAIT_MS)}))
        await receive_one(place.mailbox)
        body = {"result": {"payload": "Mw==", "content_type": "application/json"}}
        async with session.post(f"/v1/ack/{sent.message_id}", json=body) as answer:
            assert (answer.status, await answer.json()) == (200, {"ok": True})
        async with await waiting as answer:
            outcome = await answer.json()
        assert (outcome["status"], outcome["result"]) == ("acked", body["result"])
        async with session.get(f"/v1/messages/{sent.message_id}") as answer:
            assert (await answer.json())["result"] == body["result"]
        wrong: Any
        for wrong in ({"payload": "?"}, {"payload": 1}, {}, {"payload": "", "type": "x"}, []):
            async with session.post(f"/v1/ack/{sent.message_id}", json={"result": wrong}) as answer:
                assert (answer.status, (await answer.json())["code"]) == (400, "E_SCHEMA")
        async with session.get(path, params={"wait_ms": "60001"}) as answer:
            assert answer.status == 400


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_a_service_that_stops_ends_waits_with_a_retry(protocol: str) -> None:
    async with open_mailbox("memory:", MAILBOX) as mailbox:
        sent = await mailbox.send_message(message())
        async with served(mailbox, protocol) as url:
            client = await asyncio.create_task(wait_in_client(url, sent.message_id))
            await until(lambda: mailbox.engine.long_polls.watches)
        async with asyncio.timeout(WAIT_MS / 2_000):
            with pytest.raises(Unavailable):
                await client


async def wait_in_client(url: str, id_: str) -> "asyncio.Task[Any]":
    async def wait() -> Any:
        async with connect_remote(url, timeout_ms=500) as client:
            return await client.wait_for_result(id_, wait_ms=1_000)

    return asyncio.create_task(wait())


async def test_a_result_without_a_receipt_is_refused_over_grpc() -> None:
    async with (
        open_mailbox("memory:", MAILBOX) as mailbox,
        served(mailbox, "grpc") as url,
        grpc.aio.insecure_channel(url.removeprefix("grpc://")) as channel,
    ):
        sent = await mailbox.send_message(message())
        receipt = write_receipt((await receive_one(mailbox)).receipt)
        ack = channel.unary_unary(
            METHODS["ack"].path,
            request_serializer=pb.AckRequest.SerializeToString,
            response_deserializer=pb.AckResponse.FromString,
        )
        result = pb.MessageResult(payload=b"3")
        with pytest.raises(grpc.aio.AioRpcError, match="A result has the index 1"):
            await ack(pb.AckRequest(receipts=[receipt], results={1: result}))
        assert (await mailbox.wait_for_result(sent.message_id)).status == "in_flight"
        answer = await ack(pb.AckRequest(receipts=["r.x", receipt], results={0: result, 1: result}))
        assert [bool(each.error.code) for each in answer.results] == [True, False]
        assert (await mailbox.wait_for_result(sent.message_id)).payload == b"3"


# -- workers ---


class Total(msgspec.Struct):
    total: int


@pytest.mark.parametrize(
    ("value", "payload", "content_type"),
    [
        (b"\x00", b"\x00", None),
        ("é", "é".encode(), "text/plain; charset=utf-8"),
        ({"total": 6}, b'{"total":6}', "application/json"),
        (Total(6), b'{"total":6}', "application/json"),
        (0, b"0", "application/json"),
        (MessageResult(b"<a/>", "text/xml"), b"<a/>", "text/xml"),
    ],
)
async def test_what_a_handler_returns_is_the_result(
    tmp_path: Path, value: object, payload: bytes, content_type: str | None
) -> None:
    worker = Worker()
    worker.consumer("orders", results=True)(lambda_of(value))
    async with open_mailbox(str(tmp_path / "store.db")) as mailbox, running(worker, mailbox):
        sent = await mailbox.send_message(message())
        outcome = await mailbox.wait_for_result(sent.message_id, wait_ms=WAIT_MS)
    assert outcome.result == MessageResult(payload, content_type)


def lambda_of(value: object) -> Any:
    def handle(payload: bytes) -> object:
        return value

    return handle


async def test_a_handler_without_results_acks_whatever_it_returns(tmp_path: Path) -> None:
    worker = Worker()
    worker.consumer("orders")(lambda_of(object()))
    worker.consumer("others", results=True)(lambda_of(None))
    async with open_mailbox(str(tmp_path / "store.db")) as mailbox, running(worker, mailbox):
        for topic in ("orders", "others"):
            sent = await mailbox.send_message(message(topic=topic))
            outcome = await mailbox.wait_for_result(sent.message_id, wait_ms=WAIT_MS)
            assert (outcome.status, outcome.result) == ("acked", None)


@pytest.mark.parametrize(
    ("value", "error"), [(object(), "unsupported"), (bytes(65_537), "above the limit result_bytes")]
)
async def test_a_handler_with_a_result_that_can_not_be_stored_has_failed(
    tmp_path: Path, value: object, error: str
) -> None:
    worker = Worker()
    worker.consumer("orders", results=True)(lambda_of(value))
    policy = TopicPolicy(max_attempts=1)
    store = str(tmp_path / "store.db")
    async with open_mailbox(store, default_policy=policy) as mailbox, running(worker, mailbox):
        sent = await mailbox.send_message(message())
        outcome = await mailbox.wait_for_result(sent.message_id, wait_ms=WAIT_MS)
    assert (outcome.status, outcome.reason) == ("dead", "max_attempts")
    assert error in (outcome.last_error or "")
