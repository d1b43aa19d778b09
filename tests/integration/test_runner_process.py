"""`postroom runner` as a process: paused beyond its lease, killed, and told to stop (RFC-049)."""

import asyncio
import os
import signal
import sys
import urllib.request
import uuid
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from postroom.adapters.compose.runner import OpenRunner, RunnerSettings, open_runner
from postroom.adapters.compose.serve import unrestricted
from postroom.adapters.grpc.admin_service import admin_handlers
from postroom.adapters.grpc.client import connect_grpc
from postroom.adapters.grpc.node_access import NodeAccess
from postroom.adapters.grpc.server import serve_handlers
from postroom.adapters.sockets.address import resolve
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.domain.errors import PostroomError
from tests.support.memory_control_plane import MemoryControlPlane
from tests.support.messages import MAILBOX, message
from tests.support.servers.process import pause
from tests.support.waiting import SECONDS, until

SCRIPT = Path(sys.executable).with_name("postroom")


@pytest.fixture
def admin() -> MemoryControlPlane:
    return MemoryControlPlane()


@pytest.fixture
async def address(admin: MemoryControlPlane) -> AsyncIterator[str]:
    handlers = admin_handlers(admin, NodeAccess(), uuid.uuid4)
    async with serve_handlers(resolve("127.0.0.1:0"), handlers) as url:
        yield url.removeprefix("grpc://")


@asynccontextmanager
async def started(folder: Path, address: str, *arguments: str) -> AsyncIterator[tuple[Process, str]]:
    """Start the command; return it, and the address at which it serves."""
    process = await asyncio.create_subprocess_exec(
        SCRIPT, "runner", "--dev", "--admin", address, "--runner-id", "process", "--proxy-id", "p1",
        "--mailbox", MAILBOX, "--listen", "127.0.0.1:0", "--store", str(folder / "store.db"),
        *arguments,
        cwd=folder,
        env={key: value for key, value in os.environ.items() if not key.startswith("POSTROOM_")},
        stdout=PIPE,
        stderr=PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        async with asyncio.timeout(SECONDS):
            line = await process.stdout.readline()
        yield process, line.decode().partition("grpc://")[2].partition(",")[0]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@asynccontextmanager
async def beside(folder: Path, admin: MemoryControlPlane, name: str) -> AsyncIterator[OpenRunner]:
    """Run another runner over the same store in this process."""
    settings = RunnerSettings(runner=name, proxy="p1", mailboxes=[MAILBOX], listen="127.0.0.1:0")
    async with open_runner(str(folder / "store.db"), settings, unrestricted, admin) as opened:
        task = asyncio.create_task(opened.runner.run())
        try:
            yield opened
        finally:
            opened.runner.stop()
            await task


@pytest.mark.extended
async def test_a_runner_that_was_paused_beyond_its_lease_appends_nothing_when_it_wakes(
    tmp_path: Path, admin: MemoryControlPlane, address: str
) -> None:
    async with (
        started(tmp_path, address) as (process, served),
        connect_grpc(served, timeout_ms=60_000),  # waits until it serves a mailbox
        connect_grpc(served, timeout_ms=60_000, mailbox=MAILBOX) as client,
    ):
        await client.send_message(message(b"1", message_id="1"))
        pause(process.pid)
        paused = asyncio.create_task(client.send_message(message(b"2", message_id="2")))
        async with beside(tmp_path, admin, "second") as second:
            await until(lambda: second.runner.served)  # after TTL and grace period
            mailbox = second.host.served.find(MAILBOX).mailbox
            await mailbox.send_message(message(b"3", message_id="3"))
            process.send_signal(signal.SIGCONT)
            with pytest.raises(PostroomError):
                await paused  # the former owner refuses it, and serves the mailbox no longer
            assert admin.owner(MAILBOX) == "second"
        await until(lambda: admin.owner(MAILBOX) == "process")  # it acquires the lease like any other
        process.kill()
        async with beside(tmp_path, admin, "third") as third:
            await until(lambda: third.runner.served)
            received = await third.host.served.find(MAILBOX).mailbox.receive_messages("orders")
    assert [each.payload for each in received] == [b"1", b"3"]
    log = SqliteEventLog(tmp_path / "store.db", MAILBOX, create_missing=False)
    epochs = [record.epoch for record in log.read()]
    log.close()
    assert epochs == sorted(epochs)


async def test_a_runner_that_is_told_to_stop_releases_its_leases_and_succeeds(
    tmp_path: Path, admin: MemoryControlPlane, address: str
) -> None:
    async with (
        started(tmp_path, address, "--metrics-port", "0") as (process, served),
        connect_grpc(served, timeout_ms=60_000) as client,
    ):
        await client.send_message(message())
        await until(lambda: "process" in admin.registered)
        assert process.stderr is not None
        async with asyncio.timeout(SECONDS):
            url = (await process.stderr.readline()).decode().split()[-1].rstrip(".")
        with await asyncio.to_thread(urllib.request.urlopen, url, None, SECONDS) as response:
            metrics = response.read().decode()
        assert "postroom_runner_leases 1.0" in metrics
        assert 'postroom_mailbox_epoch{mailbox="acme@one"} 1.0' in metrics
        process.terminate()
        async with asyncio.timeout(SECONDS):
            assert await process.wait() == 0
        assert admin.owner(MAILBOX) is None
        assert admin.registered == {}


async def test_a_runner_needs_names_of_its_own(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        SCRIPT, "runner", "--dev", cwd=tmp_path, stdout=PIPE, stderr=PIPE
    )
    _, problem = await process.communicate()
    assert process.returncode == 2
    assert b"set --runner-id and --proxy-id" in problem
