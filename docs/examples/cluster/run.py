"""Kill the runner of a mailbox while messages flow, and watch another one take the mailbox over."""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from postroom import Mailbox, NewMessage, connect
from tests.support.servers.nats_cluster import WITH_SYSTEM, ClusterServer, NatsCluster
from tests.support.servers.process import ServerProcess
from tests.support.waiting import until, wait_until

POSTROOM = Path(sys.executable).with_name("postroom")
MAILBOX = "shop@a"
STREAM = "SHOP"
TOPIC = "orders"
KEYS = 8
VISIBILITY_MS = 2_000
POLL_SECONDS = 1.0
SETTINGS = """
[admin]
ttl_ms = {ttl_ms}
heartbeat_interval_ms = {heartbeat_ms}
grace_period_ms = {grace_ms}
"""
LEASE = {"ttl_ms": 4_000, "heartbeat_ms": 800, "grace_ms": 1_000}
LEASE_OF_REPLICATED = {"ttl_ms": 12_000, "heartbeat_ms": 2_000, "grace_ms": 3_000}
"""Longer than NATS takes to elect another leader of the streams, of leases and of messages."""
STARTED = time.monotonic()


def say(text: str) -> None:
    """Print a line with the time since the start."""
    print(f"{time.monotonic() - STARTED:5.1f} s  {text}", flush=True)


class Process:
    """A process of the cluster.

    Arguments:
        name: for messages and the log.
        arguments: of `postroom`.
    """

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        self._server = ServerProcess(name, [POSTROOM, *arguments, "--json"], self._log)

    @property
    def address(self) -> str:
        """Return where it serves gRPC, `host:port`, once it does; an empty text before."""
        for line in self._log.read_text("utf-8").splitlines():
            if line.startswith("{") and "address" in (facts := json.loads(line)):
                return str(facts["address"]).rpartition("/")[2]
        return ""

    def start(self) -> str:
        """Start it, and return its address."""
        self._log.touch()
        self._server.start(lambda: bool(self.address))
        return self.address

    def kill(self) -> None:
        """End it as a crash would, with SIGKILL."""
        self._server.kill()

    def stop(self) -> None:
        """End it in good order."""
        self._server.stop()


