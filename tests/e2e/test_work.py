"""`postroom work` and `postroom schedule` as processes."""

import json
import os
import signal
import subprocess
import time

from tests.e2e.conftest import SCRIPT, TIMEOUT_SECONDS, Postroom
from tests.support.waiting import wait_until

WAIT_SECONDS = 60

TASKS = """
import asyncio, pathlib
from postroom import Worker

worker = Worker("shop")

@worker.consumer("orders.*")
def place(order: dict) -> None:
    with open("handled", "a") as file:
        file.write(order["id"] + "\\n")
    if order["id"] == "bad":
        raise ValueError("no total")

@worker.consumer("slow")
async def slow(data: bytes) -> None:
    pathlib.Path("started").touch()
    await asyncio.sleep(float(data))
    pathlib.Path("finished").touch()

@worker.consumer("stubborn")
async def ignore_cancellation(data: bytes) -> None:
    pathlib.Path("started").touch()
    while True:
        try:
            await asyncio.sleep(60)
        except:
            pass
"""

SHARED_TASKS = """
import asyncio, os
from postroom import Worker

worker = Worker()

@worker.consumer("jobs", visibility="1s")
async def handle(data: bytes) -> None:
    await asyncio.sleep(0.01)
    with open("handled", "a") as file:
        file.write(f"{os.getpid()} {data.decode()}\\n")
"""


LOGGING_TASKS = """
import logging
import structlog
from postroom import Worker

worker = Worker()
log = structlog.get_logger()

@worker.consumer("orders")
def place(order: dict) -> None:
    logging.getLogger(__name__).info("placed", extra={"total": 3})
    log.debug("a detail")
    logging.getLogger("other.library").info("never seen")
    raise ValueError("no stock of " + order["item"])
"""


def test_work_logs_the_lines_of_handlers_with_their_message_and_the_traceback_of_a_failure(
    postroom: Postroom,
) -> None:
    (postroom.folder / "tasks.py").write_text(LOGGING_TASKS)
    id_ = postroom.ok("send", "orders", '{"item": "chairs"}', "--correlation-id", "c-1").out.strip()
    done = postroom.ok("work", "tasks:worker", "--once", "--log-level", "warning,tasks=debug")
    placed, detail, failed = map(json.loads, done.err.splitlines())
    for line in (placed, detail, failed):
        facts = ("message_id", "topic", "attempt", "corr_id")
        assert [line[name] for name in facts] == [id_, "orders", 1, "c-1"]
    assert (placed["event"], placed["level"], placed["logger"]) == ("placed", "info", "tasks")
    assert placed["total"] == 3
    assert (detail["event"], detail["level"]) == ("a detail", "debug")
    assert failed["event"] == "worker.handler_failed"
    assert "tasks.py" in failed["exception"]
    assert failed["exception"].endswith("ValueError: no stock of [redacted]")
    assert "site-packages" not in failed["exception"]


def test_work_handles_the_messages_that_are_ready(postroom: Postroom) -> None:
    (postroom.folder / "tasks.py").write_text(TASKS)
    # The default backoff may end before a busy machine has handled the other messages.
    (postroom.folder / "postroom.toml").write_text(
        '[topics."orders.placed"]\nbackoff_base = "1h"\nbackoff_max = "2h"\n'
    )
    for id_ in ("a", "bad", "b"):
        postroom.ok("send", "orders.placed", f'{{"id": "{id_}"}}')
    assert postroom.ok("work", "tasks:worker", "--once").out == "2 handled, 1 failed\n"
    assert sorted((postroom.folder / "handled").read_text().split()) == ["a", "b", "bad"]
    assert postroom.ok("work", "tasks:worker", "--once", "--json").json["handled"] == 0


