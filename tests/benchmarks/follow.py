"""Latency from commit to search result with `postroom views follow`, and its catch-up rate.

The follower is a process of its own, and so is whoever searches: it asks for chosen messages by their ids
every 5 ms, on its own connection. What it measures is therefore late by up to one round of questions, 5 ms
and about 2 ms for each message that is awaited, and never early.
"""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import msgspec

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.compose.queries import Projections, open_read_models, read_projections
from postroom.application.received_messages import ReceivedMessage
from postroom.domain.errors import NotFound
from tests.benchmarks import history
from tests.benchmarks.figures import Figures, Stopwatch
from tests.benchmarks.options import Options
from tests.benchmarks.spark import open_store, rebuild
from tests.benchmarks.throughput import LIMITS, POLICY, TOPIC, new_messages

EVENTS_PER_SECOND = 1_000
SECONDS, WARM_UP_SECONDS = 30, 5
LIVES_PER_TURN = 10
TURN_SECONDS = 3 * LIVES_PER_TURN / EVENTS_PER_SECOND
SAMPLED_TURNS = 3
"""One message of every so many turns is awaited."""
QUESTION_SECONDS = 0.005
STATUS_SECONDS = 0.1
"""How often a catch-up is looked at: each look takes several queries from the machine that is measured."""
BEHIND = 100_000
"""How many lives a follower is behind when it has to catch up."""
PATIENCE_SECONDS = 120
LATENCY_GOAL_MS, CATCH_UP_GOAL = 400, 60_000
SENT = [msgspec.structs.replace(new, idem_key=None) for new in new_messages(LIVES_PER_TURN)]


class Sample(NamedTuple):
    """A message that was committed at a moment of the machine's monotonic clock (s)."""

    message_id: str
    at: float


@contextmanager
def following(store: str) -> Iterator[Callable[[], None]]:
    """Run a follower of a store as a process of its own, until the context ends.

    Yields: what raises RuntimeError, in the follower's words, when it has ended by itself.
    """
    command = [str(Path(sys.executable).with_name("postroom")), "views", "follow"]
    environment = {**os.environ, "POSTROOM_STORE": store, "PYSPARK_PYTHON": sys.executable}
    with TemporaryFile() as errors:
        follower = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors)

        def check() -> None:
            if follower.poll() is not None:
                errors.seek(0)
                raise RuntimeError(f"{' '.join(command)} ended by itself: {errors.read().decode()}")

        try:
            yield check
            check()
        finally:
            follower.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                follower.wait(30)
            follower.kill()
            follower.wait()


def lag(projections: Projections) -> int:
    """Return how many events the read models are behind the log."""
    return sum(each.lag for each in projections.get_projection_status().lags)


def wait_until_caught_up(store: str, check: Callable[[], None]) -> None:
    """Wait until a follower has nothing left to do.

    Arguments:
        check: raises when it ended.

    Raises: TimeoutError when that takes longer than `PATIENCE_SECONDS`.
    """
    given_up_at = time.monotonic() + PATIENCE_SECONDS
    with read_projections(store) as projections:
        while lag(projections):
            check()
            if time.monotonic() > given_up_at:
                raise TimeoutError(f"The follower was still behind after {PATIENCE_SECONDS} s.")
            time.sleep(0.05)


