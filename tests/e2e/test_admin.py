"""`postroom admin` as a process: its clock jumps, it reloads, stops and starts again."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from postroom.adapters.grpc.admin_client import connect_admins
from postroom.application.ports.control_plane import Heartbeat
from tests.e2e.conftest import SCRIPT, TIMEOUT_SECONDS, Postroom
from tests.e2e.test_clock_jumps import LIBRARIES
from tests.support.lease_requests import lease_request
from tests.support.servers.process import ServerProcess
from tests.support.waiting import until

MAILBOX = "orders@proxy-1"
DAY_US = 86_400 * 10**6
POLICIES = "namespaces:\n- {{name: bills, pattern: mailbox, lease: {{ttl: {ttl}}}}}\n"


class Admin:
    """A process of `postroom admin` over a file, whose wall clock a test moves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "admin.log"
        self._offset = folder / "offset"
        self.set_clock("+0")
        self.set_policy("60s")
        self.process = ServerProcess(
            "postroom admin",
            [
                "env",
                f"LD_PRELOAD={LIBRARIES[0]}",
                f"FAKETIME_TIMESTAMP_FILE={self._offset}",
                "FAKETIME_NO_CACHE=1",
                "FAKETIME_DONT_FAKE_MONOTONIC=1",
                SCRIPT,
                *("admin", "--json", "--log-level", "info", "--standalone", "--listen", "127.0.0.1:0"),
                *("--store", str(folder / "admin.db"), "--namespaces", str(folder / "namespaces.yaml")),
            ],
            self.log,
        )

    def set_clock(self, offset: str) -> None:
        """Move the wall clock; the clocks that count from the start of the machine stay right."""
        changed = self._offset.with_suffix(".new")
        changed.write_text(offset)
        changed.rename(self._offset)

    def set_policy(self, ttl: str) -> None:
        (self.folder / "namespaces.yaml").write_text(POLICIES.format(ttl=ttl))

    @contextmanager
    def running(self) -> Iterator[dict[str, Any]]:
        """Run the process; return what it printed when it was ready."""
        self.log.write_bytes(b"")
        self.process.start(lambda: self.printed() is not None, TIMEOUT_SECONDS)
        try:
            printed = self.printed()
            assert printed is not None
            yield printed
        finally:
            self.process.stop()

    def printed(self) -> dict[str, Any] | None:
        for line in self.log.read_text().splitlines():
            if line.startswith('{"address"'):
                document: dict[str, Any] = json.loads(line)
                return document
        return None


@pytest.fixture
def admin(tmp_path: Path) -> Admin:
    if not LIBRARIES:
        pytest.skip("libfaketime is not installed; on Debian and Ubuntu: apt-get install libfaketime")
    return Admin(tmp_path)


async def test_leases_survive_jumps_of_the_wall_clock_and_a_restart(admin: Admin) -> None:
    heartbeat = Heartbeat(mailbox=MAILBOX, runner="runner-1", proxy="proxy-1", epoch=1)
    with admin.running() as printed:
        assert printed["leases"] == 0
        async with connect_admins([printed["address"].partition("://")[2]], attempt_ms=60_000) as client:
            granted = await client.acquire_lease(lease_request())
            for offset, days in (("+30d", 30), ("-30d", -30)):
                admin.set_clock(offset)
                renewed = await client.renew_lease(heartbeat)
                assert abs(renewed.expires_at - granted.expires_at - days * DAY_US) < DAY_US / 2
                (lease,) = await client.list_leases()
                assert (lease.status, lease.remaining_ms > 0) == ("active", True)

            bills = lease_request("bills@proxy-1", attempt=2)
            assert (await client.acquire_lease(bills)).ttl_ms == 60_000
            admin.set_policy("30s")
            os.kill(admin.process.pid, signal.SIGHUP)
            await until(lambda: "settings.reloaded" in admin.log.read_text())
            assert (await client.acquire_lease(lease_request("bills@proxy-1", attempt=3))).ttl_ms == 30_000
            admin.set_policy("a while")
            os.kill(admin.process.pid, signal.SIGHUP)
            await until(lambda: "settings.reload_failed" in admin.log.read_text())
            assert (await client.acquire_lease(lease_request("bills@proxy-1", attempt=4))).ttl_ms == 30_000
    admin.set_policy("30s")
    with admin.running() as printed:
        assert printed["leases"] == 2


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "must say where leases are stored"),
        (("--standalone", "--jetstream", "nats://127.0.0.1:1"), "must say where leases are stored"),
        (("--standalone", "--store", "postgresql://x/y"), "must say where leases are stored"),
        (("--standalone", "--listen", "0.0.0.0:0"), "needs TLS"),
        (("--standalone", "--listen", "nonsense"), "no address"),
        (("--standalone", "--namespaces", "none.yaml"), "can't be read"),
        (("--jetstream", "http://127.0.0.1:1"), "begins with http://"),
    ],
)
def test_what_an_admin_can_not_serve_is_refused_and_creates_no_store(
    postroom: Postroom, arguments: tuple[str, ...], problem: str
) -> None:
    done = postroom("admin", *arguments)
    assert done.code in (1, 2)
    assert problem in done.err
    assert len(done.err.splitlines()) == 1
    assert [*postroom.folder.glob("*.db*")] == []