def test_work_on_sigterm_lets_handlers_finish_and_reports_its_counts(postroom: Postroom) -> None:
    (postroom.folder / "tasks.py").write_text(TASKS)
    postroom.ok("send", "slow", "0.5")
    process = subprocess.Popen(
        [SCRIPT, "work", "tasks:worker", "--json"],
        cwd=postroom.folder,
        env=postroom.environment,
        stdout=subprocess.PIPE,
    )
    wait_until((postroom.folder / "started").exists, WAIT_SECONDS)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    assert (process.returncode, out) == (0, b'{"handled":1,"failed":0}\n')
    assert (postroom.folder / "finished").exists()


def test_work_ends_although_a_handler_ignores_its_cancellation(postroom: Postroom) -> None:
    (postroom.folder / "tasks.py").write_text(TASKS)
    postroom.ok("send", "stubborn", "1")
    process = subprocess.Popen(
        [SCRIPT, "work", "tasks:worker", "--stop-within", "1ms"],
        cwd=postroom.folder,
        env=postroom.environment,
        stdout=subprocess.PIPE,
    )
    wait_until((postroom.folder / "started").exists, WAIT_SECONDS)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    assert (process.returncode, out) == (0, b"0 handled, 0 failed\n")
    assert postroom.ok("recv", "stubborn").out.endswith("\n1\n")


def test_two_processes_share_the_work_and_one_that_is_killed_loses_no_message(postroom: Postroom) -> None:
    (postroom.folder / "tasks.py").write_text(SHARED_TASKS)
    (postroom.folder / "jobs").write_text("\n".join(map(str, range(300))))
    owner = postroom.start("work", "tasks:worker")
    try:
        postroom.wait_for_owner(owner)
        other = postroom.start("work", "tasks:worker")
        try:
            assert other.stderr is not None
            assert b"Handling messages" in other.stderr.readline()
            postroom.ok("import", "jobs", "--topic", "jobs", "--deliver", "--mailbox", "main@local")
            wait_until(
                lambda: {pid for pid, _ in handled(postroom)} == {str(owner.pid), str(other.pid)},
                WAIT_SECONDS,
            )
            owner.kill()
            wait_until(
                lambda: {job for _, job in handled(postroom)} == set(map(str, range(300))), WAIT_SECONDS
            )
            wait_until(lambda: unsettled(postroom) == 0, WAIT_SECONDS)
        finally:
            other.send_signal(signal.SIGTERM)
            _, said = other.communicate(timeout=TIMEOUT_SECONDS)
        assert other.returncode == 0, said
    finally:
        owner.kill()
        owner.communicate()


def test_a_schedule_and_a_worker_share_the_mailbox(postroom: Postroom) -> None:
    (postroom.folder / "tasks.py").write_text(SHARED_TASKS)
    (postroom.folder / "postroom.toml").write_text(
        '[schedules.tick]\ncron = "* * * * * *"\ntopic = "jobs"\npayload = "7"\n'
    )
    worker = postroom.start("work", "tasks:worker")
    try:
        postroom.wait_for_owner(worker)
        schedule = postroom.start("schedule", "--json")
        try:
            wait_until(lambda: handled(postroom) == {(str(worker.pid), "7")}, WAIT_SECONDS)
        finally:
            schedule.send_signal(signal.SIGTERM)
            out, said = schedule.communicate(timeout=TIMEOUT_SECONDS)
        assert (schedule.returncode, b'{"sent":' in out) == (0, True), said
    finally:
        worker.kill()
        worker.communicate()


def test_a_worker_that_can_not_be_imported_is_reported_in_a_sentence(postroom: Postroom) -> None:
    (postroom.folder / "tasks.py").write_text(TASKS)
    (postroom.folder / "broken.py").write_text("1 / 0")
    for app, reason in (
        ("tasks", "write MODULE:NAME"),
        ("missing:worker", "ModuleNotFoundError: No module named 'missing'"),
        ("broken:worker", "ZeroDivisionError: division by zero"),
        ("tasks:nobody", "has no attribute 'nobody'"),
        ("tasks:place", "is of type function, not Worker"),
    ):
        done = postroom("work", app, "--json")
        assert done.code == 2
        assert reason in done.error["message"]
    assert not postroom.store.exists()


