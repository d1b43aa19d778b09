"""The page on schedules; schedules of workers in several processes."""

import json
import random
import re
import signal
import time
from collections import Counter
from itertools import pairwise

import pytest

from postroom import read_mailbox
from postroom.domain.envelope.build import open_envelope
from postroom.domain.message import MessageSent
from postroom.domain.schedule import ScheduleRan
from tests.e2e.conftest import ROOT, TIMEOUT_SECONDS, Postroom
from tests.support.console import Session, read_steps
from tests.support.waiting import wait_until

FILES = re.compile(r"^```python\n# (\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
HANDLERS = """
import os

from postroom import ReceivedMessage, Worker, every

worker = Worker("shop")


@worker.schedule(every("1s"), missed="all", visibility="1s")
def tick(message: ReceivedMessage) -> None:
    with open("handled", "a") as file:
        file.write(f"{message.attrs['scheduled_at']} {os.getpid()}\\n")
"""


def test_the_page_shows_what_happens(postroom: Postroom) -> None:
    text = (ROOT / "docs" / "schedules.md").read_text("utf-8")
    for name, content in FILES.findall(text):
        (postroom.folder / name).write_text(content)
    session = Session(postroom.shell)
    steps = list(read_steps(text))
    for step in steps:
        session(step)
    assert len(steps) >= 12


def test_each_tick_is_sent_once_although_the_owner_is_killed(postroom: Postroom) -> None:
    (postroom.folder / "handlers.py").write_text(HANDLERS)
    handled = postroom.folder / "handled"
    handled.touch()

    def ticks() -> set[str]:
        return {line.split()[0] for line in handled.read_text().splitlines()}

    owner = postroom.start("work", "handlers:worker")  # the process that began first owns the mailbox
    wait_until(lambda: bool(ticks()))
    other = postroom.start("work", "handlers:worker")
    try:
        assert other.stderr is not None
        assert b"Handling messages" in other.stderr.readline()
        owner.kill()
        count = len(ticks())
        wait_until(lambda: len(ticks()) >= count + 3)
    finally:
        for each in (owner, other):
            each.send_signal(signal.SIGTERM)
            each.communicate(timeout=TIMEOUT_SECONDS)
    assert ticks() <= {*check_ticks(str(postroom.store))}


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_each_tick_is_sent_once_although_processes_that_take_over_are_killed_again_and_again(
    postroom: Postroom, kind: str, request: pytest.FixtureRequest
) -> None:
    store = str(postroom.store) if kind == "sqlite" else request.getfixturevalue("postgres_store")
    postroom.environment["POSTROOM_STORE"] = store
    chance = random.Random(1)
    command = ("up", "--http", "127.0.0.1:0")
    processes = [postroom.start(*command) for _ in range(3)]
    try:
        postroom.ok("schedule", "set", "jobs", "jobs", "--every", "1s", "--missed", "all")
        for _ in range(20):
            time.sleep(chance.uniform(0.2, 1.5))  # so that kills come before, at and after a tick
            number = chance.randrange(3)
            processes[number].kill()
            processes[number].communicate(timeout=TIMEOUT_SECONDS)
            processes[number] = postroom.start(*command)

        def runs() -> int:
            count: int = json.loads(postroom.ok("--json", "schedule", "show", "jobs").out)["runs"]
            return count

        before = runs()
        wait_until(lambda: runs() >= before + 2)
    finally:
        for each in processes:
            each.send_signal(signal.SIGTERM)
            each.communicate(timeout=TIMEOUT_SECONDS)
    assert len(check_ticks(store)) >= before


def check_ticks(store: str) -> list[str]:
    """Return the ticks that were sent, after a check that none is missing, early, or was sent twice."""
    with read_mailbox(store) as reader:
        events = [each.event for each in reader.log.read()]
    sent = [
        open_envelope(each.envelope).extensions["scheduled_at"].decode()
        for each in events
        if isinstance(each, MessageSent)
    ]
    ran = [each for each in events if isinstance(each, ScheduleRan)]
    assert len(ran) == len(sent)
    assert Counter(sent).most_common(1)[0][1] == 1
    assert all(each.tick <= each.at for each in ran)
    steps = {later.tick - earlier.tick for earlier, later in pairwise(ran)}
    assert steps == {1_000_000}, "a tick is missing"
    return sent
