"""What processes cost that have nothing to do, and how soon a waiting one gets what another sends.

The processes are real ones, started together and left alone until their timers are at their longest. `cpu` is
the share of a core that all threads of a process used, and `wakeups` how often a second one of them went on
after it had waited for something.
"""

import asyncio
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from postroom.adapters.compose.connect import connect
from postroom.adapters.compose.maintenance import migrate_store
from postroom.adapters.compose.projections import rebuild_projections
from postroom.application.messages import NewMessage
from tests.benchmarks.figures import Figures
from tests.benchmarks.load.owners import owned, served
from tests.benchmarks.load.worker import TOPIC
from tests.benchmarks.servers import postgres_server
from tests.support.servers.postroom import PostroomProcess
from tests.support.servers.process import ServerProcess

CPU_GOAL, WAKEUPS_GOAL = 0.2, 2.0
WAKE_GOAL_MS = 1.5
SETTLE_SECONDS, SECONDS = 30.0, 60.0
MAILBOX = "main@proxy-1"
WORKER = "tests.benchmarks.load.worker:worker"


class Use(NamedTuple):
    """What a process used since it began: CPU (ns), and how often each thread waited, by its name."""

    cpu: int
    waits: Mapping[tuple[int, str], int]


def use(pid: int) -> Use:
    """Return what a running process used, without that of its threads that have ended."""
    cpu, waits = 0, {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        cpu += int((thread / "schedstat").read_text().split()[0])
        status = dict(line.split(":\t", 1) for line in (thread / "status").read_text().splitlines())
        waits[int(thread.name), status["Name"]] = int(status["voluntary_ctxt_switches"])
    return Use(cpu, waits)


@contextmanager
def _program(folder: Path, name: str, *arguments: str, ready: str = "") -> Iterator[int]:
    """Run `postroom` until the context ends; yields the id of its process.

    Arguments:
        ready: what it logs when it is ready.
    """
    log = folder / f"{name}.log"
    log.write_bytes(b"")
    program = Path(sys.executable).with_name("postroom")
    process = ServerProcess(name, [program, *arguments], log)
    process.start(lambda: ready in log.read_text())
    try:
        yield process.pid
    finally:
        process.stop()


@contextmanager
def _processes(folder: Path, database: str) -> Iterator[dict[str, int]]:
    """Run all processes; yields their ids by name."""
    pids: dict[str, int] = {}
    with ExitStack() as opened:

        def run(name: str, *arguments: str, ready: str = "") -> None:
            pids[name] = opened.enter_context(_program(folder, name, *arguments, ready=ready))

        for kind in ("sqlite", "postgres"):
            store = str(folder / "owner.db") if kind == "sqlite" else database
            if kind == "postgres":
                migrate_store(store)
            pids[f"owner.{kind}"] = opened.enter_context(owned(store, folder)).pid
            rebuild_projections(store, lambda _: None)
            run(f"follower.{kind}", "views", "follow", "--store", store, ready="Following")
            run(f"worker.{kind}", "work", WORKER, "--store", store, ready="Handling")
        alone = str(folder / "worker.db")
        run("worker.owner", "work", WORKER, "--store", alone, ready="Handling")
        for kind in ("http", "grpc"):
            (folder / kind).mkdir()
            pids[f"serve.{kind}"] = opened.enter_context(
                served(str(folder / f"{kind}.db"), folder / kind, kind)
            ).pid
        run("console", "console", "--store", str(folder / "owner.db"), ready="The console of")
        cluster = folder / "cluster"
        admin = opened.enter_context(
            PostroomProcess(
                cluster / "admin",
                ["admin", "--standalone", "--store", str(folder / "admin.db"), "--listen", "127.0.0.1:0"],
            )
        )
        at = ["--admin", admin.address, "--proxy-id", "proxy-1", "--listen", "127.0.0.1:0"]
        proxy = opened.enter_context(PostroomProcess(cluster / "proxy", ["proxy", *at]))
        mailboxes = ["--mailbox", MAILBOX, "--store", str(folder / "runner.db"), "--dev"]
        runner = opened.enter_context(
            PostroomProcess(cluster / "runner", ["runner", *at, "--runner-id", "runner-1", *mailboxes])
        )
        pids |= {"admin": admin.process.pid, "proxy": proxy.process.pid, "runner": runner.process.pid}
        yield pids


def _measure(figures: Figures, folder: Path, _messages: int) -> None:
    folder = folder / "idle"
    folder.mkdir()
    with postgres_server(folder) as postgres, _processes(folder, postgres.create_database()) as pids:
        time.sleep(SETTLE_SECONDS)
        before = {name: use(pid) for name, pid in pids.items()}
        began = time.monotonic()
        time.sleep(SECONDS)
        after = {name: use(pid) for name, pid in pids.items()}
        seconds = time.monotonic() - began
        for name, used in after.items():
            waits = {
                thread: (count - before[name].waits.get(thread, 0)) / seconds
                for thread, count in used.waits.items()
            }
            busiest = sorted(waits.items(), key=lambda each: -each[1])
            figures.progress(
                f"{name}: " + ", ".join(f"{n} {count:.1f}/s" for (_, n), count in busiest if count >= 0.05)
            )
            share = (used.cpu - before[name].cpu) / (seconds * 1e9)
            figures.add(f"idle.{name}.cpu", 100 * share, "%", CPU_GOAL)
            figures.add(f"idle.{name}.wakeups", sum(waits.values()), "per s", WAKEUPS_GOAL)


WAKES, WARM_UP, PAUSE_SECONDS = 220, 20, 0.02


def wakes_ms(address: str, count: int = WAKES) -> list[float]:
    """Return the times from sends to their receipt by another process that waits, ms, in ascending order.

    Arguments:
        address: a store that a third process owns, or the URL of its server.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=_receive, args=(address, count, theirs), daemon=True)
    receiver.start()
    try:
        asyncio.run(_send(address, count, ours))
        times: list[float] = ours.recv()
    finally:
        receiver.kill()
        receiver.join()
    return sorted(times[WARM_UP:])


async def _send(address: str, count: int, pipe: Any) -> None:
    async with connect(address) as mailbox:
        assert await asyncio.to_thread(pipe.recv)  # the receiver is there
        for _ in range(count):
            await asyncio.sleep(PAUSE_SECONDS)
            await mailbox.send_message(NewMessage(topic=TOPIC, payload=str(time.monotonic_ns()).encode()))


def _receive(address: str, count: int, pipe: Any) -> None:
    async def main() -> list[float]:
        async with connect(address) as mailbox:
            pipe.send(True)
            times: list[float] = []
            while len(times) < count:
                received = await mailbox.receive_messages(TOPIC, wait_ms=10_000)
                now = time.monotonic_ns()
                times += [(now - int(each.payload)) / 1e6 for each in received]
                await mailbox.ack_messages([each.receipt for each in received])
            return times

    pipe.send(asyncio.run(main()))


def _measure_wakes(figures: Figures, folder: Path, _messages: int) -> None:
    for kind in ("local", "http", "grpc"):
        if not figures.wants(f"wake.{kind}"):
            continue
        place = folder / f"wake-{kind}"
        place.mkdir()
        store = str(place / "store.db")
        with owned(store, place) if kind == "local" else served(store, place, kind) as owner:
            times = wakes_ms(owner.own_address)
        figures.add(f"wake.{kind}.p50", median(times), "ms", WAKE_GOAL_MS if kind == "local" else None)
        figures.add(f"wake.{kind}.p99", quantiles(times, n=100)[98], "ms")


MEASUREMENTS: dict[str, Callable[[Figures, Path, int], None]] = {"idle.": _measure, "wake.": _measure_wakes}
