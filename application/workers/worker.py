"""`Worker`: registration of handlers by topic, independent of any mailbox, and their run."""

import asyncio
import os
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from socket import gethostname
from typing import Any, TypeVar

import msgspec

from postroom.application.metrics import Metric
from postroom.application.operations.mailbox import Mailbox
from postroom.application.telemetry import logger
from postroom.application.threads import cancel_and_wait
from postroom.application.workers.consumer import Consumer, Once, Topics, prepare
from postroom.application.workers.consumer_run import MAX_MESSAGES, ConsumerRun, pause_after
from postroom.application.workers.handler import Middleware, make_handler
from postroom.application.workers.handler_calls import Handling, LoopWatch
from postroom.application.workers.reporting import reporting, worker_metrics
from postroom.application.workers.retry import Duration, Retry, read_duration
from postroom.application.workers.schedules import (
    Interval,
    as_handler,
    read_times,
    register_schedules,
)
from postroom.application.workers.sending import Sender
from postroom.domain.arguments import MAX_TEXT_CHARS, check_int, check_items, check_text, check_type
from postroom.domain.errors import (
    Fenced,
    InvalidRequest,
    MailboxClosed,
    Saturated,
    Unavailable,
)
from postroom.domain.names import TOPIC_TEXT, check_topic
from postroom.domain.policy import MAX_DURATION_MS, MAX_VISIBILITY_MS, MIN_VISIBILITY_MS
from postroom.domain.schedule import Missed, ScheduleSpec, check_schedule_name
from postroom.domain.subscription import SubscriptionFilter, check_filter

MAX_CONCURRENCY = 10_000
WILDCARDS = "*?["
_WILDCARD = re.compile(r"\*|\?|\[!?[^\]]+\]")
STOP_MS = 10_000
ABORT_SECONDS = 3.0
"""Time for the nacks of cancelled handlers."""
_Function = TypeVar("_Function", bound=Callable[..., Any])


class WorkerCounts(msgspec.Struct, frozen=True):
    """Numbers of deliveries that were acked, and that failed.

    Arguments:
        handled, failed: deliveries whose handler returned, and those whose handler raised or took too long.
    """

    handled: int = 0
    failed: int = 0


