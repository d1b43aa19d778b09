"""Handlers as users write them: their arguments, threads and settlements."""

import asyncio
import inspect
import random
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context, copy_context
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, get_type_hints

import msgspec
import msgspec.inspect

from postroom.application.mailbox.settle import NackOptions, with_results
from postroom.application.messages import MessageResult, ReceivedMessage
from postroom.application.operations.mailbox import Mailbox
from postroom.application.telemetry import logger, summarize
from postroom.domain.errors import (
    Fenced,
    FrameTooLarge,
    InvalidRequest,
    MailboxClosed,
    Rejected,
    Saturated,
    StaleReceipt,
    Unavailable,
)
from postroom.domain.message import Receipt
from postroom.domain.policy import OutageBackoff, backoff_ms

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
    as text for `str`, and parsed as JSON for any other type that msgspec or pydantic validates. Arguments
    bound by a `functools.partial` are left out.

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


Call = Callable[[ReceivedMessage], Any]


class _Job(NamedTuple):
    context: Context
    call: Call
    message: ReceivedMessage
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

    async def run(self, call: Call, message: ReceivedMessage) -> Any:
        """Call a handler in the thread and return its result; a cancellation leaves it running."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        self._done = loop.create_future()
        self._jobs.put(_Job(copy_context(), call, message, loop, self._done))
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
                result, error = job.context.run(job.call, job.message), None
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
        # Some mean another thing to the event loop than to the handler that raised them.
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
    return MessageResult(msgspec.json.encode(value) if dump is None else dump().encode(), "application/json")


BATCH = 1_000
NACKS_AT_ONCE = 64
BACKOFF = OutageBackoff(50, 5_000)
"""Backoff while the mailbox can't be used."""


class Settlements:
    """Settled messages that the mailbox has not confirmed yet.

    Acks are final and idempotent, so they are repeated while the mailbox is unavailable.

    Arguments:
        on_settled: called with the messages that the mailbox has settled or refused to.
    """

    def __init__(self, mailbox: Mailbox, on_settled: Callable[[Sequence[ReceivedMessage]], None]) -> None:
        self._mailbox = mailbox
        self._on_settled = on_settled
        self._acks: list[ReceivedMessage] = []
        self._results: dict[Receipt, MessageResult] = {}
        self._nacks: dict[NackOptions, list[ReceivedMessage]] = {}
        self._added = asyncio.Event()
        self._flushed = asyncio.Event()
        self._flushed.set()

    def ack(self, message: ReceivedMessage, result: MessageResult | None = None) -> None:
        """Settle a delivery whose handler returned."""
        self._acks.append(message)
        if result is not None:
            self._results[message.receipt] = result
        self._wake()

    def nack(self, message: ReceivedMessage, options: NackOptions) -> None:
        """Give a delivery back; see `Mailbox.nack_messages`."""
        self._nacks.setdefault(options, []).append(message)
        self._wake()

    def release(self, message: ReceivedMessage, reason: str) -> None:
        """Return a message that was not handled to the queue."""
        self.nack(message, NackOptions(reason, action="release"))

    async def wait_until_flushed(self) -> None:
        """Return when the mailbox has answered all of them."""
        await self._flushed.wait()

    async def run(self) -> None:
        """Send settlements until cancelled; those added in the meantime go together in the next batch."""
        while True:
            await self._added.wait()
            self._added.clear()
            acks, self._acks = self._acks, []
            nacks, self._nacks = self._nacks, {}
            results, self._results = self._results, {}
            ack = with_results(self._mailbox.ack_messages, results)
            for n in range(0, len(acks), BATCH):
                await self._settle(ack, acks[n : n + BATCH])
            failed = list(nacks.items())  # each may have a reason and a delay of its own
            for n in range(0, len(failed), NACKS_AT_ONCE):
                await asyncio.gather(*(self._nack(*each) for each in failed[n : n + NACKS_AT_ONCE]))
            if not self._added.is_set():
                self._flushed.set()

    def _wake(self) -> None:
        self._added.set()
        self._flushed.clear()

    async def _nack(self, options: NackOptions, messages: Sequence[ReceivedMessage]) -> None:
        nack = partial(self._mailbox.nack_messages, **options._asdict())
        await self._settle(nack, messages, is_release=options.action == "release")

    async def _settle(
        self,
        settle: Callable[[Sequence[Receipt]], Awaitable[list[Rejected | None]]],
        messages: Sequence[ReceivedMessage],
        *,
        is_release: bool = False,
    ) -> None:
        receipts = [message.receipt for message in messages]
        answers: list[Rejected | None] = []
        failures = 0
        while True:
            try:
                answers = await settle(receipts)
                break
            except (Fenced, MailboxClosed) as error:  # the next owner delivers the messages again
                logger().warning("worker.settle_failed", error=str(error))
                break
            except (Saturated, Unavailable) as error:
                failures += 1
                pause_ms = backoff_ms(BACKOFF, failures, random.random())
                logger().warning("worker.settle_failed", error=str(error), pause_ms=pause_ms)
                await asyncio.sleep(pause_ms / 1_000)
            except Exception:  # a refusal of all, or a defect; the messages are delivered again
                logger().exception("worker.settle_refused")
                break
        refused: list[ReceivedMessage] = []
        for message, answer in zip(messages, answers, strict=False):
            # The owner releases messages itself when an earlier one of their ordered key fails.
            if answer is not None and not (is_release and isinstance(answer, StaleReceipt)):
                logger().warning("worker.settle_refused", message_id=message.message_id, error=str(answer))
            if isinstance(answer, FrameTooLarge):  # of its result: the delivery failed
                refused.append(message)
                self.nack(message, NackOptions(str(answer)))
        self._on_settled([each for each in messages if each not in refused] if refused else messages)


