"""A gRPC client of another toolchain: Node's, made from the .proto files at run time."""

import asyncio
import json
import re
import shutil
import subprocess
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import postroom
from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.compose.serve import open_grpc_surface, serve_mailbox, unrestricted
from tests.support.stores import MAILBOX

CLIENT = Path(__file__).parent / "node"
PAGE = Path(__file__).parents[2] / "docs" / "grpc.md"
ROOT = Path(str(postroom.__file__)).parent.parent
"""Root of the imports of the .proto files."""
SECONDS = 120


@pytest.fixture(scope="module")
def node() -> str:
    """Return the path of Node, with the packages of the client installed."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("Node and npm are not on the path")
    if not (CLIENT / "node_modules" / "@grpc" / "proto-loader").is_dir():
        install = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(
            install, cwd=CLIENT, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        if done.returncode:
            pytest.skip(f"npm can't install the packages of the client: {done.stderr.strip()[-300:]}")
    return node


@asynccontextmanager
async def served() -> AsyncIterator[tuple[OwnedMailbox, str]]:
    """Yield a mailbox and the address at which it is served."""
    async with (
        open_mailbox("memory:", MAILBOX) as mailbox,
        serve_mailbox("memory:", mailbox, [open_grpc_surface("127.0.0.1:0")], access=unrestricted) as (url,),
    ):
        yield mailbox, url.removeprefix("grpc://")


async def run(node: str, *arguments: str) -> str:
    """Return what a program prints."""
    process = await asyncio.create_subprocess_exec(node, *arguments, cwd=CLIENT, stdout=PIPE, stderr=PIPE)
    try:
        async with asyncio.timeout(SECONDS):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_a_node_client_sends_receives_streams_and_settles(node: str) -> None:
    async with served() as (_, address):
        result = json.loads(await run(node, "client.js", address, str(ROOT)))
    id_ = result["sent"]["message_id"]
    assert result["again"] == {"message_id": id_, "duplicate": True}
    assert result["received"] == [{"message_id": id_, "payload": "from Node", "tenant": "acme"}]
    assert result["settled"] == [None]
    assert result["streamed"] == "a stream"
    assert result["refused"]["code"] == "INVALID_ARGUMENT"
    assert "no spaces" in result["refused"]["details"]
    assert result["unsettled"] == 0


async def test_the_documented_client_receives_what_it_sends(node: str) -> None:
    (code,) = re.findall(r"^```js\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    async with served() as (mailbox, address):
        for shown, real in (("/usr/lib/python3/site-packages", str(ROOT)), ("127.0.0.1:50051", address)):
            assert shown in code
            code = code.replace(shown, real)
        assert await run(node, "-e", code) == '{"order": 7}\n'
        assert (await mailbox.get_backlog()).shards == []
