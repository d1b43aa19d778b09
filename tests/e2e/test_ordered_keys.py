"""The page on order, fairness and limits; messages of an ordered key in however many processes."""

import signal

import pytest

from tests.e2e.conftest import ROOT, SCRIPT, TIMEOUT_SECONDS, Postroom
from tests.support.console import Session, read_files, read_steps
from tests.support.fork_server import popen
from tests.support.waiting import wait_until

PAGE = (ROOT / "docs" / "order.md").read_text("utf-8")
KEYS, MESSAGES = 6, 5
HANDLERS = """
import os
from postroom import ReceivedMessage, Worker

worker = Worker()

@worker.consumer("steps", concurrency=8)
def handle(message: ReceivedMessage) -> None:
    with open("handled", "a") as file:
        file.write(f"{message.payload.decode()} {os.getpid()}\\n")
    if message.payload.endswith(b"-2") and message.attempt == 1:
        raise ValueError("it fails once")
"""


@pytest.mark.parametrize("processes", [1, 4, pytest.param(8, marks=pytest.mark.extended)])
def test_a_message_that_fails_once_is_handled_again_before_later_ones_of_its_key(
    postroom: Postroom, processes: int
) -> None:
    postroom.ok("topic", "policy", "steps", "ordered_keys=true")
    for number in range(1, MESSAGES + 1):
        for key in range(KEYS):
            postroom.ok("send", "steps", f"{key}-{number}", "--key", f"key {key}")
    (postroom.folder / "handlers.py").write_text(HANDLERS)
    handled = postroom.folder / "handled"
    handled.touch()
    workers = [postroom.start("work", "handlers:worker") for _ in range(processes)]
    try:
        wait_until(lambda: len(handled.read_text().splitlines()) >= KEYS * (MESSAGES + 1))
    finally:
        for each in workers:
            each.send_signal(signal.SIGTERM)
            each.communicate(timeout=TIMEOUT_SECONDS)
    lines = [line.split()[0] for line in handled.read_text().splitlines()]
    for key in range(KEYS):
        own = [line.partition("-")[2] for line in lines if line.startswith(f"{key}-")]
        assert own == ["1", "2", "2", "3", "4", "5"]


def test_the_page_shows_what_happens(postroom: Postroom) -> None:
    for name, content in read_files(PAGE).items():
        (postroom.folder / name).write_text(content)
    session = Session(postroom.shell)
    steps = list(read_steps(PAGE))
    for step in steps:
        session(step)
    assert len(steps) >= 30


@pytest.mark.parametrize("processes", [4, pytest.param(8, marks=pytest.mark.extended)])
def test_the_worker_of_the_page_keeps_the_order_in_several_processes(
    postroom: Postroom, processes: int
) -> None:
    (postroom.folder / "steps.py").write_text(read_files(PAGE)["steps.py"])
    postroom.ok("topic", "policy", "steps", "ordered_keys=true")
    handled = postroom.folder / "handled"
    with handled.open("ab") as file:
        workers = [
            popen([SCRIPT, "work", "steps:worker"], postroom.folder, postroom.environment, stdout=file)
            for _ in range(processes)
        ]
    try:
        for payload in "12345":
            postroom.ok("send", "steps", payload, "--key", "a")
        wait_until(lambda: handled.read_text().endswith("5\n"))
    finally:
        for each in workers:
            each.send_signal(signal.SIGTERM)
            each.communicate(timeout=TIMEOUT_SECONDS)
    lines = handled.read_text().splitlines()
    assert [each for each in lines if "handled" not in each] == ["1", "2", "2", "3", "4", "5"]


def test_a_topic_that_delivers_nothing_says_which_limit_or_key_its_messages_wait_for(
    postroom: Postroom,
) -> None:
    postroom.ok("topic", "policy", "calls", "max_in_flight=1")
    postroom.ok("topic", "policy", "steps", "ordered_keys=true")
    for topic in ("calls", "steps"):
        for payload in ("1", "2"):
            postroom.ok("send", topic, payload, "--key", "k")
        postroom.ok("recv", topic, "--max", "1")
    assert "Topic calls is at a limit of its policy" in postroom("recv", "calls").err
    assert "messages of topic steps wait for others of their keys" in postroom("recv", "steps").err
