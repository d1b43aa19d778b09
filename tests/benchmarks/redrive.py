"""Redrive jobs: is a rate held, is a job cancelled at once, and does kill -9 change no message twice?

    .venv/bin/python tests/benchmarks/redrive.py --messages 100000 --rate 2000 --kills 10 --to repair

It makes a SQLite file with that many dead letters. A job redrives all of them at the rate, and is undone;
others are cancelled half-way; and one runs in a process that is killed again and again, while messages go on
to fail. With `--to`, that one sends copies to another topic.
"""

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import msgspec

from postroom.adapters.compose import Postroom, open_mailbox
from postroom.adapters.compose.store import open_store
from postroom.application.background import background_task
from postroom.application.messages import NewMessage
from postroom.application.redrive_results import RedriveReport
from postroom.domain.message import REPLACED, MessageDeadLettered, MessageRedriven, MessageSent
from postroom.domain.policy import TopicPolicy
from postroom.domain.redrive.events import RedriveCancelled
from postroom.domain.redrive.spec import RedriveSpec

MAILBOX = "main@local"
POLICY = TopicPolicy(max_attempts=1, shard_capacity=2_000_000, dead_capacity=2_000_000)
BATCH = 1_000


async def fill(store: str, messages: int) -> None:
    """Make dead letters."""
    async with open_mailbox(store, MAILBOX, default_policy=POLICY) as mailbox:
        for start in range(0, messages, BATCH):
            count = min(BATCH, messages - start)
            await mailbox.send_batch([NewMessage(topic="orders", payload=b"x" * 200) for _ in range(count)])
            while received := await mailbox.receive_messages("orders", max_messages=256, max_bytes=1 << 20):
                await mailbox.nack_messages([each.receipt for each in received], reason="code 500")


async def wait(mailbox: Postroom, job: RedriveReport, moved: int | None = None) -> RedriveReport:
    """Return a job when it has ended, or has changed some messages."""
    while job.is_active and (moved is None or job.moved < moved):
        await asyncio.sleep(0.005)
        job = await mailbox.get_redrive(job.job_id)
    return job


async def measure(store: str, messages: int, rate: int) -> None:
    """Print how a rate was held, and how long a cancellation took."""
    async with open_mailbox(store, MAILBOX, default_policy=POLICY) as mailbox:
        began = time.perf_counter()
        job = await mailbox.start_redrive(RedriveSpec(topics=("orders",), rate=rate))
        print(f"start with a selection of {job.matched:,}: {time.perf_counter() - began:.2f} s")
        job = await wait(mailbox, job)
        redrives = [e.at for _, e in mailbox.engine.log.replay() if isinstance(e, MessageRedriven)]
        actual = job.moved / ((redrives[-1] - redrives[0]) / 1_000_000)
        print(f"{job.moved:,} redriven at {actual:,.0f}/s instead of {rate:,}/s: {actual / rate - 1:+.1%}")
        began = time.perf_counter()
        job = await wait(mailbox, await mailbox.change_redrive(job.job_id, "undo"))
        print(f"{job.restored:,} of them undone in {time.perf_counter() - began:.1f} s")
        for spec in (RedriveSpec(rate=rate), RedriveSpec()):
            job = await wait(mailbox, await mailbox.start_redrive(spec), messages // 10)
            began = time.perf_counter()
            job = await mailbox.change_redrive(job.job_id, "cancel")
            print(f"rate {spec.rate}: cancelled in {time.perf_counter() - began:.3f} s after {job.moved:,}")
            await asyncio.sleep(0.5)
            job = await wait(mailbox, await mailbox.change_redrive(job.job_id, "undo"))
    events = list(open_store(store).event_log(MAILBOX).replay())
    late = 0
    is_cancelled = False
    for _, event in events:
        is_cancelled = isinstance(event, RedriveCancelled) or (
            is_cancelled and not type(event).__name__.startswith("RedriveUndo")
        )
        late += is_cancelled and isinstance(event, MessageRedriven)
    print(f"redriven after a cancellation: {late}")


async def own(store: str, job_id: str) -> None:
    """Own the mailbox until the job has ended."""
    async with (
        open_mailbox(store, MAILBOX, default_policy=POLICY, wait_ms=60_000) as mailbox,
        background_task(fail(mailbox)),
    ):
        await wait(mailbox, await mailbox.get_redrive(job_id))


async def fail(mailbox: Postroom) -> None:
    """Send messages that become dead letters, until cancelled."""
    await mailbox.set_topic_policy("orders", msgspec.structs.replace(POLICY, priorities=True))
    while True:
        await mailbox.send_message(NewMessage(topic="orders", payload=b"late", priority=10))
        for received in await mailbox.receive_messages("orders", max_messages=1):
            if received.payload == b"late":
                await received.nack(reason="late")
        await asyncio.sleep(0.02)


async def start(store: str, rate: int, to: str | None) -> tuple[RedriveReport, int]:
    """Start a job, and return it with the end of the log before it."""
    async with open_mailbox(store, MAILBOX, default_policy=POLICY) as mailbox:
        position = mailbox.engine.mailbox.position
        spec = RedriveSpec(topics=("orders",), rate=rate, destination=to)
        return await mailbox.start_redrive(spec), position


def kill(store: str, rate: int, kills: int, to: str | None) -> None:
    """Kill the process that works on a job, and print how often each message was redriven."""
    job, position = asyncio.run(start(store, rate, to))
    command = [sys.executable, __file__, "--own", job.job_id, "--store", store]
    for _ in range(kills):
        process = subprocess.Popen(command)
        time.sleep(random.uniform(1.0, 3.0))
        process.kill()
        process.wait()
    subprocess.run(command, check=True)
    log = open_store(store).event_log(MAILBOX)
    events = [event for _, event in log.replay(position)]
    late = {event.stream for event in events if isinstance(event, MessageSent) and event.topic == "orders"}
    times = Counter(
        event.stream
        for event in events
        if isinstance(event, MessageRedriven)
        or (isinstance(event, MessageDeadLettered) and event.reason == REPLACED)
    )
    copies = sum(isinstance(event, MessageSent) and event.topic == to for event in events)
    print(
        f"{kills} kills: {job.matched:,} selected; messages by number of redrives: "
        f"{dict(Counter(times.values()))}; copies: {copies:,}; {len(late):,} failed meanwhile, of which "
        f"{len(late & times.keys()):,} were redriven"
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--rate", type=int, default=2_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--to", help="topic to which the job that is killed sends copies")
    parser.add_argument("--own", help="used by itself: own the mailbox until this job has ended")
    parser.add_argument("--store")
    options = parser.parse_args()
    if options.own:
        asyncio.run(own(options.store, options.own))
        return
    with tempfile.TemporaryDirectory() as folder:
        store = options.store or str(Path(folder) / "redrive.db")
        asyncio.run(fill(store, options.messages))
        asyncio.run(measure(store, options.messages, options.rate))
        kill(store, options.rate, options.kills, options.to)


if __name__ == "__main__":
    main()