class Worker(Sender):
    """Handlers of messages by topic; `postroom work module:worker` runs them.

        worker = Worker()

        @worker.consumer("orders.*", concurrency=8)
        async def place(order: Order) -> None: ...

    Arguments:
        name: shown as the consumer of its deliveries.
        middlewares: functions that take a handler and return one, the outermost first.
        version: of its code, which `list_workers` shows.
    """

    def __init__(
        self, name: str = "worker", *, middlewares: Sequence[Middleware] = (), version: str = ""
    ) -> None:
        self.name = check_text("name", name, 1)
        self.version = check_text("version", version)
        self._middlewares = _check_middlewares(middlewares)
        self._consumers: dict[str, Consumer] = {}
        self._schedules: dict[str, ScheduleSpec] = {}
        self._stop: asyncio.Event | None = None
        self._runs: Sequence[ConsumerRun] = ()

    def consumer(
        self,
        topic: str | Sequence[str],
        *,
        subscription: str | None = None,
        headers: dict[str, str] | None = None,
        concurrency: int = 1,
        timeout: Duration | None = "1m",
        visibility: Duration = "30s",
        middlewares: Sequence[Middleware] = (),
        results: bool = False,
        retry: Retry = Retry(),  # noqa: B008  # it is frozen
        batch: int = 1,
        ordered_keys: bool = False,
    ) -> Callable[[_Function], _Function]:
        """Register the decorated function as the handler of a topic's messages.

        A message is acked when the handler returns and nacked with the error when it raises; the topic's
        policy sets the backoff and the number of attempts, unless `retry` does. `Reject` makes it a dead
        letter at once, and `RetryLater` has it delivered again after a time. The visibility timeout of a
        message is extended until the handler returns. A function that is no coroutine function runs in a
        thread.

        Arguments:
            topic: name of a topic, or a pattern with `*`, `?` or `[...]`. A topic that several match goes to
                the handler of its exact name, else to the first that was registered. For a subscription: the
                topics or globs (with `*` only) of its filter, one or several.
            subscription: name of a subscription, whose copies the handler gets. A run creates it if it is
                missing, for messages from then on. Consumers with different subscriptions each get every
                message; consumers with the same one share the messages.
            headers: custom headers that messages must have with these values; for a subscription only.
            concurrency: maximum number of messages that are handled at once.
            timeout: time limit of the handler, after which the delivery fails; None for none.
            visibility: visibility timeout: when the process dies, its messages are delivered again after at
                most this time.
            middlewares: as of the worker, but inside the worker's.
            results: ack with what the handler returns, for `Mailbox.wait_for_result`: `bytes` as they are,
                `str` as text, anything else but None as JSON. A value that JSON can't have fails the
                delivery, and so does a result above the limit `result_bytes`.
            retry: attempts and backoff of failed deliveries; by default as the topic's policy says.
            batch: maximum number of messages of one call. Above 1, the parameters of the handler are lists,
                and it returns None, or a list with an exception for each message that failed, and a result
                or None for the others; without middlewares.
            ordered_keys: handle the messages of a sticky key in order, whatever fails. It is a policy of the
                topic, for all consumers: a run sets it, unless a section of the settings says otherwise.

        Raises: InvalidRequest for an argument or handler that is malformed, and for a topic registered twice.
        """
        filter_ = None if subscription is None else _make_filter(topic, headers)
        name = _check_one_topic(topic, headers) if subscription is None else check_topic(subscription)
        is_pattern = any(wildcard in name for wildcard in WILDCARDS)
        check_int("concurrency", concurrency, 1, MAX_CONCURRENCY)
        timeout_ms = None if timeout is None else read_duration("timeout", timeout, 1)
        visibility_ms = read_duration("visibility", visibility, MIN_VISIBILITY_MS, MAX_VISIBILITY_MS)
        has_results = check_type("results", results, bool)
        checked_retry = check_type("retry", retry, Retry).validate()
        check_int("batch", batch, 1, MAX_MESSAGES)
        if check_type("ordered_keys", ordered_keys, bool) and is_pattern:
            raise InvalidRequest(
                f"ordered_keys is a policy of one topic, and {name} is a pattern; set it with "
                "`postroom topic policy`."
            )
        inner = (*self._middlewares, *_check_middlewares(middlewares))
        if batch > 1 and inner:
            raise InvalidRequest(
                f"The consumer of {name} has a batch, and middlewares take one message at a time; leave out "
                "either."
            )

        def register(function: _Function) -> _Function:
            if name in self._consumers:
                raise InvalidRequest(f"Worker {self.name} has a handler of topic {name} already.")
            self._consumers[name] = Consumer(
                name,
                is_pattern,
                make_handler(function, is_batch=batch > 1),
                inner,
                concurrency,
                timeout_ms,
                visibility_ms,
                has_results,
                filter_,
                checked_retry,
                batch,
                ordered_keys,
            )
            return function

        return register

    def schedule(
        self,
        when: str | Interval,
        *,
        tz: str = "UTC",
        name: str | None = None,
        topic: str | None = None,
        missed: Missed = "last",
        payload: bytes = b"",
        headers: dict[str, str] | None = None,
        **options: Any,
    ) -> Callable[[_Function], _Function]:
        """Register the decorated function as the handler of a schedule's messages; it may have no parameters.

        A run sets the schedule in the mailbox, which sends each tick once, whatever number of workers run. A
        schedule that an operator changed stays as it is until the code changes, and so does a pause.

            @worker.schedule("0 3 * * *", tz="Europe/Madrid")
            async def report() -> None: ...

        Arguments:
            when: a cron expression, or `every("30s")`.
            tz: IANA name of the time zone of the expression.
            name: of the schedule; by default the worker's name, a dot and the function's name.
            topic: to which its messages are sent; by default the name of the schedule.
            missed, payload, headers: see `ScheduleSpec`.
            options: of `consumer`, such as `timeout` and `retry`.

        Raises: InvalidRequest as `consumer`, and for an argument that is malformed. An expression or time
            zone that does not exist is refused when the worker runs.
        """
        times = read_times(when)

        def register(function: _Function) -> _Function:
            own = check_schedule_name(name or f"{self.name}.{getattr(function, '__name__', 'handler')}")
            spec = ScheduleSpec(
                own if topic is None else topic,
                timezone=tz,
                missed=missed,
                payload=payload,
                headers={} if headers is None else headers,
                **times,  # type: ignore[arg-type] # cron is text, and every_ms is a number
            ).validate()
            if own in self._schedules:
                raise InvalidRequest(f"Worker {self.name} has a schedule {own} already.")
            self.consumer(spec.topic, **options)(as_handler(function))
            self._schedules[own] = spec
            return function

        return register

    async def run(self, mailbox: Mailbox, *, once: bool = False, stop_ms: int = STOP_MS) -> WorkerCounts:
        """Handle messages of a mailbox until `stop` is called.

        Arguments:
            once: return when no message is ready, including messages that handlers send.
            stop_ms: how long handlers may continue after `stop`; then they are cancelled, and their messages
                released, which counts no attempt.

        Calls are repeated with a backoff while the mailbox is unavailable.

        Raises: InvalidRequest without handlers, without a mailbox, while it runs, and when a subscription has
            another filter, or a topic another policy, than its consumer names, Forbidden when the token may
            not create or set what is missing, Fenced when the mailbox was taken over, MailboxClosed when it
            was closed.
        """
        if not callable(getattr(mailbox, "receive_messages", None)):
            raise InvalidRequest(
                f"A worker runs with a mailbox that is open, not with {type(mailbox).__name__}; pass what "
                "`async with connect(...) as mailbox` returns."
            )
        if not self._consumers:
            raise InvalidRequest(f"Worker {self.name} has no handlers; register one with `consumer`.")
        check_int("stop_ms", stop_ms, 0, MAX_DURATION_MS)
        if self._stop is not None:
            raise InvalidRequest(f"Worker {self.name} is running; use another Worker for another mailbox.")
        self._stop = asyncio.Event()
        topics = Topics(mailbox, self._consumer_of)
        end = Once(len(self._consumers)) if once else None
        watch = LoopWatch(self._find_handling)
        runs = [
            ConsumerRun(each, mailbox, topics, self._name_of(each), once=end, watch=watch)
            for each in self._consumers.values()
        ]
        self._runs = runs
        shown = nullcontext() if once else reporting(mailbox, self.name, self.version, runs)
        running = asyncio.create_task(self._run_all(mailbox, runs, self._stop))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            async with shown:
                with watch:
                    try:
                        await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
                        for each in runs:
                            each.stop()
                        await asyncio.wait([running], timeout=stop_ms / 1_000)
                    finally:
                        for each in runs:
                            each.abort()
                        await asyncio.wait([running], timeout=ABORT_SECONDS)
            if running.done():
                running.result()
            else:
                logger().error("worker.stop_failed", worker=self.name)
        finally:
            self._stop = None
            await cancel_and_wait(running, stopping)
        return WorkerCounts(sum(each.handled for each in runs), sum(each.failed for each in runs))

    def _name_of(self, consumer: Consumer) -> str:
        """Return the name of a consumer, as `list_consumers` shows it."""
        process = f"@{gethostname()}:{os.getpid()}"
        return f"{self.name}/{consumer.handler.name}"[: MAX_TEXT_CHARS - len(process)] + process

    async def run_once(self, mailbox: Mailbox) -> WorkerCounts:
        """Handle the messages that are ready, and those that handlers send, until none is ready.

        Raises: as `run`.
        """
        total = WorkerCounts()
        while (counts := await self.run(mailbox, once=True)) != WorkerCounts():
            total = WorkerCounts(total.handled + counts.handled, total.failed + counts.failed)
        return total

    @property
    def topics(self) -> list[str]:
        """Return the topics, patterns and subscriptions of its handlers."""
        return list(self._consumers)

    def collect_metrics(self) -> list[Metric]:
        """Return the metrics of the latest run."""
        return worker_metrics(self._runs)

    def stop(self) -> None:
        """Make `run` return when the handlers have returned, or after its `stop_ms`."""
        if self._stop is not None:
            self._stop.set()

    async def _prepare(self, mailbox: Mailbox) -> None:
        """Set in the mailbox what the handlers need; repeated while the mailbox is unavailable."""
        await prepare(self.name, mailbox, self._consumers.values())
        await register_schedules(self.name, mailbox, self._schedules)

    async def _run_all(self, mailbox: Mailbox, runs: Sequence[ConsumerRun], stop: asyncio.Event) -> None:
        failures = 0
        while True:
            try:
                await self._prepare(mailbox)
                break
            except (Fenced, MailboxClosed):
                raise
            except (Saturated, Unavailable) as error:
                failures += 1
                await pause_after("worker.subscribe_failed", error, failures, stop)
                if stop.is_set():
                    return
        tasks = [asyncio.create_task(each.run()) for each in runs]
        try:
            await asyncio.gather(*tasks)
        finally:
            await cancel_and_wait(*tasks)

    def _find_handling(self, task: "asyncio.Task[Any]") -> Handling | None:
        return next((handling for each in self._runs if (handling := each.find_handling(task))), None)