CHECK_SECONDS = 0.25
CHECKS = 5
"""Checks in a row that find the loop blocked, before it is logged: the first may come when it has just begun.

Counted, because after a pause of the process all of its time has elapsed.
"""


class Handling(NamedTuple):
    """A message that a handler is working on."""

    handler: str
    message: ReceivedMessage


class LoopWatch:
    """Watch over the running event loop for the length of a context, from a thread.

    A task that keeps the loop for longer than a second is logged once, with its handler, topic and message id
    if it is a handler's, and with the line that it is at.

    Arguments:
        find: returns the message that a task is handling, if any; called in the thread.
    """

    def __init__(self, find: "Callable[[asyncio.Task[Any]], Handling | None]") -> None:
        self._find = find
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="postroom-watch", daemon=True)
        self._ended = threading.Event()
        self._beats = 0
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._beat()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        self._beats += 1
        self._timer = self._loop.call_later(CHECK_SECONDS, self._beat)

    def _watch(self) -> None:
        seen, silent = 0, 0
        while not self._ended.wait(CHECK_SECONDS):
            beats, task = self._beats, asyncio.current_task(self._loop)
            silent = silent + 1 if beats == seen and task is not None else 0
            seen = beats
            if silent == CHECKS and task is not None:
                self._log(task)

    def _log(self, task: "asyncio.Task[Any]") -> None:
        handling = self._find(task)
        frame = sys._current_frames().get(self._loop_thread)
        logger().warning(
            "worker.loop_blocked",
            handler=None if handling is None else handling.handler,
            topic=None if handling is None else handling.message.topic,
            message_id=None if handling is None else handling.message.message_id,
            task=task.get_name(),
            at=None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}",
        )


def correlation_id_of(message: ReceivedMessage) -> str:
    """Return the correlation id of a message, or its id if its envelope can't be read."""
    try:
        return message.correlation_id
    except InvalidRequest:  # the handler fails on them, too
        return message.message_id