class Cluster:
    """Admins, two proxies, and two runners that may both own the mailbox.

    Arguments:
        is_standalone: the leases are in a file, without NATS.
        is_replicated: the messages are in the NATS servers, too, instead of a file.
    """

    def __init__(self, folder: Path, *, is_standalone: bool, is_replicated: bool) -> None:
        self.runners: dict[str, Process] = {}
        self._folder = folder
        self._opened = ExitStack()
        self._admins = ""
        self.proxies = ""
        self.nats: NatsCluster | None = None
        self.is_replicated = is_replicated
        self.lease_times = LEASE_OF_REPLICATED if is_replicated else LEASE
        try:
            self._start(is_standalone)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End all processes."""
        self._opened.close()

    def show(self, *command: str) -> dict[str, Any]:
        """Return what a command tells of the cluster."""
        answer = subprocess.run(
            [POSTROOM, *command, "--admin", self._admins, "--json"],
            capture_output=True,
            text=True,
            check=True,
        )
        facts: dict[str, Any] = json.loads(answer.stdout)
        return facts

    def lease(self) -> dict[str, Any]:
        """Return the lease of the mailbox."""
        leases = self.show("lease", "list")["leases"]
        return next((each for each in leases if each["mailbox"] == MAILBOX), {"status": "none"})

    def kill_host(self, runner: str) -> ClusterServer | None:
        """Kill a runner and, if the servers have the messages, the one that leads their stream; return it."""
        leader = self.nats.leader(STREAM) if self.nats is not None and self.is_replicated else None
        if leader is not None:
            leader.kill()
        self.runners[runner].kill()
        return leader

    def _start(self, is_standalone: bool) -> None:
        settings = self._folder / "postroom.toml"
        settings.write_text(SETTINGS.format(**self.lease_times))
        leases = ["--standalone"]
        if not is_standalone:
            nats = NatsCluster(self._folder / "nats", **WITH_SYSTEM)
            self.nats = self._opened.enter_context(nats)
            what = "the leases and the messages" if self.is_replicated else "the leases"
            say(f"3 NATS servers with JetStream keep {what}, by Raft.")
            leases = ["--jetstream", nats.url, "--monitoring", nats.monitoring]
        admins = []
        for number in range(1 if is_standalone else 2):
            store = str(self._folder / f"admin-{number}.db")
            admins.append(
                self._run(
                    f"admin-{number + 1}",
                    *("--config", str(settings), "admin", *leases, "--store", store),
                    *("--listen", "127.0.0.1:0"),
                ).address
            )
        self._admins = ",".join(admins)
        self.proxies = ",".join(
            self._run(
                name, "proxy", "--admin", self._admins, "--proxy-id", name, "--listen", "127.0.0.1:0"
            ).address
            for name in ("proxy-1", "proxy-2")
        )
        store = str(self._folder / "shop.db")
        if self.nats is not None and self.is_replicated:
            store = self.nats.store(STREAM)
        for name in ("runner-1", "runner-2"):
            self.runners[name] = self._run(
                name,
                *("--store", store, "runner", "--dev", "--admin", self._admins),
                *("--runner-id", name, "--proxy-id", "a", "--mailbox", MAILBOX, "--listen", "127.0.0.1:0"),
            )
        say(f"{len(admins)} admin(s), 2 proxies and 2 runners serve.")
        wait_until(lambda: self.lease()["status"] == "active")

    def _run(self, name: str, *arguments: str) -> Process:
        process = Process(self._folder, name, *arguments)
        process.start()
        self._opened.callback(process.stop)
        return process


class Traffic:
    """A sender and a consumer of numbered messages.

    Attributes:
        sent: the messages that the mailbox accepted.
        deliveries: how often each message was received.
    """

    def __init__(self, mailbox: Mailbox, count: int) -> None:
        self._mailbox = mailbox
        self._count = count
        self.sent: list[int] = []
        self.acked: set[int] = set()
        self.deliveries: Counter[int] = Counter()
        self.last_at = time.monotonic()
        self.longest_pause = 0.0

    async def send(self) -> None:
        """Send all messages."""
        for number in range(self._count):
            await self._mailbox.send_message(
                NewMessage(topic=TOPIC, payload=b"%d" % number, sticky_key=f"customer {number % KEYS}")
            )
            self.sent.append(number)

    async def receive(self) -> None:
        """Receive and ack until all messages are acked."""
        while len(self.acked) < self._count:
            received = await self._mailbox.receive_messages(
                TOPIC, visibility_ms=VISIBILITY_MS, consumer="shop", wait_ms=1_000
            )
            answers = await self._mailbox.ack_messages([each.receipt for each in received])
            for message, refusal in zip(received, answers, strict=True):
                number = int(message.payload)
                self.deliveries[number] += 1
                if refusal is None:
                    self.acked.add(number)
            if received:
                now = time.monotonic()
                self.longest_pause = max(self.longest_pause, now - self.last_at)
                self.last_at = now


async def demonstrate(cluster: Cluster, count: int) -> int:
    """Send and receive messages while the owner of the mailbox is killed; return the exit code."""
    before = await asyncio.to_thread(cluster.lease)
    say(f"{before['runner']} has the lease of {MAILBOX}, in epoch {before['epoch']}.")
    async with connect(f"postroom://{cluster.proxies}/{MAILBOX}", timeout_ms=60_000) as mailbox:
        traffic = Traffic(mailbox, count)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(traffic.send())
            tasks.create_task(traffic.receive())
            await until(lambda: len(traffic.sent) >= count // 3)
            server = await asyncio.to_thread(cluster.kill_host, before["runner"])
            killed_at = time.monotonic()
            say(f"{before['runner']} was killed (kill -9) after {len(traffic.sent)} messages were sent.")
            if server is not None:
                say(f"So was {server.name}, which led the stream of the messages; its disk is gone.")
            after = before
            while after["status"] != "active" or after["epoch"] == before["epoch"]:
                await asyncio.sleep(POLL_SECONDS)
                after = await asyncio.to_thread(cluster.lease)
            longest = (cluster.lease_times["ttl_ms"] + cluster.lease_times["grace_ms"]) / 1_000
            say(
                f"The lease moved: {after['runner']} acquired it, in epoch {after['epoch']}, within "
                f"{time.monotonic() - killed_at:.1f} s; TTL and grace period are {longest:g} s."
            )
            (route,) = (await asyncio.to_thread(cluster.show, "route", "list"))["routes"]
            say(f"The route changed: {route['mailbox']} is at {route['address']} ({route['runner']}).")
            if server is not None and cluster.nats is not None:
                await asyncio.to_thread(cluster.nats.replace_disk, server, STREAM)
                say(f"{server.name}, a new server with an empty disk, has all messages again.")
        backlog = await mailbox.get_backlog()
    lost = len({*traffic.sent} - traffic.acked)
    repeated = sum(times > 1 for times in traffic.deliveries.values())
    say(f"{len(traffic.sent)} messages sent, {len(traffic.acked)} acked, {lost} lost, {backlog.ready} left.")
    say(f"{repeated} were delivered again, as their acks did not arrive or their visibility ended.")
    say(f"The longest pause between two messages was {traffic.longest_pause:.1f} s.")
    return int(bool(lost) or backlog.ready > 0)


def main() -> None:
    """Run the demonstration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_500)
    parser.add_argument("--standalone", action="store_true", help="keep leases in a file, without NATS")
    parser.add_argument("--replicated", action="store_true", help="keep the messages in the NATS servers")
    options = parser.parse_args()
    if options.standalone and options.replicated:
        parser.error("--replicated needs NATS; leave out --standalone.")
    for name in [name for name in os.environ if name.startswith("POSTROOM_")]:
        del os.environ[name]
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder), is_standalone=options.standalone, is_replicated=options.replicated)
        try:
            code = asyncio.run(demonstrate(cluster, options.messages))
        finally:
            cluster.stop()
    say("All processes have ended.")
    raise SystemExit(code)


if __name__ == "__main__":
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"  # servers are started while calls go on
    main()
