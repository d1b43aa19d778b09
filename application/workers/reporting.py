"""What a worker tells about itself: metrics, and reports to the owner of its mailbox (ADR 0141)."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from socket import gethostname
from time import monotonic
from uuid import uuid4

from postroom.application.metrics import Metric
from postroom.application.operations.mailbox import Mailbox
from postroom.application.telemetry import logger, summarize
from postroom.application.threads import cancel_and_wait
from postroom.application.version import own_version
from postroom.application.worker_reports import MAX_HANDLERS, REPORT_SECONDS, WorkerState
from postroom.application.workers.consumer_run import ConsumerRun
from postroom.domain.errors import Fenced, MailboxClosed, Saturated, Unavailable

REFUSED_SECONDS = 300.0
"""Time until a worker that was refused reports again."""
END_SECONDS = 1.0
"""Time limit of the report that a worker has ended."""


@asynccontextmanager
async def reporting(
    mailbox: Mailbox, name: str, version: str, runs: Sequence[ConsumerRun]
) -> AsyncIterator[None]:
    """Report a worker for the duration of the context, and at its end that it has ended.

    A worker handles messages whether or not it can be reported. An owner of a former version does not know
    the call; the next one may.

    Arguments:
        name, version: of the worker.
        runs: of its consumers; the first 200 are reported.
    """
    id_, started = str(uuid4()), monotonic()
    host, process, postroom_version = gethostname(), os.getpid(), own_version()

    def describe() -> WorkerState:
        uptime_ms = int((monotonic() - started) * 1_000)
        handlers = tuple(each.describe() for each in runs[:MAX_HANDLERS])
        return WorkerState(name, host, process, version, postroom_version, uptime_ms, handlers)

    task = asyncio.create_task(_report(mailbox, id_, describe))
    try:
        yield
    finally:
        is_known = not task.done()
        await cancel_and_wait(task)
        if is_known:
            with suppress(Exception):  # it is forgotten later
                async with asyncio.timeout(END_SECONDS):
                    await mailbox.report_worker(id_, describe(), ended=True)


async def _report(mailbox: Mailbox, id_: str, describe: Callable[[], WorkerState]) -> None:
    """Report a worker until the mailbox is lost or closed."""
    is_refused = False
    while True:
        pause = REPORT_SECONDS
        try:
            await mailbox.report_worker(id_, describe())
            is_refused = False
        except (Saturated, Unavailable):
            pass  # receives log it, and the next report may succeed
        except (Fenced, MailboxClosed):
            return
        except Exception as error:  # an owner of a former version, or a missing right
            if not is_refused:
                logger().info("worker.not_reported", error=summarize(error))
            is_refused, pause = True, REFUSED_SECONDS
        await asyncio.sleep(pause)


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
