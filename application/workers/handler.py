"""Handlers as users write them: their arguments, threads and settlements."""

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, cast, get_args, get_origin, get_type_hints

import msgspec
import msgspec.inspect

from postroom.application.messages import MessageResult
from postroom.application.received_messages import ReceivedMessage
from postroom.application.telemetry import summarize
from postroom.domain.errors import InvalidRequest

Handle = Callable[[ReceivedMessage], Awaitable[Any]]
"""Handle a message; an exception fails its delivery."""
Middleware = Callable[[Any], Any]
"""Take a `Handle` and return one."""
Decode = Callable[[ReceivedMessage], Any]
Encode = Callable[[Any], MessageResult]
JSON = "application/json"


def _delivery(message: ReceivedMessage) -> ReceivedMessage:
    return message


class Handler(NamedTuple):
    """A function that handles messages.

    Arguments:
        call: calls it with the arguments that its annotations ask for, taken from a message; in a batch, from
            a list of what `decode` returned for each message.
        is_async: whether it is a coroutine function; others run in threads.
        function: as the user wrote it.
        encode: returns a payload as `call` decodes it; raises whatever the payload does not fit.
        read: returns the value of a result, as the annotation of the function says.
        decode: returns the arguments that a message of a batch has.
    """

    name: str
    call: Callable[[Any], Any]
    is_async: bool
    function: Any
    encode: Encode
    read: Callable[[MessageResult], Any]
    decode: Decode = _delivery


def make_handler(function: Any, *, is_batch: bool = False) -> Handler:
    """Return the handler for a function whose parameters are annotated.

    A parameter of type `ReceivedMessage` gets the delivery. One other parameter gets the payload: as `bytes`,
    as text for `str`, and parsed as JSON for any other type that msgspec or pydantic validates. Arguments
    bound by a `functools.partial` are left out. In a batch, each parameter is a `list` of these.

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
    codecs = [_codec(name, parameter, hints, is_batch=is_batch) for parameter in free]
    decoders = [decode for decode, _ in codecs]
    if not decoders or len(decoders) > 2 or sum(decode is not _delivery for decode in decoders) > 1:
        raise InvalidRequest(
            f"Handler {name} must have one parameter for the payload, one of type ReceivedMessage, or both."
        )
    names = [each.name for each in free if each.kind is each.KEYWORD_ONLY]
    is_async = inspect.iscoroutinefunction(target)
    encode = next((encode for decode, encode in codecs if decode is not _delivery), _encoder(bytes))
    read = _reader(hints.get("return"))
    if is_batch:
        call = _call_with_lists(function, names)
        return Handler(name, call, is_async, function, encode, read, _decode_all(decoders))
    return Handler(name, _call(function, decoders, names), is_async, function, encode, read)


def _decode_all(decoders: Sequence[Decode]) -> Decode:
    return lambda message: [decode(message) for decode in decoders]


def _call_with_lists(function: Any, names: list[str]) -> Callable[[Sequence[Sequence[Any]]], Any]:
    """Return a function that calls another with a list for each parameter.

    Arguments:
        names: see `_call`.
    """

    def call(rows: Sequence[Sequence[Any]]) -> Any:
        lists = [list(column) for column in zip(*rows, strict=True)]
        by_position = lists[: len(lists) - len(names)]
        return function(*by_position, **dict(zip(names, lists[len(by_position) :], strict=True)))

    return call


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


def _codec(
    name: str, parameter: inspect.Parameter, hints: dict[str, Any], *, is_batch: bool
) -> tuple[Decode, Encode]:
    """Return the decoder of the argument for a parameter, and the encoder of a payload for it."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise InvalidRequest(f"Handler {name}: the parameter {parameter.name} must take one argument.")
    if parameter.name not in hints:
        raise InvalidRequest(
            f"Handler {name}: annotate the parameter {parameter.name} with the type of the payload, such as "
            "bytes, str, dict or a class, or with ReceivedMessage."
        )
    type_ = hints[parameter.name]
    if is_batch:
        if get_origin(type_) is not list:
            raise InvalidRequest(
                f"Handler {name}: annotate the parameter {parameter.name} with a list, such as list[dict] or "
                "list[ReceivedMessage], as its consumer has a batch."
            )
        (type_,) = get_args(type_)
    if type_ is ReceivedMessage:
        return _delivery, _encoder(bytes)
    if type_ is bytes:
        return (lambda message: message.payload), _encoder(bytes)
    if type_ is str:
        return (lambda message: message.payload.decode()), _encoder(str)
    try:
        decode, encode = _json_codec(type_)
    except Exception as error:  # of pydantic there are several
        raise InvalidRequest(
            f"Handler {name}: {parameter.name} has a type that JSON can't be decoded to: {summarize(error)}."
        ) from error

    def encode_valid(payload: Any) -> MessageResult:
        data = encode(payload)
        decode(data)
        return MessageResult(data, JSON)

    return (lambda message: decode(message.payload)), encode_valid


