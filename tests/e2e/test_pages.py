"""Pages whose programs and commands need no server do what they show."""

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from postroom import NewMessage, connect
from postroom.application.ports.subject_keys import MasterKey
from tests.e2e.conftest import ROOT, Postroom
from tests.support.console import Session, read_files, read_steps

FOLDERS = ("/var/lib/postroom-keys/", "/etc/postroom/", "/mnt/elsewhere/")
"""Where the pages keep files."""


def make_queues(folder: Path) -> None:
    """Make the topics that docs/operations.md lists."""
    with connect(str(folder / "postroom.db")) as mailbox:
        for topic, count in (("orders", 17), ("invoices", 1)):
            mailbox.send_batch([NewMessage(topic=topic, payload=b"%d" % n) for n in range(count)])
        later = NewMessage(topic="orders", payload=b"later", deliver_after_ms=3_600_000)
        mailbox.send_batch([later] * 3)
        mailbox.set_topic_policy("orders", {"max_attempts": 3})
        first, *_ = mailbox.receive_messages("orders", max_messages=5, visibility_ms=3_600_000)
        first.reject("no such customer")
        mailbox.pause_topic("orders")


def make_mailbox(folder: Path) -> None:
    """Make a mailbox that lacks the settings of docs/command-line.md."""
    with connect(str(folder / "orders.db")) as mailbox:
        mailbox.send_message(NewMessage(topic="payments.eu", payload=b"12.50"))


def make_report(folder: Path) -> None:
    """Handle a message, and copy the report of docs/reports.md to where the page has it."""
    examples = Path("docs", "examples", "reports")
    copytree(ROOT / examples, folder / examples)
    with connect(str(folder / "postroom.db")) as mailbox:
        mailbox.send_message(NewMessage(topic="orders", payload=b"hello"))
        for message in mailbox.receive_messages("orders"):
            message.ack()


@pytest.mark.parametrize(
    ("name", "arrange", "count"),
    [
        ("capabilities.md", None, 7),
        ("coming-from.md", None, 15),
        ("command-line.md", make_mailbox, 4),
        ("erasure.md", None, 4),
        ("installation.md", None, 2),
        ("operations.md", make_queues, 7),
        ("reports.md", make_report, 5),
    ],
)
def test_a_page_shows_what_happens(
    postroom: Postroom, name: str, arrange: Callable[[Path], None] | None, count: int
) -> None:
    page = (ROOT / "docs" / name).read_text("utf-8")
    for folder in FOLDERS:
        page = page.replace(folder, f"{postroom.folder}/")
    for file, content in read_files(page).items():
        (postroom.folder / file).write_text(content)
    if arrange is not None:
        arrange(postroom.folder)
    session = Session(postroom.shell)
    steps = list(read_steps(page))
    for step in steps:
        session(step)
    assert len(steps) == count


class KeyService:
    """A key management service, whose keys stay in it."""

    def encrypt(self, key_id: str, data: bytes, context: dict[str, str]) -> bytes:
        return repr((key_id, data, context)).encode()

    def decrypt(self, key_id: str, encrypted: bytes, context: dict[str, str]) -> bytes:
        name, data, bound = ast.literal_eval(encrypted.decode())
        assert (name, bound) == (key_id, context)
        return bytes(data)


def test_a_master_key_in_a_key_management_service_fits_its_port() -> None:
    page = (ROOT / "docs" / "erasure.md").read_text("utf-8")
    (program,) = re.findall(r"^```python\n(class .*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)
    key = names["KmsMasterKey"](KeyService(), "key 1")
    for name in ("wrap", "unwrap"):
        ours = [*inspect.signature(getattr(MasterKey, name)).parameters]
        assert [*inspect.signature(getattr(names["KmsMasterKey"], name)).parameters] == ours
    assert key.unwrap(key.wrap(b"data key", "pseudonym"), "pseudonym") == b"data key"


def test_the_page_for_those_who_come_from_others_has_their_words_and_code_and_ours() -> None:
    page = (ROOT / "docs" / "coming-from.md").read_text("utf-8")
    sections = page.split("\n## ")[1:]
    assert len(sections) == 6
    for section in sections:
        assert re.search(r"^\| .*\| Postroom \|$", section, re.MULTILINE)
        assert re.search(r"^```(python|sql)\n[^#]", section, re.MULTILINE)
        assert list(read_steps(section))
