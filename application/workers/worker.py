"""`Worker`: registration of handlers by topic, independent of any mailbox, and their run."""

import asyncio
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import msgspec

from postroom.application.metrics import Metric
from postroom.application.operations.mailbox import Mailbox
from postroom.application.telemetry import logger
from postroom.application.threads import cancel_and_wait
from postroom.application.workers.consumer_run import Consumer, ConsumerRun, Topics
from postroom.application.workers.handler import Handling, LoopWatch, Middleware, make_handler
from postroom.domain.arguments import check_int, check_items, check_text, check_type
from postroom.domain.errors import InvalidRequest
from postroom.domain.names import check_topic
from postroom.domain.policy import MAX_DURATION_MS, check_visibility


def worker_metrics(runs: Sequence[ConsumerRun]) -> list[Metric]:
    """Return the metrics of the consumers of a worker, by the topics or patterns of their registration."""
    return [
        Metric(
            "postroom_worker_jobs",
            "counter",
            "Messages handled, by consumer and outcome.",
            [
                ({"consumer": run.topic, "outcome": outcome}, number)
                for run in runs
                for outcome, number in (("handled", run.handled), ("failed", run.failed))
            ],
        ),
        Metric(
            "postroom_worker_inflight",
            "gauge",
            "Messages in progress.",
            [({"consumer": run.topic}, run.in_progress) for run in runs],
        ),
        Metric(
            "postroom_worker_job_seconds",
            "histogram",
            "Duration of the calls of the handlers.",
            [({"consumer": run.topic}, run.seconds) for run in runs],
        ),
    ]


MAX_CONCURRENCY = 10_000
WILDCARDS = "*?["
STOP_MS = 10_000
ABORT_SECONDS = 3.0
"""Time for the nacks of cancelled handlers."""
_Function = TypeVar("_Function", bound=Callable[..., Any])


class WorkerCounts(msgspec.Struct, frozen=True):
    """Numbers of deliveries that were acked, and that failed."""

    handled: int = 0
    failed: int = 0


class Worker:
    """Handlers of messages by topic; `postroom work module:worker` runs them.

        worker = Worker()

        @worker.consumer("orders.*", concurrency=8)
        async def place(order: Order) -> None: ...

    Arguments:
        name: shown as the consumer of its deliveries.
        middlewares: functions that take a handler and return one, the outermost first.
    """

    def __init__(self, name: str = "worker", *, middlewares: Sequence[Middleware] = ()) -> None:
        self.name = check_text("name", name, 1)
        self._middlewares = _check_middlewares(middlewares)
        self._consumers: dict[str, Consumer] = {}
        self._stop: asyncio.Event | None = None
        self._runs: Sequence[ConsumerRun] = ()

    def consumer(
        self,
        topic: str,
        *,
        concurrency: int = 1,
        timeout_ms: int | None = 60_000,
        visibility_ms: int = 30_000,
        middlewares: Sequence[Middleware] = (),
        results: bool = False,
    ) -> Callable[[_Function], _Function]:
        """Register the decorated function as the handler of a topic's messages.

        A message is acked when the handler returns and nacked with the error when it raises; the topic's
        policy sets the backoff and the number of attempts. `PoisonMessage` makes it a dead letter at once.
        Its visibility timeout is extended until then. A function that is no coroutine function runs in a
        thread.

        Arguments:
            topic: name of a topic, or a pattern with `*`, `?` or `[...]`. A topic that several match goes to
                the one of its exact name, else to the first that was registered.
            concurrency: maximum number of messages that are handled at once.
            timeout_ms: time limit of the handler, after which the delivery fails; None for none.
            visibility_ms: visibility timeout: when the process dies, its messages are delivered again after
                at most so long.
            middlewares: as of the worker, inside of its.
            results: ack with what the handler returns, for `Mailbox.wait_for_result`: `bytes` as they are,
                `str` as text, anything else but None as JSON. A value that JSON can't have fails the
                delivery, and so does a result above the limit `result_bytes`.

        Raises: InvalidRequest for an argument or handler that is malformed, and for a topic registered twice.
        """
        if any(wildcard in check_text("topic", topic, 1) for wildcard in WILDCARDS):
            is_pattern = True
        else:
            is_pattern = False
            check_topic(topic)
        check_int("concurrency", concurrency, 1, MAX_CONCURRENCY)
        if timeout_ms is not None:
            check_int("timeout_ms", timeout_ms, 1, MAX_DURATION_MS)
        check_visibility(visibility_ms)
        has_results = check_type("results", results, bool)
        inner = (*self._middlewares, *_check_middlewares(middlewares))

        def register(function: _Function) -> _Function:
            if topic in self._consumers:
                raise InvalidRequest(f"Worker {self.name} has a handler of topic {topic} already.")
            self._consumers[topic] = Consumer(
                topic,
                is_pattern,
                make_handler(function),
                inner,
                concurrency,
                timeout_ms,
                visibility_ms,
                has_results,
            )
            return function

        return register

    async def run(self, mailbox: Mailbox, *, once: bool = False, stop_ms: int = STOP_MS) -> WorkerCounts:
        """Handle messages of a mailbox until `stop` is called.

        Arguments:
            once: return when no message is ready.
            stop_ms: how long handlers may continue after `stop`; then they are cancelled, and their messages
                released, which counts no attempt.

        Calls are repeated with a backoff while the mailbox is unavailable.

        Raises: InvalidRequest without handlers, without a mailbox or while it runs, Fenced when the mailbox
            was taken over, MailboxClosed when it was closed.
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
        runs = [
            ConsumerRun(each, mailbox, topics, f"{self.name}/{each.handler.name}"[:255], once=once)
            for each in self._consumers.values()
        ]
        self._runs = runs
        running = asyncio.create_task(_run_all(runs))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            with LoopWatch(self._find_handling):
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

    def collect_metrics(self) -> list[Metric]:
        """Return the metrics of the latest run."""
        return worker_metrics(self._runs)

    def stop(self) -> None:
        """Make `run` return when the handlers have returned, or after its `stop_ms`."""
        if self._stop is not None:
            self._stop.set()

    def _find_handling(self, task: "asyncio.Task[Any]") -> Handling | None:
        return next((handling for each in self._runs if (handling := each.find_handling(task))), None)

    def _consumer_of(self, topic: str) -> Consumer | None:
        """Return the consumer of a topic."""
        if (exact := self._consumers.get(topic)) is not None:
            return exact
        matches = (each for each in self._consumers.values() if fnmatchcase(topic, each.topic))
        return next(matches, None)


async def _run_all(runs: Sequence[ConsumerRun]) -> None:
    tasks = [asyncio.create_task(each.run()) for each in runs]
    try:
        await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(*tasks)


def _check_middlewares(middlewares: object) -> tuple[Middleware, ...]:
    checked = tuple(check_items("middlewares", middlewares))
    for each in checked:
        if not callable(each):
            raise InvalidRequest(f"A middleware must be callable, not {type(each).__name__}.")
    return checked  # type: ignore[return-value]