def _make_filter(topics: object, headers: dict[str, str] | None) -> SubscriptionFilter:
    """Return the filter of a subscription."""
    patterns: Any = (topics,) if isinstance(topics, str) else tuple(check_items("topic", topics))
    return check_filter(SubscriptionFilter(patterns, {} if headers is None else headers))


def _check_one_topic(topic: object, headers: object) -> str:
    """Return the topic or pattern of a consumer without a subscription."""
    if headers is not None or not isinstance(topic, str):
        raise InvalidRequest(
            "A consumer of several topics, or of messages with certain headers, needs a subscription; pass "
            "subscription with its name."
        )
    check_text("topic", topic, 1)
    if not any(wildcard in topic for wildcard in WILDCARDS):
        return check_topic(topic)
    if not TOPIC_TEXT.match(_WILDCARD.sub("x", topic)):
        raise InvalidRequest(
            f"The topic pattern {topic[:80]!r} matches no topic: names have no spaces, control characters or "
            "brackets, and a [ of a pattern needs its ]."
        )
    return topic


def _check_middlewares(middlewares: object) -> tuple[Middleware, ...]:
    checked = tuple(check_items("middlewares", middlewares))
    for each in checked:
        if not callable(each):
            raise InvalidRequest(f"A middleware must be callable, not {type(each).__name__}.")
    return checked  # type: ignore[return-value]
