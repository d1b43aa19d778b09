"""Any Python value as an argument of a handler is answered or refused, and leaves a log that opens."""

import asyncio
import inspect
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import IntEnum, StrEnum
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postroom.adapters.compose import OwnedMailbox
from postroom.application.mailbox.stored_snapshots import fold
from postroom.application.messages import MessageResult, NewMessage
from postroom.application.queries.verify import VerifyLog
from postroom.domain.errors import InvalidRequest, Rejected, Unavailable
from postroom.domain.message import Receipt
from postroom.domain.policy import TopicPolicy
from tests.simulation.view import view
from tests.support.examples import examples
from tests.support.stores import Place, envelope, memory_place, message, postgres_place, sqlite_place

TOPIC = "orders"
DELIVERED = "the receipt of a delivery"


class Topics(StrEnum):
    ORDERS = "orders"


class Numbers(IntEnum):
    ONE_THOUSAND = 1_000


TEXTS = [
    "",
    "\ud800",
    "orders\udfff",
    "\x00",
    "a b",
    "*",
    "x" * 256,
    "x" * 100_000,
    "orders",
    "\u202e",
    "own-1",
]
NUMBERS = [2**bits + offset for bits in (0, 8, 31, 32, 53, 62, 63, 64, 70, 10_000) for offset in (-1, 0, 1)]
OTHERS = [
    object(),
    Decimal("0.5"),
    datetime.now(UTC),
    UUID(int=7),
    Topics.ORDERS,
    Numbers.ONE_THOUSAND,
    int,
    len,
]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=20)
    | st.binary(max_size=20)
    | st.binary(max_size=20).map(bytearray)
    | st.sampled_from(TEXTS)
    | st.sampled_from(NUMBERS).flatmap(lambda number: st.sampled_from([number, -number]))
    | st.sampled_from(OTHERS),
    lambda children: (
        st.lists(children, max_size=3)
        | st.tuples(children)
        | st.dictionaries(st.text(max_size=3) | st.integers(), children, max_size=3)
    ),
    max_leaves=4,
)


def fields(kind: type, **valid: Any) -> st.SearchStrategy[Any]:
    """Return structs of a kind with any value in up to two fields."""
    replaced = st.dictionaries(st.sampled_from(kind.__struct_fields__), VALUES, max_size=2)  # type: ignore[attr-defined]
    return replaced.map(lambda values: kind(**(valid | values)))


MESSAGES = fields(NewMessage, topic=TOPIC, payload=b"x")
RECEIPTS = st.just(DELIVERED) | fields(Receipt, message=b"m" * 16, delivery=1, epoch=1)
POLICIES = fields(TopicPolicy)
ENVELOPES = st.sampled_from([envelope("own-1"), envelope("own-2", payload=b"other")]) | st.binary(max_size=40)
ANYTHING = VALUES | MESSAGES | RECEIPTS | POLICIES
SHORT_WAITS = ANYTHING.filter(lambda value: not (isinstance(value, int | float) and 5 < value <= 60_000))


@dataclass(frozen=True)
class Call:
    """One call of a handler."""

    handler: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    async def __call__(self, mailbox: OwnedMailbox, receipts: list[Receipt]) -> Any:
        arguments = [_delivered(argument, receipts) for argument in self.arguments]
        answer = getattr(mailbox, self.handler)(*arguments, **self.options)
        return await answer if inspect.isawaitable(answer) else answer


def _delivered(argument: Any, receipts: list[Receipt]) -> Any:
    """Return an argument with receipts of real deliveries where it is a list that names them."""
    if not isinstance(argument, list):
        return argument
    return [receipts.pop() if item is DELIVERED and receipts else item for item in argument]


def calls(
    handler: str, *arguments: st.SearchStrategy[Any], **options: st.SearchStrategy[Any]
) -> st.SearchStrategy[Call]:
    chosen = st.fixed_dictionaries({}, optional=options)
    return st.builds(Call, st.just(handler), st.tuples(*arguments), chosen)