def _encoder(type_: type) -> Encode:
    """Return a function that takes a payload of type `bytes` or `str` only."""

    def encode(payload: object) -> MessageResult:
        if not isinstance(payload, type_):
            raise TypeError(f"the payload must be of type {type_.__name__}")
        return cast(MessageResult, make_result(payload))

    return encode


def _reader(annotation: Any) -> Callable[[MessageResult], Any]:
    """Return a function that reads results: JSON as an annotation says, if it does."""
    decode: Callable[[bytes], Any] = msgspec.json.decode
    with suppress(Exception):  # of a type that JSON can't be decoded to
        decode, _ = _json_codec(Any if annotation is None else annotation)

    def read(result: MessageResult) -> Any:
        if result.content_type == JSON:
            return decode(result.payload)
        return result.payload.decode() if annotation is str else result.payload

    return read


def _json_codec(type_: Any) -> tuple[Callable[[bytes], Any], Callable[[Any], bytes]]:
    """Return functions that parse and validate JSON, and that write it: of msgspec, or else of pydantic.

    Raises: TypeError, or an error of pydantic, when neither can.
    """
    custom = _custom_type(msgspec.inspect.type_info(type_), set())
    if custom is None:
        return msgspec.json.Decoder(type_).decode, msgspec.json.encode
    pydantic = sys.modules.get("pydantic")  # not a dependency; without it, none of its models is in the type
    if pydantic is None:
        raise TypeError(f"{getattr(custom, '__qualname__', custom)} is a class that msgspec can't validate")
    adapter = pydantic.TypeAdapter(type_)
    return adapter.validate_json, lambda value: adapter.dump_json(value, by_alias=True, warnings=False)


def _custom_type(info: Any, seen: set[int]) -> Any:
    """Return a class in a type that msgspec can't decode by itself, wherever in it; None without one."""
    if getattr(info, "cls", None) is object:  # any value
        return None
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


Call = Callable[[Any], Any]


class _Job(NamedTuple):
    context: Context
    call: Call
    argument: Any
    loop: asyncio.AbstractEventLoop
    done: "asyncio.Future[Any]"


class HandlerThread:
    """One thread that runs one handler at a time.

    A handler that exceeds its time limit can't be stopped, so the thread is a daemon: it does not delay the
    end of the process, and gets no other message before the handler returns.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._done: asyncio.Future[Any] | None = None

    async def run(self, call: Call, argument: Any) -> Any:
        """Call a handler in the thread and return its result; a cancellation leaves it running."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        self._done = loop.create_future()
        self._jobs.put(_Job(copy_context(), call, argument, loop, self._done))
        return await asyncio.shield(self._done)

    async def wait_until_idle(self) -> None:
        """Return when the handler that was called last has returned."""
        if self._done is not None and not self._done.done():
            await asyncio.wait([self._done])

    def close(self) -> None:
        """End the thread when its handler has returned."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                result, error = job.context.run(job.call, job.argument), None
            except BaseException as raised:  # goes to the caller
                result, error = None, raised
            if not job.loop.is_closed():
                job.loop.call_soon_threadsafe(_finish, job.done, result, error)


def _finish(done: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(result)
    else:
        # Some exceptions mean another thing to the event loop than to the handler that raised them.
        is_control = isinstance(error, StopIteration | KeyboardInterrupt | GeneratorExit)
        done.set_exception(RuntimeError(summarize(error)) if is_control else error)
        done.exception()  # silences asyncio's 'exception was never retrieved'


def make_result(value: object) -> MessageResult | None:
    """Return what a handler returned as the result of its message; None for None.

    Raises: TypeError for a value that JSON can't have.
    """
    match value:
        case None | MessageResult():
            return value
        case bytes():
            return MessageResult(value)
        case str():
            return MessageResult(value.encode(), "text/plain; charset=utf-8")
    dump = getattr(value, "model_dump_json", None)  # of a model of pydantic
    return MessageResult(msgspec.json.encode(value) if dump is None else dump(by_alias=True).encode(), JSON)


def correlation_id_of(message: ReceivedMessage) -> str:
    """Return the correlation id of a message, or its id if its envelope can't be read."""
    try:
        return message.correlation_id
    except InvalidRequest:  # the handler fails on them, too
        return message.message_id
