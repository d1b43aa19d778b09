"""The shops of docs/examples/web lose no order and ship none twice, though their workers are killed."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest

from postroom import connect, read_mailbox
from tests.e2e.conftest import ROOT
from tests.support.servers.process import LOOPBACK, ServerProcess, free_port, pause
from tests.support.waiting import wait_until

README = ROOT / "docs" / "examples" / "web" / "README.md"
BIN = Path(sys.executable).parent
SHOPS = {
    "fastapi": ("-k", "uvicorn_worker.UvicornWorker", "docs.examples.web.fastapi_shop:app"),
    "django": ("docs.examples.web.django_shop:application",),
}
ORDERS = 400
KILLS = 4
CLIENTS = 16
WITHIN_SECONDS = 300
HANG_SECONDS = 3_600


class Shop:
    """A shop behind four gunicorn workers, with its store in a folder."""

    def __init__(self, framework: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = folder / "shop.db"
        self.port = free_port()
        self.log = folder / "gunicorn.log"
        monkeypatch.setenv("SHOP_MAILBOX", str(self.store))
        command: list[str | Path] = [BIN / "gunicorn", "-w", "4", "-b", f"{LOOPBACK}:{self.port}"]
        # Gunicorn would kill a worker that hangs for 30 s, as one that is paused or has no CPU time does.
        command += ["--timeout", str(HANG_SECONDS), "--chdir", ROOT, "--no-control-socket"]
        command += SHOPS[framework]
        self.process = ServerProcess("gunicorn", command, self.log)

    @contextmanager
    def run(self) -> Iterator[None]:
        self.process.start(self._is_ready)
        try:
            yield
        finally:
            self.process.kill()

    def place(self, order_id: str, item: object = "book") -> tuple[int, dict[str, object]]:
        """Make one request; a worker that is killed meanwhile raises OSError or HTTPException."""
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=60)
        try:
            body = json.dumps({"item": item})
            headers = {"Content-Type": "application/json"}
            connection.request("PUT", f"/orders/{order_id}", body, headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def insist(self, order_id: str) -> str:
        """Repeat the request until it is accepted, as a client does, and return the id of the message."""
        deadline = time.monotonic() + WITHIN_SECONDS
        while time.monotonic() < deadline:
            try:
                status, answer = self.place(order_id)
            except (OSError, http.client.HTTPException):
                continue
            if status == 202:
                return str(answer["message"])
            assert status in (429, 503), answer
        raise AssertionError(f"order {order_id} was not accepted in time")

    def kill_owner(self) -> int:
        """Kill the worker that owns the mailbox, and return its process id."""
        return self.signal_owner(lambda owner: os.kill(owner, signal.SIGKILL))

    def signal_owner(self, send: Callable[[int], None]) -> int:
        """Send a signal to the worker that owns the mailbox, and return its process id."""
        wait_until(lambda: self.owner() in self._workers(), WITHIN_SECONDS)  # not the script, or nobody
        owner = self.owner()
        send(owner)
        return owner

    def owner(self) -> int:
        """Return the process that owns the mailbox; 0 if there is none."""
        lock = self.store.with_name("shop.db-owner-main@local")
        owner = re.match(r"process (\d+) on ", lock.read_text() if lock.exists() else "")
        return int(owner[1]) if owner else 0

    def ship(self) -> list[str]:
        """Run the script, and return the orders that it shipped."""
        done = subprocess.run(
            [sys.executable, "-m", "docs.examples.web.ship"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=WITHIN_SECONDS,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return [line.split()[1] for line in done.stdout.splitlines()]

    def _workers(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(child) for child in children.split()]

    def _is_ready(self) -> bool:
        try:
            return self.place("first")[0] == 202
        except (OSError, http.client.HTTPException):
            return False


@pytest.mark.parametrize("framework", ["fastapi", pytest.param("django", marks=pytest.mark.extended)])
def test_every_accepted_order_is_shipped_once_though_workers_that_own_the_mailbox_are_killed(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop(framework, tmp_path, monkeypatch)
    orders = [f"order-{number}" for number in range(ORDERS)]
    accepted: dict[str, str] = {}
    shipped: list[str] = []
    killed: set[int] = set()
    with shop.run(), ThreadPoolExecutor(CLIENTS) as clients:
        for round_ in range(KILLS):
            placing = {clients.submit(shop.insist, order): order for order in orders[round_::KILLS]}
            completed = as_completed(placing, WITHIN_SECONDS)
            for each in islice(completed, CLIENTS):  # so that the owner is killed under load
                accepted[placing[each]] = each.result()
            killed.add(shop.kill_owner())
            shipped += shop.ship()
            accepted |= {placing[each]: each.result() for each in completed}
        deadline = time.monotonic() + WITHIN_SECONDS
        while len(shipped) <= ORDERS and time.monotonic() < deadline:
            shipped += shop.ship()  # a delivery whose answer was lost comes back when its visibility ends
        with connect(str(shop.store)) as mailbox:
            histories = [mailbox.get_message(message).history for message in accepted.values()]
            unsettled = mailbox.get_backlog().shards
    events = [[entry.event for entry in history] for history in histories]
    assert len(killed) == KILLS
    assert sorted(shipped) == sorted(["first", *orders])
    assert len(set(accepted.values())) == ORDERS
    assert all(each.count("MessageSent") == each.count("MessageAcked") == 1 for each in events)
    assert not any(shard.ready or shard.in_flight for shard in unsettled)


def test_a_worker_that_hangs_while_it_owns_the_mailbox_is_replaced_and_serves_again_when_it_wakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop("django", tmp_path, monkeypatch)
    with shop.run(), ThreadPoolExecutor(CLIENTS) as clients:
        paused = shop.signal_owner(pause)
        # One may go to the worker that hangs, which answers when it wakes.
        placing = [clients.submit(shop.insist, f"order-{number}") for number in range(4)]
        done = wait(placing, WITHIN_SECONDS, FIRST_COMPLETED).done
        during = shop.owner()
        os.kill(paused, signal.SIGCONT)
        accepted = {each.result(WITHIN_SECONDS) for each in placing}
        accepted |= set(clients.map(shop.insist, [f"later-{number}" for number in range(CLIENTS)]))
        assert shop.owner() == during != paused
        assert paused in shop._workers()
        assert done
    with connect(str(shop.store)) as mailbox:
        histories = [mailbox.get_message(message).history for message in accepted]
    with read_mailbox(str(shop.store)) as reader:
        assert reader.verify_log().messages == 1 + len(accepted) == 1 + 4 + CLIENTS
    assert all([entry.event for entry in history] == ["MessageSent"] for history in histories)


@pytest.mark.parametrize("framework", SHOPS)
def test_a_repeated_order_is_a_duplicate_and_one_with_another_item_or_none_is_refused(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert " ".join(("gunicorn", "-w", "4", *SHOPS[framework])) in README.read_text("utf-8")
    shop = Shop(framework, tmp_path, monkeypatch)
    with shop.run():
        status, answer = shop.place("1", "book")
        again = shop.place("1", "book")
        other = shop.place("1", "lamp")
        malformed = shop.place("2", 7)
    assert (status, answer["duplicate"]) == (202, False)
    assert again == (202, answer | {"duplicate": True})
    assert (other[0], other[1]["code"]) == (409, "E_DUPLICATE")
    assert malformed[0] == 422
