"""Admins, proxies and runners of the last release and of this version form one cluster."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from postroom import NewMessage, connect
from tests.integration.upgrade.conftest import WORKS, Version, outcome, refused
from tests.integration.upgrade.test_beside import running
from tests.support.waiting import wait_until

pytestmark = pytest.mark.extended

MAILBOX = "shop@a"
TIMEOUT_MS = 120_000
LEASES = "[admin]\nttl_ms = 4_000\nheartbeat_interval_ms = 800\ngrace_period_ms = 1_000\n"
LISTEN = ("--listen", "127.0.0.1:0", "--json")


@contextmanager
def admin(version: Version, folder: Path) -> Iterator[str]:
    """Run an admin, whose leases are in a file of the folder, and yield its address."""
    settings = folder / "postroom.toml"
    settings.write_text(LEASES)
    options = ("--config", settings, "--standalone", "--store", folder / "leases.db", *LISTEN)
    with running(version, folder / f"admin-{version.name}.log", "admin", *options) as report:
        yield host_of(report["address"])


@contextmanager
def runner(version: Version, folder: Path, admin: str) -> Iterator[Path]:
    """Run a runner for the mailbox, whose store is a file of the folder, and yield its log."""
    log = folder / f"runner-{version.name}.log"
    names = ("--runner-id", f"runner-{version.name}", "--proxy-id", "a", "--mailbox", MAILBOX)
    options = ("--dev", "--admin", admin, *names, "--store", folder / "shop.db", *LISTEN)
    with running(version, log, "runner", *options):
        yield log


@contextmanager
def proxy(version: Version, folder: Path, admin: str) -> Iterator[str]:
    """Run a proxy, and yield the address of the mailbox behind it."""
    options = ("--admin", admin, "--proxy-id", "a", *LISTEN)
    with running(version, folder / "proxy.log", "proxy", *options) as report:
        yield f"postroom://{host_of(report['address'])}/{MAILBOX}"


def host_of(address: str) -> str:
    return address.rpartition("/")[2]


@pytest.mark.parametrize("role", ["admin", "proxy"])
def test_nodes_of_both_versions_serve_clients_of_both(
    role: str, former: Version, present: Version, tmp_path: Path
) -> None:
    admins, others = (former, present) if role == "admin" else (present, former)
    with (
        admin(admins, tmp_path) as address,
        proxy(others, tmp_path, address) as mailbox,
        runner(others, tmp_path, address),
    ):
        for client in (former, present):
            calls = client.run("call", mailbox)
            assert {name: each for name, each in calls.items() if each != WORKS} == {}
    roles = ("admin", "proxy and runner")
    assert outcome("cluster", *(roles if role == "admin" else roles[::-1])) == WORKS


def test_a_runner_takes_over_from_the_last_release_which_then_refuses_the_store(
    former: Version, present: Version, tmp_path: Path
) -> None:
    with admin(former, tmp_path) as address, proxy(former, tmp_path, address) as mailbox:
        with runner(former, tmp_path, address), connect(mailbox, timeout_ms=TIMEOUT_MS) as client:
            client.send_message(NewMessage(topic="orders", payload=b"1", idem_key="1"))
            (held,) = client.receive_messages("orders")
            with runner(present, tmp_path, address):
                pass  # the lease is the other one's
            client.send_message(NewMessage(topic="orders", payload=b"2", idem_key="2"))
        with runner(present, tmp_path, address), connect(mailbox, timeout_ms=TIMEOUT_MS) as client:
            assert client.ack_messages([held.receipt]) == [None]
            assert client.send_message(NewMessage(topic="orders", payload=b"1", idem_key="1")).duplicate
            (message,) = client.receive_messages("orders", wait_ms=10_000)
            message.ack()
        assert outcome("store of a runner", "runner first", "runner next") == WORKS
        with runner(former, tmp_path, address) as log:
            wait_until(lambda: "has the format" in log.read_text("utf-8"))
            line = next(each for each in log.read_text("utf-8").splitlines() if "has the format" in each)
    sentence = line[line.index("The store") : line.index("later version.") + len("later version.")]
    assert outcome("store of a runner", "runner next", "runner first") == refused(
        sentence, tmp_path / "shop.db"
    )
