"""The page on subscriptions; workers of subscriptions in several processes."""

import signal
import subprocess

from tests.e2e.conftest import ROOT, TIMEOUT_SECONDS, Postroom
from tests.support.console import Session, read_files, read_steps
from tests.support.waiting import wait_until

COUNT = 300
HANDLERS = """
import os, time
from postroom import Worker

def handle(data: bytes) -> None:
    time.sleep(0.01)  # so that several processes get messages
    with open(NAME, "a") as file:
        file.write(f"{data.decode()} {os.getpid()}\\n")

worker = Worker(NAME)
worker.consumer("orders.*", subscription=NAME, visibility="1s")(handle)
"""


def test_the_page_shows_what_happens(postroom: Postroom) -> None:
    text = (ROOT / "docs" / "subscriptions.md").read_text("utf-8")
    for name, content in read_files(text).items():
        (postroom.folder / name).write_text(content)
    session = Session(postroom.shell)
    steps = list(read_steps(text))
    for step in steps:
        session(step)
    assert len(steps) >= 15


def test_workers_of_two_subscriptions_both_get_everything_although_one_is_killed(
    postroom: Postroom,
) -> None:
    for name in ("mail", "audit"):
        (postroom.folder / f"{name}_handlers.py").write_text(f"NAME = {name!r}\n{HANDLERS}")
        (postroom.folder / name).touch()
        postroom.ok("work", f"{name}_handlers:worker", "--once")
    workers = [
        postroom.start("work", f"{name}_handlers:worker") for name in ("mail", "mail", "audit", "audit")
    ]
    try:
        for each in workers:
            assert each.stderr is not None
            assert b"Handling messages" in each.stderr.readline()
        postroom.ok("import", "-", "--topic", "orders.placed", "--deliver", stdin=lines(COUNT))
        wait_until(lambda: processes(postroom, "mail") == {each.pid for each in workers[:2]})
        workers[0].kill()
        wait_until(lambda: all(handled(postroom, name) == set(range(COUNT)) for name in ("mail", "audit")))
    finally:
        for each in workers:
            stop(each)


def lines(count: int) -> bytes:
    return "".join(f"{number}\n" for number in range(count)).encode()


def handled(postroom: Postroom, name: str) -> set[int]:
    return {int(line.split()[0]) for line in (postroom.folder / name).read_text().splitlines()}


def processes(postroom: Postroom, name: str) -> set[int]:
    return {int(line.split()[1]) for line in (postroom.folder / name).read_text().splitlines()}


def stop(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT_SECONDS)
