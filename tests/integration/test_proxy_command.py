"""`postroom proxy`, as a process."""

import asyncio
import json
import signal
import sys
import urllib.request
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest

from postroom.adapters.grpc.admin_service import admin_handlers
from postroom.adapters.grpc.client import connect_grpc
from postroom.adapters.grpc.node_access import NodeAccess
from postroom.adapters.grpc.proxy_service import GrpcRoutePush
from postroom.adapters.grpc.server import serve_handlers
from postroom.adapters.sockets.address import resolve
from postroom.application.ports.control_plane import RouteChange
from tests.support.fixed_control_plane import FixedControlPlane
from tests.support.messages import MAILBOX, message
from tests.support.proxies import running_owner
from tests.support.servers.process import free_port
from tests.support.waiting import SECONDS, until, within

TOKEN = "canary-" + "t" * 32


def read(url: str) -> tuple[str, str]:
    """Return metrics and readiness."""
    with (
        urllib.request.urlopen(f"{url}/metrics", timeout=SECONDS) as metrics,
        urllib.request.urlopen(f"{url}/readyz", timeout=SECONDS) as ready,
    ):
        return metrics.read().decode(), ready.read().decode()


async def test_a_proxy_registers_forwards_and_leaves_when_it_is_told_to_stop(tmp_path: Path) -> None:
    control_plane, access = FixedControlPlane(), NodeAccess(TOKEN)
    (tmp_path / "postroom.toml").write_text(f'[cluster]\nnode_token = "{TOKEN}"\n')
    port = free_port()
    handlers = admin_handlers(control_plane, access, lambda: "")
    async with (
        asyncio.timeout(SECONDS),
        running_owner() as owner,
        serve_handlers(resolve("127.0.0.1:0"), handlers) as admin,
    ):
        mailbox = await owner.own(MAILBOX)
        admins = f"127.0.0.1:1,{admin.removeprefix('grpc://')}"  # the first one is down
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "from postroom.adapters.cli.main import main; main()",
            *f"proxy --admin {admins} --proxy-id one --listen 127.0.0.1:0 --json".split(),
            f"--metrics-port={port}",
            cwd=tmp_path,
            stdout=PIPE,
            stderr=PIPE,
        )
        try:
            assert process.stdout is not None
            started: dict[str, Any] = json.loads(await process.stdout.readline())
            assert started["proxy"] == "one"
            address = started["address"]
            await until(lambda: control_plane.registrations == [address])
            route = control_plane.lease(MAILBOX, owner.address)
            push = GrpcRoutePush(access)
            await push.push(address, RouteChange(MAILBOX, route.position, route), control_plane.push_key)
            await push.forget(address)
            async with connect_grpc(address, timeout_ms=60_000, mailbox=MAILBOX) as client:
                await client.send_message(message())
            assert len(await mailbox.receive_messages("orders")) == 1
            metrics, ready = await asyncio.to_thread(read, f"http://127.0.0.1:{port}")
            assert 'postroom_proxy_forwarded_total{method="send",status="OK"} 1.0' in metrics
            assert "postroom_proxy_routes 1.0" in metrics
            assert json.loads(ready) == {"degraded": False, "missing": []}
            process.send_signal(signal.SIGTERM)
            out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await within(process.wait())
    assert process.returncode == 0
    assert control_plane.departures == ["one"]
    assert TOKEN.encode() not in out + err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("", "needs a proxy_id"),
        ("--admin 127.0.0.1:1 --proxy-id one --mailbox acme@one", "set runner_id, too"),
        ("--admin 127.0.0.1:1 --proxy-id one --dev", "set runner_id, too"),
        ("--admin nowhere --proxy-id one", "must have the form host:port"),
        ("--admin 127.0.0.1:1 --proxy-id a/b", "proxy_id must be 1 to 128 characters"),
        ("--admin 127.0.0.1:1 --proxy-id one --listen 0.0.0.0:0", "needs TLS"),
        ("--admin 127.0.0.1:1 --proxy-id one --listen 127.0.0.1:0 --address nowhere", "address must have"),
    ],
)
def test_wrong_settings_of_a_proxy_are_refused(
    arguments: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from postroom.adapters.cli.main import invoke

    assert invoke(["proxy", *arguments.split()]) in (1, 2)
    assert problem in capsys.readouterr().err
