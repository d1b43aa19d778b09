"""Errors and public values can be pickled and copied, for example to come back from a process pool."""

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from enum import Enum
from importlib import import_module
from inspect import Parameter, signature
from multiprocessing import get_context
from pathlib import Path
from pkgutil import walk_packages
from types import FunctionType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest

import postroom
from postroom import InvalidRequest, NewMessage, PostroomError, ReceivedMessage, Saturated, open_mailbox
from postroom.adapters.sync_mailbox import SyncReceivedMessage
from postroom.domain.errors import Difference

COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "old pickle": lambda value: pickle.loads(pickle.dumps(value, 2)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}
VALUES = {
    str: "text",
    bytes: b"0123456789abcdef",
    int: 1,
    float: 1.5,
    bool: True,
    type(None): None,
    Path: Path("folder"),
    datetime: datetime(2026, 1, 1, tzinfo=UTC),
    object: {"a": 1},
    Any: {"a": 1},
}
SPECIAL = {
    "KafkaSettings": {"url": "kafka://localhost:9092"},
    "RabbitmqSettings": {"url": "amqp://localhost:5672"},
    "RabbitmqSource": {"queue": "orders"},
}
"""Fields that have to be of a certain form."""
RECEIVED = (ReceivedMessage, SyncReceivedMessage)

copied = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)


def error_classes() -> list[type[PostroomError]]:
    """Return all classes of errors, wherever they are defined."""
    for layer in ("domain", "application", "projections", "adapters"):
        package = import_module(f"postroom.{layer}")
        for module in walk_packages(package.__path__, f"{package.__name__}."):
            import_module(module.name)

    def below(class_: type[PostroomError]) -> Iterator[type[PostroomError]]:
        for each in class_.__subclasses__():
            yield each
            yield from below(each)

    found: set[type[PostroomError]] = {PostroomError, *below(PostroomError)}
    return sorted((each for each in found if each.__module__.startswith("postroom.")), key=str)


def make_error(class_: type[PostroomError]) -> PostroomError:
    """Return an error with a value for each argument."""
    if not isinstance(class_.__init__, FunctionType):
        return class_("What was wrong.")
    values: list[Any] = []
    named = {}
    for number, each in enumerate(list(signature(class_.__init__).parameters.values())[1:], 1):
        special = {int: number, bool: True, Sequence[Difference]: [Difference("policy.shards", 8, number)]}
        value = special.get(each.annotation, f"{each.name} {number}")
        if each.kind == Parameter.KEYWORD_ONLY:
            named[each.name] = value
        else:
            values.append(value)
    return class_(*values, **named)


def make_value(type_: Any) -> Any:
    """Return a value of the type of a struct's field."""
    origin, arguments = get_origin(type_), get_args(type_)
    if isinstance(type_, TypeVar):  # of a generic struct, such as `Page`
        return VALUES[str]
    if origin in (Union, UnionType, Annotated):
        return make_value(arguments[0])
    if origin is Literal:
        return arguments[0]
    if origin is tuple:
        return (make_value(arguments[0]),)
    if origin in (list, Sequence):
        return [make_value(arguments[0])]
    if origin in (dict, Mapping):
        return {make_value(arguments[0]): make_value(arguments[1])}
    if issubclass(type_, msgspec.Struct):
        return make_struct(type_)
    if issubclass(type_, Enum):
        return next(iter(type_))
    return VALUES[type_]


def make_struct(class_: type) -> Any:
    """Return a struct with a value for each field that has no default."""
    types = get_type_hints(class_, include_extras=True)
    values = {
        each.name: make_value(types[each.name]) for each in msgspec.structs.fields(class_) if each.required
    }
    return class_(**values | SPECIAL.get(class_.__name__, {}))


def public_structs() -> list[type[msgspec.Struct]]:
    """Return the structs of the public API, other than deliveries."""
    values = (getattr(postroom, name) for name in postroom.__all__)
    return [
        each
        for each in values
        if isinstance(each, type) and issubclass(each, msgspec.Struct) and each not in RECEIVED
    ]


def refuse(number: int) -> None:
    """Raise an error in a process of a pool."""
    raise Saturated(f"Call {number} is refused.", 250)


@copied
@pytest.mark.parametrize("class_", error_classes(), ids=lambda class_: class_.__name__)
def test_an_error_is_the_same_after_it_was_pickled_or_copied(
    class_: type[PostroomError], copied: Callable[[Any], Any]
) -> None:
    error = make_error(class_)
    error.add_note("while something was done")
    again = copied(error)
    assert type(again) is class_
    assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))
    assert (again.code, again.status) == (error.code, error.status)
    if isinstance(error, ImportError) and isinstance(again, ImportError):
        assert (again.msg, again.name) == (error.msg, error.name)


def test_an_error_raised_in_a_process_pool_reaches_the_caller_and_the_pool_goes_on() -> None:
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        for number in (1, 2):
            with pytest.raises(Saturated, match=f"Call {number} is refused") as raised:
                pool.submit(refuse, number).result(timeout=30)
            assert raised.value.retry_after_ms == 250


@copied
@pytest.mark.parametrize("class_", public_structs(), ids=lambda class_: class_.__name__)
def test_a_public_struct_is_equal_after_it_was_pickled_or_copied(
    class_: type[msgspec.Struct], copied: Callable[[Any], Any]
) -> None:
    value = make_struct(class_)
    again = copied(value)
    assert type(again) is class_
    assert msgspec.structs.asdict(again) == msgspec.structs.asdict(value)


@copied
async def test_a_received_message_keeps_its_content_when_it_is_pickled_or_copied(
    copied: Callable[[Any], Any],
) -> None:
    async with open_mailbox("memory:") as mailbox:
        await mailbox.send_message(NewMessage(topic="a", payload=b"{}", attrs={"x": "1"}, principal="me"))
        (message,) = await mailbox.receive_messages("a")
        for each in (message, SyncReceivedMessage(message.delivery, message)):
            again = copied(each)
            assert type(again) is type(each)
            assert again.to_json() == each.to_json()
            assert again.envelope == each.envelope


@pytest.mark.parametrize("copy_of", [copy.copy, copy.deepcopy])
async def test_a_copied_message_settles_its_delivery(copy_of: Callable[[Any], Any]) -> None:
    async with open_mailbox("memory:") as mailbox:
        await mailbox.send_message(NewMessage(topic="a", payload=b"{}"))
        (message,) = await mailbox.receive_messages("a")
        await copy_of(message).ack()
        assert (await mailbox.get_backlog()).shards == []


async def test_a_pickled_message_is_settled_by_its_receipt_and_says_so() -> None:
    async with open_mailbox("memory:") as mailbox:
        await mailbox.send_message(NewMessage(topic="a", payload=b"{}"))
        (message,) = await mailbox.receive_messages("a")
        again = pickle.loads(pickle.dumps(message))
        for settle in (again.ack, again.nack, lambda: again.extend(1_000)):
            with pytest.raises(InvalidRequest, match=r"pickled.*ack_messages"):
                await settle()
        sync = pickle.loads(pickle.dumps(SyncReceivedMessage(message.delivery, message)))
        for settle in (sync.ack, sync.nack, lambda: sync.extend(1_000)):
            with pytest.raises(InvalidRequest, match=r"pickled.*ack_messages"):
                settle()
        assert await mailbox.ack_messages([again.receipt]) == [None]
