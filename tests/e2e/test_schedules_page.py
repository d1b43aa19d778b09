"""The page on schedules; schedules of workers in several processes."""

import re
import signal
from collections import Counter
from itertools import pairwise

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
    with read_mailbox(str(postroom.store)) as reader:
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
    assert ticks() <= {*sent}
