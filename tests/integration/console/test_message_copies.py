"""The calls that a page offers to be copied do what they say, whatever ids, topics and payloads contain."""

import asyncio
import os
import re
import sys
from ast import literal_eval
from collections.abc import AsyncIterator
from html import unescape
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import msgspec
import pytest

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.compose.access import open_access, open_capabilities, open_key_ring
from postroom.application.messages import NewMessage
from tests.support.servers.console import Browser, served_console
from tests.support.stores import MAILBOX, message

SECONDS = 120.0
RTL = "\N{RIGHT-TO-LEFT OVERRIDE}"
IDS = ["a/b//c/", "100%41%2F", "\"'`$(id) !x\\", f"{RTL}-1", "..", "?x#y", "a\nb\x1b", "--help", "é" * 255]
MESSAGES = {
    "quotes": message(
        b'it\'s $HOME `id` \\ "x" !\n',
        topic="a'b\"$(id)",
        attrs={"na'me": f"va\\l{RTL}'ue\n", "tenant": "<b>"},
        content_type="text/plain; x='y'",
        correlation_id="-c '1'",
        priority=9,
        ttl_seconds=3_600,
    ),
    "option": message(b"-", topic=f"--help{RTL}", attrs={"-x": "--y"}),
    "binary": message(b"\0\xff'\n\n", topic="-n"),
}


COLLECTION = "import sys\nids = []\ndef print(detail): ids.append(detail.message_id)"
"""Makes code collect the ids of what it would print."""


class Site(NamedTuple):
    mailbox: OwnedMailbox
    browser: Browser
    variables: dict[str, str]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    """The console of a mailbox in a file whose calls need a token, and the variables of a shell there."""
    store = str(tmp_path / "store.db")
    with open_capabilities(store, open_key_ring(store)) as capabilities:
        capabilities.rotate()
        token = capabilities.issue("tester")
    async with (
        open_mailbox(store, MAILBOX, durability="relaxed") as mailbox,
        open_access(store) as access,
        served_console(mailbox, store=store, access=access) as browser,
    ):
        await browser.sign_in(token)
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        variables = {"POSTROOM_TOKEN": token, "PATH": programs, "LC_ALL": "C.UTF-8"}
        yield Site(mailbox, browser, variables)


async def copies_of(site: Site, id_: str) -> list[str]:
    """Return the calls of a message's page: three that read it, and three that send it again."""
    page = await site.browser.get(f"/messages?id={quote(id_, safe='')}")
    assert site.variables["POSTROOM_TOKEN"] not in page.text
    calls = [unescape(each) for each in re.findall(r'<pre id="snippet-[^>]*>([^<]*)</pre>', page.text)]
    for each in calls:
        assert not set(each) & {RTL, "\x1b", "\0"}
    return calls


async def run(site: Site, *words: str, store: Path | None = None) -> str:
    variables = site.variables | ({} if store is None else {"POSTROOM_STORE": str(store)})
    process = await asyncio.create_subprocess_exec(
        *words, env=variables, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def test_the_calls_that_read_a_message_read_it_whatever_its_id(site: Site, tmp_path: Path) -> None:
    for id_ in IDS:
        await site.mailbox.send_message(message(message_id=id_))
    calls = [await copies_of(site, id_) for id_ in IDS]
    output = await run(site, "bash", "-ec", "\necho\n".join(curl for curl, *_ in calls))
    assert [msgspec.json.decode(line)["message_id"] for line in output.splitlines()] == IDS
    codes = [each[2] for each in calls]
    output = await run(
        site, sys.executable, "-c", "\n".join([COLLECTION, *codes, "sys.stdout.write(repr(ids))"])
    )
    assert literal_eval(output) == IDS
    store = tmp_path / "store.db"
    for index in (3, 7):  # the command line is slow to start
        output = await run(site, "bash", "-ec", calls[index][1].replace("--", "--json --", 1), store=store)
        assert msgspec.json.decode(output)["message_id"] == IDS[index]


async def test_the_calls_that_send_a_message_send_its_payload_and_headers(site: Site) -> None:
    sent = {name: await site.mailbox.send_message(each) for name, each in MESSAGES.items()}
    calls = {name: (await copies_of(site, each.message_id))[3:] for name, each in sent.items()}
    assert {name: len(each) for name, each in calls.items()} == dict.fromkeys(MESSAGES, 3)
    shell = [each for curl, command, _ in calls.values() for each in (curl, command)]
    await run(site, "bash", "-ec", "\n".join(shell))
    await run(site, sys.executable, "-c", "\n".join(code for *_, code in calls.values()))
    for name, original in MESSAGES.items():
        received = await site.mailbox.receive_messages(original.topic)
        assert len(received) == 4
        for each in received[1:]:
            assert each.causality_parent == sent[name].message_id
            assert _facts(original) == {
                "payload": each.payload,
                "attrs": each.attrs,
                "content_type": each.content_type,
                "priority": each.priority,
                "ttl_seconds": each.ttl_seconds,
            }
            assert each.correlation_id == (original.correlation_id or sent[name].message_id)


def _facts(original: NewMessage) -> dict[str, object]:
    names = ("payload", "attrs", "content_type", "priority", "ttl_seconds")
    return {name: getattr(original, name) for name in names}