def lists(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(items | ANYTHING, max_size=3) | ANYTHING


TOPICS = st.just(TOPIC) | ANYTHING
CALLS = st.one_of(
    calls("send_message", MESSAGES | ANYTHING),
    calls("send_batch", lists(MESSAGES)),
    calls("send_envelopes", lists(ENVELOPES), validation=ANYTHING, payloads=VALUES, on_problem=ANYTHING),
    calls(
        "receive_messages",
        TOPICS,
        max_messages=ANYTHING,
        max_bytes=ANYTHING,
        visibility_ms=ANYTHING,
        consumer=ANYTHING,
        wait_ms=SHORT_WAITS,
    ),
    calls("ack_messages", lists(RECEIPTS), results=lists(fields(MessageResult, payload=b"x"))),
    calls("wait_for_result", ANYTHING, wait_ms=SHORT_WAITS),
    calls("nack_messages", lists(RECEIPTS), reason=ANYTHING, delay_ms=ANYTHING),
    calls("extend_visibility", lists(RECEIPTS), st.just(1_000) | ANYTHING),
    calls("redrive_dead_letters", TOPICS, limit=ANYTHING, reason=ANYTHING, message_ids=ANYTHING),
    calls("purge_topic", TOPICS, dead=ANYTHING, ready=ANYTHING),
    calls("set_topic_policy", TOPICS, POLICIES | ANYTHING),
    calls("pause_topic", TOPICS),
    calls("resume_topic", TOPICS),
    calls("list_topics"),
    calls("get_message", ANYTHING),
    calls("explain_message", ANYTHING),
    calls("get_topic_policy", ANYTHING),
    calls("get_backlog", topic=ANYTHING, at=ANYTHING),
    calls(
        "list_dead_letters",
        topic=ANYTHING,
        reason=ANYTHING,
        held_keys=ANYTHING,
        limit=ANYTHING,
        cursor=ANYTHING,
        at=ANYTHING,
    ),
)


async def use(place: Place, groups: list[list[Call]]) -> None:
    """Make calls, those of a group at the same time and beside a send and a receive that are valid."""
    async with place.open() as mailbox:
        for group in groups:
            await mailbox.send_batch([message()] * 3)
            receipts = [delivery.receipt for delivery in await mailbox.receive_messages(TOPIC)]
            beside = [mailbox.send_message(message(b"neighbour")), mailbox.receive_messages("neighbours")]
            outcomes = await asyncio.gather(
                *beside, *(call(mailbox, receipts) for call in group), return_exceptions=True
            )
            for call, outcome in zip([*beside, *group], outcomes, strict=True):
                assert not isinstance(outcome, Unavailable), (call, outcome)
                assert isinstance(outcome, Rejected) or not isinstance(outcome, BaseException), (
                    call,
                    outcome,
                )
                for each in outcome if isinstance(outcome, list) else []:
                    assert isinstance(each, Rejected) or not isinstance(each, BaseException), (call, each)
            assert not isinstance(outcomes[0], InvalidRequest), outcomes[0]
            assert outcomes[1] == []
        now = mailbox.engine.now()
        before = view(mailbox.engine.mailbox, now)
    with closing(place.open_log()) as log:
        assert VerifyLog(log)().last == before["position"]
        assert view(fold(log), now) == before
    async with place.open() as mailbox:
        assert mailbox.engine.mailbox.position == before["position"] + 1
        await mailbox.send_message(message(topic="another"))


@settings(max_examples=examples(800))
@given(groups=st.lists(st.lists(CALLS, min_size=1, max_size=8), min_size=1, max_size=5))
def test_any_value_in_any_argument_is_a_result_or_a_refusal_and_leaves_a_log_that_folds_to_the_same_state(
    groups: list[list[Call]],
) -> None:
    asyncio.run(use(memory_place(), groups))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(groups=st.lists(st.lists(CALLS, min_size=1, max_size=8), min_size=1, max_size=5))
def test_a_sqlite_log_opens_verifies_and_folds_after_any_value_in_any_argument(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[Call]]
) -> None:
    asyncio.run(use(sqlite_place(tmp_path_factory.mktemp("store")), groups))


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(groups=st.lists(st.lists(CALLS, min_size=1, max_size=8), min_size=1, max_size=5))
def test_a_postgresql_log_opens_verifies_and_folds_after_any_value_in_any_argument(
    postgres_store: str, groups: list[list[Call]]
) -> None:
    asyncio.run(use(postgres_place(postgres_store), groups))
