"""An argument of a wrong type or out of range is refused by name, alone, and leaves no trace."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from postroom.adapters.compose import OwnedMailbox, list_mailboxes, open_mailbox
from postroom.adapters.compose.queries import read_mailbox
from postroom.application.messages import Sent, read_receipt
from postroom.domain.errors import FrameTooLarge, InvalidRequest
from postroom.domain.message import Receipt
from postroom.domain.policy import MailboxLimits, TopicPolicy
from tests.support.stores import envelope, message

NAN = float("nan")
SURROGATE = "a\ud800"
UNKNOWN = Receipt(b"m" * 16, 1, 1)


@pytest_asyncio.fixture
async def mailbox() -> AsyncIterator[OwnedMailbox]:
    async with open_mailbox("memory:") as mailbox:
        yield mailbox


REFUSED_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"deliver_after_ms": 0.5 * 1000}, "deliver_after_ms must be of type int, not float"),
    ({"deliver_after_ms": NAN}, "deliver_after_ms must be of type int, not float"),
    ({"deliver_after_ms": True}, "deliver_after_ms must be of type int, not bool"),
    ({"deliver_after_ms": -1}, "deliver_after_ms must be at least 0; it was -1"),
    (
        {"deliver_after_ms": 2**62},
        "deliver_after_ms must be at most 3153600000000; it was 4611686018427387904",
    ),
    ({"ttl_seconds": 1.0}, "ttl_seconds must be of type int"),
    ({"ttl_seconds": 2**70}, "ttl_seconds must be at most 3153600000; it was a number of 71 bits"),
    ({"published_at_us": NAN}, "published_at_us must be of type int"),
    ({"published_at_us": 2**70}, "published_at_us must be at most"),
    ({"priority": 5.0}, "priority must be of type int"),
    ({"priority": 11}, "priority must be at most 10; it was 11"),
    ({"idem_key": b"k"}, "idem_key must be of type str, not bytes"),
    ({"idem_key": ""}, "idem_key must have at least 1 character; it had 0"),
    ({"idem_key": "k" * 256}, "idem_key must have at most 255 characters; it had 256"),
    ({"idem_key": SURROGATE}, r"idem_key contains the surrogate U\+D800 at index 1"),
    ({"sticky_key": 7}, "sticky_key must be of type str, not int"),
    ({"sticky_key": SURROGATE}, "sticky_key contains the surrogate"),
    ({"sticky_key": "k" * 256}, "sticky_key must have at most 255 characters; it had 256"),
    ({"message_id": 7}, "The message id must be of type str, not int"),
    ({"message_id": SURROGATE}, "The message id contains the surrogate"),
    ({"topic": None}, "The topic name must be of type str, not NoneType"),
    ({"topic": SURROGATE}, "The topic name contains the surrogate"),
    ({"payload": "text"}, "payload must be of type bytes, not str"),
    ({"payload": bytearray(b"x")}, "payload must be of type bytes, not bytearray"),
    ({"attrs": None}, "attrs must be a mapping, not NoneType"),
    ({"attrs": {"k": 1}}, r"attrs\['k'\] must be of type str, not int"),
    ({"attrs": {"k": SURROGATE}}, r"attrs\['k'\] contains the surrogate"),
    ({"attrs": {7: "v"}}, "A name in attrs must be of type str, not int"),
    ({"attrs": {"k": "v" * 65_536}}, "attrs must have up to 65536 bytes, .* they had 65537"),
    ({"principal": b""}, "principal must be of type str, not bytes"),
    ({"content_type": 0}, "content_type must be of type str, not int"),
    ({"correlation_id": SURROGATE}, "correlation_id contains the surrogate"),
]


@pytest.mark.parametrize(("fields", "match"), REFUSED_FIELDS)
async def test_a_field_of_a_message_is_refused_by_name_and_its_neighbours_in_the_batch_are_sent(
    mailbox: OwnedMailbox, fields: dict[str, Any], match: str
) -> None:
    values: dict[str, Any] = {"payload": b"refused"} | fields
    refused = message(**values)
    with pytest.raises(InvalidRequest, match=match):
        await mailbox.send_message(refused)
    before, answer, after = await mailbox.send_batch([message(), refused, message()])
    assert isinstance(before, Sent)
    assert isinstance(answer, InvalidRequest)
    assert isinstance(after, Sent)
    assert len(await mailbox.receive_messages("orders")) == 2


async def test_an_item_of_a_batch_that_is_no_message_is_refused_alone(mailbox: OwnedMailbox) -> None:
    items: list[Any] = [None, {"topic": "orders"}, message(), "orders"]
    answers = await mailbox.send_batch(items)
    assert [type(answer) for answer in answers] == [InvalidRequest, InvalidRequest, Sent, InvalidRequest]
    blobs: list[Any] = [envelope("own-1"), "text", None, b"\xff"]
    answers = await mailbox.send_envelopes(blobs)
    assert [type(answer) for answer in answers] == [Sent, InvalidRequest, InvalidRequest, InvalidRequest]


async def test_a_payload_that_no_frame_holds_is_refused_before_an_envelope_is_built(
    mailbox: OwnedMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postroom.application.mailbox.message_factory.MAX_FRAME_BYTES", 100)
    with pytest.raises(FrameTooLarge, match="payload of 101 bytes"):
        await mailbox.send_message(message(b"x" * 101))


REFUSED_CALLS: list[tuple[Callable[[Any], Awaitable[Any]], str]] = [
    (lambda m: m.receive_messages("orders", visibility_ms=1000.0), "visibility_ms must be of type int"),
    (lambda m: m.receive_messages("orders", visibility_ms=NAN), "visibility_ms must be of type int"),
    (lambda m: m.receive_messages("orders", visibility_ms=2**70), "visibility_ms must be at most 2592000000"),
    (lambda m: m.receive_messages("orders", visibility_ms=249), "visibility_ms must be at least 250; it was"),
    (lambda m: m.receive_messages("orders", consumer=7), "consumer must be of type str, not int"),
    (lambda m: m.receive_messages("orders", consumer="c" * 256), "consumer must have at most 255 characters"),
    (lambda m: m.receive_messages("orders", consumer=SURROGATE), "consumer contains the surrogate"),
    (lambda m: m.receive_messages("orders", max_messages=1.0), "max_messages must be of type int"),
    (lambda m: m.receive_messages("orders", max_messages=2**70), "max_messages must be at most"),
    (lambda m: m.receive_messages("orders", max_bytes=NAN), "max_bytes must be of type int"),
    (lambda m: m.receive_messages("orders", wait_ms=0.5), "wait_ms must be of type int"),
    (lambda m: m.receive_messages("orders", wait_ms=60_001), "wait_ms must be at most 60000; it was 60001"),
    (lambda m: m.receive_messages(["a", ["b"]]), "The topic name must be of type str, not list"),
    (lambda m: m.receive_messages([]), "topic must name 1 to 1000 topics; it named 0"),
    (lambda m: m.receive_messages("a b"), "Topic name 'a b' must be 1 to 255 characters"),
    (lambda m: m.ack_messages(UNKNOWN), "receipts must be a list, not of type Receipt"),
    (lambda m: m.ack_messages("r.abc"), "receipts must be a list, not of type str"),
    (lambda m: m.ack_messages(None), "receipts must be a list, not of type NoneType"),
    (lambda m: m.nack_messages([UNKNOWN], delay_ms=500.0), "delay_ms must be of type int, not float"),
    (lambda m: m.nack_messages([UNKNOWN], delay_ms=2**62), "delay_ms must be at most"),
    (lambda m: m.nack_messages([UNKNOWN], reason=b"x"), "reason must be of type str, not bytes"),
    (lambda m: m.nack_messages([UNKNOWN], reason=SURROGATE), "reason contains the surrogate"),
    (lambda m: m.extend_visibility([UNKNOWN], 1000.0), "visibility_ms must be of type int, not float"),
    (lambda m: m.extend_visibility([UNKNOWN], 2**70), "visibility_ms must be at most"),
    (lambda m: m.redrive_dead_letters("orders", limit=1.5), "limit must be of type int"),
    (lambda m: m.redrive_dead_letters("orders", message_ids="own-1"), "message_ids must be a list"),
    (lambda m: m.redrive_dead_letters("orders", message_ids=[7]), "The message id must be of type str"),
    (lambda m: m.redrive_dead_letters("orders", reason=7), "reason must be of type str"),
    (lambda m: m.purge_topic("orders", dead=1), "dead must be of type bool, not int"),
    (lambda m: m.purge_topic(["orders"]), "The topic name must be of type str, not list"),
    (lambda m: m.set_topic_policy("orders", ["shards"]), "policy must be a TopicPolicy, or a mapping"),
    (
        lambda m: m.set_topic_policy("orders", {"shards": "1"}),
        "shards of policy must be of type int, not str",
    ),
    (lambda m: m.set_topic_policy("orders", {"shardz": 1}), "no field 'shardz'; did you mean shards"),
    (
        lambda m: m.set_topic_policy("orders", TopicPolicy(visibility_ms=1000.0)),  # type: ignore[arg-type]
        "Topic policy visibility_ms must be of type int, not float",
    ),
    (lambda m: m.send_batch(None), "messages must be a list"),
    (lambda m: m.send_envelopes([], validation="loose"), "validation must be one of strict, warn, disabled"),
    (lambda m: m.send_envelopes([], payloads=7), "payloads must be a PayloadValidator, not int"),
    (lambda m: m.send_envelopes([], on_problem=7), "on_problem must be callable, not int"),
]


@pytest.mark.parametrize(("call", "match"), REFUSED_CALLS)
async def test_an_argument_is_refused_by_name_and_calls_beside_it_are_answered(
    mailbox: OwnedMailbox, call: Callable[[OwnedMailbox], Awaitable[Any]], match: str
) -> None:
    position = mailbox.engine.mailbox.position
    answers: list[object] = await asyncio.gather(
        call(mailbox),
        mailbox.send_message(message()),
        mailbox.receive_messages("orders"),
        return_exceptions=True,
    )
    refused, sent, received = answers
    assert isinstance(refused, InvalidRequest)
    with pytest.raises(InvalidRequest, match=match):
        raise refused
    assert isinstance(sent, Sent)
    assert isinstance(received, list)
    assert mailbox.engine.mailbox.position == position + 1 + len(received)


async def test_what_is_no_receipt_is_refused_alone(mailbox: OwnedMailbox) -> None:
    await mailbox.send_message(message())
    (delivery,) = await mailbox.receive_messages("orders")
    receipts: list[Any] = [
        "r.abc",
        None,
        Receipt("text", 1, 1),  # type: ignore[arg-type]
        Receipt(b"short", 1, 1),
        Receipt(b"m" * 16, 1.0, 1),  # type: ignore[arg-type]
        Receipt([], 1, 1),  # type: ignore[arg-type]
        delivery.receipt,
    ]
    *refused, acked = await mailbox.ack_messages(receipts)
    assert all(isinstance(answer, InvalidRequest) for answer in refused)
    assert "pass read_receipt(text)" in str(refused[0])
    assert acked is None
    for token in (None, 7, b"r.abc", SURROGATE):
        with pytest.raises(InvalidRequest):
            read_receipt(token)  # type: ignore[arg-type]


async def test_the_reason_of_a_nack_is_cut_to_1000_characters(mailbox: OwnedMailbox) -> None:
    await mailbox.set_topic_policy("orders", TopicPolicy(max_attempts=1))
    await mailbox.send_message(message())
    (delivery,) = await mailbox.receive_messages("orders")
    assert await mailbox.nack_messages([delivery.receipt], reason="é" * 5_000) == [None]
    (letter,) = (await mailbox.list_dead_letters()).items
    assert letter.last_error == "é" * 1_000


REFUSED_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"mailbox": 7}, "The mailbox name must be of type str"),
    ({"mailbox": "a\ud800@b"}, "The mailbox name contains the surrogate"),
    ({"mailbox": "a\x00@b"}, "must have the form namespace@proxy"),
    ({"mode": "stack"}, "mode must be one of queue, archive"),
    ({"mode": 7}, "mode must be of type str"),
    ({"durability": "none"}, "durability must be one of full, relaxed"),
    ({"limits": {}}, "limits must be of type MailboxLimits, not dict"),
    ({"limits": MailboxLimits(frame_bytes=-5)}, "Mailbox limit frame_bytes must be at least 1; it was -5"),
    ({"limits": MailboxLimits(topics=NAN)}, "Mailbox limit topics must be of type int"),  # type: ignore[arg-type]
    ({"default_policy": TopicPolicy(shards=0)}, "Topic policy shards must be at least 1; it was 0"),
    ({"default_policy": TopicPolicy(max_attempts=0)}, "Topic policy max_attempts must be at least 1"),
    ({"default_policy": TopicPolicy(visibility_ms=10)}, "Topic policy visibility_ms must be at least 250"),
    ({"wait_ms": NAN}, "wait_ms must be of type int"),
    ({"owner": 7}, "owner must be of type str"),
    ({"owner": SURROGATE}, "owner contains the surrogate"),
    ({"archive": 7}, "archive must be of type str"),
]


@pytest.mark.parametrize(("options", "match"), REFUSED_OPTIONS)
async def test_opening_a_mailbox_with_a_wrong_option_is_refused_before_a_store_is_made(
    tmp_path: Path, options: dict[str, Any], match: str
) -> None:
    store = tmp_path / "store.db"
    with pytest.raises(InvalidRequest, match=match):
        async with open_mailbox(str(store), **options):
            pass
    assert not store.exists()


@pytest.mark.parametrize("store", [7, None, "", "a\x00b", SURROGATE])
async def test_a_store_that_can_be_no_address_is_refused(store: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"store (must|contains)"):
        async with open_mailbox(store):
            pass
    with pytest.raises(InvalidRequest, match=r"store (must|contains)"), read_mailbox(store):
        pass
    with pytest.raises(InvalidRequest, match=r"store (must|contains)"):
        list_mailboxes(store)
