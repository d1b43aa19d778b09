"""The programs of docs/clients.md print what the page says."""

import ast
import re
import subprocess
import sys
from inspect import CO_COROUTINE
from pathlib import Path
from typing import Any

import pytest

from postroom import NewMessage, connect
from tests.support.servers.http import PostroomServer

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
PROGRAM = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLE = re.compile(
    r"^```python\n((?:(?!```).*\n)*)```\n(?:(?!```).*\n)*?\n```text\n((?:(?!```).*\n)*)```", re.MULTILINE
)


def test_the_programs_of_the_page_print_what_it_says(tmp_path: Path) -> None:
    examples = EXAMPLE.findall(PAGE.read_text("utf-8"))
    assert len(examples) == 5
    with PostroomServer(tmp_path / "server") as server:
        for program, output in examples:
            here = program.replace("http://127.0.0.1:8080", server.address)
            done = subprocess.run(
                [sys.executable, "-c", here], cwd=tmp_path, capture_output=True, text=True, timeout=120
            )
            assert (done.stdout, done.stderr) == (output, "")


async def test_the_statements_of_the_page_work_on_an_open_mailbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    codes = [
        compile(program, "docs/clients.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for program in PROGRAM.findall(PAGE.read_text("utf-8"))
    ]
    redrive, settings = (code for code in codes if code.co_flags & CO_COROUTINE)
    async with connect("orders.db") as mailbox:
        await mailbox.send_message(NewMessage("orders.paid", b"1"))
        for message in await mailbox.receive_messages("orders.paid"):
            await message.reject("no stock")
        names: dict[str, Any] = {"mailbox": mailbox}
        await eval(redrive, names)
        assert names["unpaid"].action == "cancel"
        await eval(settings, names)
        assert (await mailbox.get_topic_policy("payments.eu")).max_attempts == 9