def latencies(store: str, seconds: float) -> tuple[list[float], float]:
    """Send at a steady pace while a follower runs; return seconds from commit to visible, and events/s."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    watcher = context.Process(target=_watch, args=(store, theirs), daemon=True)
    watcher.start()
    theirs.close()  # else the end of the process would not close the pipe
    try:
        rate = asyncio.run(_send_steadily(store, seconds, ours.send))
        ours.send(None)
        if not ours.poll(PATIENCE_SECONDS):
            raise TimeoutError(f"A message could not be found {PATIENCE_SECONDS} s after it was sent.")
        seen: list[float] = ours.recv()
    except (BrokenPipeError, EOFError) as error:
        raise RuntimeError("Who searched for the messages ended by itself.") from error
    finally:
        watcher.kill()
        watcher.join()
    return seen, rate


async def _send_steadily(store: str, seconds: float, sampled: Callable[[Sample], None]) -> float:
    """Send, receive and ack a few messages a turn; return how many events a second that was."""
    async with open_mailbox(store, default_policy=POLICY, limits=LIMITS) as postroom:
        taken: list[ReceivedMessage] = []
        turns = round(seconds / TURN_SECONDS)
        before = postroom.engine.mailbox.position
        with Stopwatch() as sending:
            began = time.monotonic()
            for turn in range(turns):
                message_id = await _turn(postroom, taken)
                if turn % SAMPLED_TURNS == 0:
                    sampled(Sample(message_id, time.monotonic()))
                taken = await postroom.receive_messages(TOPIC, max_messages=LIVES_PER_TURN)
                await asyncio.sleep(max(0.0, began + (turn + 1) * TURN_SECONDS - time.monotonic()))
        return (postroom.engine.mailbox.position - before) / sending.seconds


async def _turn(postroom: OwnedMailbox, taken: list[ReceivedMessage]) -> str:
    """Settle what was received in the turn before and send as many messages; return the id of the last."""
    if taken:
        await postroom.ack_messages([message.receipt for message in taken])
    message_id = ""
    for answer in await postroom.send_batch(SENT):
        if isinstance(answer, Exception):
            raise answer
        message_id = answer.message_id
    return message_id


def _watch(store: str, pipe: Any) -> None:
    """Search for each message received until it is visible, and send back the seconds that each took."""
    waiting: dict[str, float] = {}
    seen: list[float] = []
    is_over = False
    with closing(open_read_models(store)) as models:
        while waiting or not is_over:
            while not is_over and pipe.poll():
                sample = pipe.recv()
                if sample is None:
                    is_over = True
                else:
                    waiting[sample.message_id] = sample.at
            for message_id, at in list(waiting.items()):
                with suppress(NotFound):
                    models.get(message_id)
                    seen.append(time.monotonic() - at)
                    del waiting[message_id]
            time.sleep(QUESTION_SECONDS)
    pipe.send(seen)


def _fall_behind(store: str, lives: int) -> None:
    async def main() -> None:
        async with open_mailbox(
            store, default_policy=POLICY, limits=LIMITS, durability="relaxed"
        ) as postroom:
            await history.live(postroom, history.generated(0, lives))

    asyncio.run(main())


def catch_up(store: str) -> tuple[float, float]:
    """Start a follower that is behind, and return the events a second it applies, and the seconds in all.

    The rate counts from when the first batch became visible, so it leaves the follower's start out.
    """
    samples: list[tuple[float, int]] = []
    with read_projections(store) as projections:
        behind = lag(projections)
        with Stopwatch() as catching_up, following(store) as check:
            while not samples or samples[-1][1]:
                check()
                if catching_up.elapsed() > PATIENCE_SECONDS:
                    raise TimeoutError(f"The follower was still behind after {PATIENCE_SECONDS} s.")
                time.sleep(STATUS_SECONDS)
                left = lag(projections)
                if left < behind:
                    samples.append((time.monotonic(), left))
            total = catching_up.elapsed()
    (first, left), (last, _) = samples[0], samples[-1]
    return (left / (last - first) if last > first else behind / total), total


def _measure(options: Options, figures: Figures, folder: Path, messages: int) -> None:
    # What is followed grows, and so is no store to keep.
    with open_store("postgres", messages, msgspec.structs.replace(options, keep=None), figures, folder) as (
        store,
        _,
    ):
        rebuild(store, only="")
        if figures.wants("follow.latency"):
            _report_latency(store, figures)
        if figures.wants("follow.catch_up"):
            figures.progress(f"follow.catch_up: {min(BEHIND, messages):,} messages live")
            _fall_behind(store, min(BEHIND, messages))
            rate, total = catch_up(store)
            figures.add("follow.catch_up", rate, "events/s", CATCH_UP_GOAL)
            figures.add("follow.catch_up.total", total, "s")


def _report_latency(store: str, figures: Figures) -> None:
    with following(store) as check:
        asyncio.run(_send_steadily(store, WARM_UP_SECONDS, lambda _: None))
        wait_until_caught_up(store, check)
        seen, rate = latencies(store, SECONDS)
    cuts = quantiles(seen, n=100)
    figures.add("follow.latency.p50", cuts[49] * 1_000, "ms")
    figures.add("follow.latency.p95", cuts[94] * 1_000, "ms", LATENCY_GOAL_MS)
    figures.add("follow.latency.events", rate, "events/s")


def measurements(options: Options) -> dict[str, Callable[[Figures, Path, int], None]]:
    """Return what is measured of followers under these options."""
    return {"follow.": partial(_measure, options)}
