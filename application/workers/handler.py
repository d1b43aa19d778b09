"""Handlers as users write them, and how a message becomes their arguments."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, get_type_hints

import msgspec

from postroom.application.messages import ReceivedMessage
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
    as text for `str`, and parsed as JSON for any other type that msgspec or pydantic validates.

    Raises: InvalidRequest naming the parameter that can't be filled.
    """
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if not callable(function):
        raise InvalidRequest(f"A handler must be a function, not {type(function).__name__}.")
    target = function if inspect.isroutine(function) else function.__call__
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
    decoders = [_decoder(name, parameter, hints) for parameter in parameters]
    if not decoders or len(decoders) > 2 or sum(decode is not _delivery for decode in decoders) > 1:
        raise InvalidRequest(
            f"Handler {name} must have one parameter for the payload, one of type ReceivedMessage, or both."
        )
    return Handler(name, _call(function, decoders), inspect.iscoroutinefunction(target))


def _call(function: Any, decoders: list[Decode]) -> Callable[[ReceivedMessage], Any]:
    if len(decoders) == 1:
        (decode,) = decoders
        return lambda message: function(decode(message))
    first, second = decoders
    return lambda message: function(first(message), second(message))


def _decoder(name: str, parameter: inspect.Parameter, hints: dict[str, Any]) -> Decode:
    if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
        raise InvalidRequest(f"Handler {name}: the parameter {parameter.name} must be positional.")
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
    if (validate := getattr(type_, "model_validate_json", None)) is not None:  # pydantic
        return lambda message: validate(message.payload)
    try:
        decode = msgspec.json.Decoder(type_).decode
    except TypeError as error:
        raise InvalidRequest(
            f"Handler {name}: {parameter.name} has a type that JSON can't be decoded to: {error}."
        ) from error
    return lambda message: decode(message.payload)


def _delivery(message: ReceivedMessage) -> ReceivedMessage:
    return message
