"""Handlers as users write them, and how a message becomes their arguments."""

import inspect
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, get_type_hints

import msgspec
import msgspec.inspect

from postroom.application.messages import ReceivedMessage
from postroom.application.telemetry import summarize
from postroom.domain.errors import InvalidRequest

Handle = Callable[[ReceivedMessage], Awaitable[Any]]
"""Handle a message; an exception fails its delivery."""
Middleware = Callable[[Any], Any]
"""Take a `Handle` and return one."""
Decode = Callable[[ReceivedMessage], Any]


class Handler(NamedTuple):
    """A function that handles messages.

    Arguments:
        call: calls it with the arguments that its annotations ask for.
        is_async: whether it is a coroutine function; others run in threads.
    """

    name: str
    call: Callable[[ReceivedMessage], Any]
    is_async: bool


def make_handler(function: Any) -> Handler:
    """Return the handler for a function whose parameters are annotated.

    A parameter of type `ReceivedMessage` gets the delivery. One other parameter gets the payload: as `bytes`,
    as text for `str`, and parsed as JSON for any other type that msgspec or pydantic validates. What a
    `functools.partial` binds is left out.

    Raises: InvalidRequest naming the parameter that can't be filled.
    """
    target = function
    while isinstance(target, partial):
        target = target.func
    name = getattr(target, "__qualname__", type(target).__qualname__)
    if not callable(function):
        raise InvalidRequest(f"A handler must be a function, not {type(function).__name__}.")
    if not inspect.isroutine(target):
        target = target.__call__
    try:
        hints = get_type_hints(target)
    except NameError as error:
        raise InvalidRequest(f"Handler {name}: {error}; its annotations must be importable.") from error
    except Exception as error:  # an annotation is any expression
        raise InvalidRequest(f"Handler {name}: an annotation is invalid: {error}.") from error
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:  # some built-in functions
        raise InvalidRequest(f"Handler {name} can't be used: {error}; wrap it in a function.") from error
    bound = function.keywords if isinstance(function, partial) else {}
    free = [each for each in parameters if each.name not in bound]
    decoders = [_decoder(name, parameter, hints) for parameter in free]
    if not decoders or len(decoders) > 2 or sum(decode is not _delivery for decode in decoders) > 1:
        raise InvalidRequest(
            f"Handler {name} must have one parameter for the payload, one of type ReceivedMessage, or both."
        )
    names = [each.name for each in free if each.kind is each.KEYWORD_ONLY]
    return Handler(name, _call(function, decoders, names), inspect.iscoroutinefunction(target))


def _call(function: Any, decoders: list[Decode], names: list[str]) -> Callable[[ReceivedMessage], Any]:
    """Return a function that decodes the arguments and calls another.

    Arguments:
        names: of the last parameters, if they can't be passed by position.
    """
    if names:
        by_position = decoders[: -len(names)]
        by_name = list(zip(names, decoders[-len(names) :], strict=True))
        return lambda message: function(
            *[decode(message) for decode in by_position],
            **{name: decode(message) for name, decode in by_name},
        )
    if len(decoders) == 1:
        (decode,) = decoders
        return lambda message: function(decode(message))
    first, second = decoders
    return lambda message: function(first(message), second(message))


def _decoder(name: str, parameter: inspect.Parameter, hints: dict[str, Any]) -> Decode:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise InvalidRequest(f"Handler {name}: the parameter {parameter.name} must take one argument.")
    if parameter.name not in hints:
        raise InvalidRequest(
            f"Handler {name}: annotate the parameter {parameter.name} with the type of the payload, such as "
            "bytes, str, dict or a class, or with ReceivedMessage."
        )
    type_ = hints[parameter.name]
    if type_ is ReceivedMessage:
        return _delivery
    if type_ is bytes:
        return lambda message: message.payload
    if type_ is str:
        return lambda message: message.payload.decode()
    try:
        decode = _json_decoder(type_)
    except Exception as error:  # of pydantic there are several
        raise InvalidRequest(
            f"Handler {name}: {parameter.name} has a type that JSON can't be decoded to: {summarize(error)}."
        ) from error
    return lambda message: decode(message.payload)


def _json_decoder(type_: Any) -> Callable[[bytes], Any]:
    """Return a function that parses and validates JSON: by msgspec, or by pydantic what msgspec can't.

    Raises: TypeError, or an error of pydantic, when neither can.
    """
    custom = _custom_type(msgspec.inspect.type_info(type_), set())
    if custom is None:
        decode: Callable[[bytes], Any] = msgspec.json.Decoder(type_).decode
        return decode
    pydantic = sys.modules.get("pydantic")  # not a dependency; without it, none of its models is in the type
    if pydantic is None:
        raise TypeError(f"{getattr(custom, '__qualname__', custom)} is a class that msgspec can't validate")
    validate: Callable[[bytes], Any] = pydantic.TypeAdapter(type_).validate_json
    return validate


def _custom_type(info: Any, seen: set[int]) -> Any:
    """Return a class in a type that msgspec can't decode by itself, wherever in it; None without one."""
    if isinstance(info, msgspec.inspect.CustomType) or hasattr(
        getattr(info, "cls", None), "__pydantic_validator__"
    ):
        return info.cls
    if id(info) in seen:
        return None
    seen.add(id(info))
    if isinstance(info, list | tuple):
        parts: Any = info
    elif isinstance(info, msgspec.inspect.Type | msgspec.inspect.Field):
        parts = [getattr(info, name) for name in info.__struct_fields__ if name not in ("cls", "default")]
    else:
        return None
    return next((custom for part in parts if (custom := _custom_type(part, seen)) is not None), None)


def _delivery(message: ReceivedMessage) -> ReceivedMessage:
    return message