def test_schedule_sends_each_tick(postroom: Postroom) -> None:
    (postroom.folder / "postroom.toml").write_text(
        '[schedules.tick]\ncron = "* * * * * *"\ntopic = "jobs"\npayload = "{}"\n'
    )
    process = subprocess.Popen(
        [SCRIPT, "schedule", "--json"], cwd=postroom.folder, env=postroom.environment, stdout=subprocess.PIPE
    )
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not postroom.store.exists() or not postroom("peek", "jobs", "--json").out.strip():
        assert time.monotonic() < deadline
    os.kill(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0
    assert b'{"sent":' in out
    assert "tick@20" in postroom.ok("peek", "jobs", "--json").out


def test_a_schedule_that_is_wrong_is_named(postroom: Postroom) -> None:
    settings = postroom.folder / "postroom.toml"
    assert "No schedules are configured" in postroom("schedule", "--json").error["message"]
    settings.write_text('[schedules.tick]\ncron = "often"\ntopic = "jobs"\n')
    assert (
        "Schedule tick: 'often' is not a cron expression" in postroom("schedule", "--json").error["message"]
    )
    settings.write_text('[schedules.tick]\ncron = "* * * * *"\ntpoic = "jobs"\n')
    assert (
        "[schedules.tick] in postroom.toml: Object contains unknown field `tpoic`."
        in postroom("schedule", "--json").error["message"]
    )


def handled(postroom: Postroom) -> set[tuple[str, ...]]:
    """Return the process and the payload of each message that was handled."""
    file = postroom.folder / "handled"
    return {tuple(line.split()) for line in file.read_text().splitlines()} if file.exists() else set()


def unsettled(postroom: Postroom) -> int:
    (mailbox,) = postroom.ok("backlog", "--json").json["mailboxes"]
    return sum(shard["ready"] + shard["in_flight"] + shard["delayed"] for shard in mailbox["shards"])


BLOCKING_TASKS = """
import os, time
from postroom import Worker

worker = Worker()

@worker.consumer("holds")
async def hold(data: bytes) -> None:
    with open("handled", "a") as file:
        file.write("holds\\n")
    while not os.path.exists("release"):
        time.sleep(0.01)
"""

QUICK_TASKS = """
from postroom import Worker

worker = Worker()

@worker.consumer("orders")
async def place(data: bytes) -> None:
    with open("handled", "a") as file:
        file.write("orders\\n")
"""


def test_a_handler_that_blocks_its_loop_is_named_and_runs_once_while_others_work(postroom: Postroom) -> None:
    (postroom.folder / "blocking.py").write_text(BLOCKING_TASKS)
    (postroom.folder / "quick.py").write_text(QUICK_TASKS)
    held = postroom.ok("send", "holds", "x", "--json").json["message_id"]
    blocked = postroom.start("work", "blocking:worker")
    try:
        assert blocked.stderr is not None
        lines = iter(blocked.stderr.readline, b"")
        line = next(each.decode() for each in lines if b"worker.loop_blocked" in each)
        for named in ('"handler": "hold"', '"topic": "holds"', held, "blocking.py:1"):
            assert named in line
        quick = postroom.start("work", "quick:worker")
        try:
            postroom.ok("send", "orders", "x")
            wait_until(
                lambda: (postroom.folder / "handled").read_text().split() == ["holds", "orders"], WAIT_SECONDS
            )
            (mailbox,) = postroom.ok("backlog", "--json").json["mailboxes"]
            assert mailbox["epoch"] == 2  # the first was that of the first send
            (postroom.folder / "release").touch()
            wait_until(lambda: unsettled(postroom) == 0, WAIT_SECONDS)
        finally:
            quick.kill()
            quick.communicate()
    finally:
        blocked.kill()
        blocked.communicate()
    assert (postroom.folder / "handled").read_text().split() == ["holds", "orders"]
