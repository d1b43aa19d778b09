"""`postroom up` runs everything of a mailbox in one process, and `postroom init` writes a project for it."""

import asyncio
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, CookieJar

from tests.e2e.conftest import SCRIPT, TIMEOUT_SECONDS, Postroom
from tests.support.mcp import call, http_agent
from tests.support.servers.console import Browser
from tests.support.servers.process import free_port
from tests.support.waiting import until_answer, wait_until

HANDLERS = """
import time
from pathlib import Path

from postroom import Worker

worker, other, refused = Worker("first"), Worker("second"), Worker("third")


@worker.consumer("computes")
async def compute(message: bytes) -> None:
    Path("computing").touch()
    while not Path("release").exists():
        pass


@worker.consumer("slow")
def handle_slowly(message: bytes) -> None:
    Path("started").touch()
    while not Path("release").exists():
        time.sleep(0.005)
    Path("finished").touch()


@other.consumer("orders")
async def handle(message: bytes) -> None:
    with Path("handled").open("ab") as file:
        file.write(message + b"\\n")


@refused.consumer("some.*", subscription="mail")
async def copy(message: bytes) -> None: ...
"""
THREADS = """
import asyncio
import threading

from postroom import Retry, Worker

threading.Thread(target=threading.Event().wait, name="poller").start()
worker = Worker()


@worker.consumer("orders", timeout="50ms", retry=Retry(attempts=1))
async def handle(message: bytes) -> None:
    await asyncio.to_thread(threading.Event().wait)
"""
WORKERS = ("handlers:worker", "handlers:other")


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


class Up:
    """A running `postroom up`; its output is in a file, as it starts itself again."""

    def __init__(self, postroom: Postroom, *arguments: str) -> None:
        self.folder = postroom.folder
        self.log = self.folder / "up.log"
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                [SCRIPT, "up", "--http", "127.0.0.1:0", *arguments],
                cwd=self.folder,
                # A log is no terminal, but has lines as soon as they are printed.
                env={k: v for k, v in postroom.environment.items() if k != "PYTHONUNBUFFERED"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )

    def wait_for(self, text: str, count: int = 1) -> None:
        def is_shown() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return self.log.read_text().count(text) >= count

        wait_until(is_shown)

    @property
    def link(self) -> str:
        """Return the latest link to the console."""
        return [line for line in self.log.read_text().splitlines() if line.startswith("Console: ")][-1]

    @property
    def address(self) -> str:
        """Return the address of the server."""
        return self.link.removeprefix("Console: ").partition("/console/")[0]

    async def open_console(self) -> str:
        """Return the overview of the console."""
        url, _, code = self.link.removeprefix("Console: ").partition("/start?code=")
        async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as client:
            return (await Browser(client, url).open_link(code)).text

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(TIMEOUT_SECONDS)


@pytest.fixture
def up(postroom: Postroom) -> Any:
    (postroom.folder / "handlers.py").write_text(HANDLERS)
    started: list[Up] = []

    def start(*arguments: str) -> Up:
        started.append(Up(postroom, *arguments))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait(TIMEOUT_SECONDS)


def test_a_new_project_has_a_worker_that_runs_and_a_test_that_passes(postroom: Postroom) -> None:
    assert postroom.ok("init", "shop").out == "Wrote postroom.toml, app.py, test_app.py.\n"
    assert (postroom.folder / "shop" / "postroom.toml").stat().st_mode & 0o777 == 0o600
    refused = postroom("init", "shop")
    assert (refused.code, "app.py, test_app.py exist in" in refused.err) == (2, True)
    (postroom.folder / "linked").mkdir()
    (postroom.folder / "linked" / "app.py").symlink_to(postroom.folder / "elsewhere.py")
    assert postroom("init", "linked").code == 2
    assert not (postroom.folder / "elsewhere.py").exists()
    shop = Postroom(postroom.folder / "shop")
    assert "1 passed" in shop.shell(f"{sys.executable} -m pytest -q -p no:cacheprovider")
    running = Up(shop, "app:worker", "--reload")
    try:
        running.wait_for("Console: http://127.0.0.1:")
        shop.ok("send", "orders", '{"id": 1}')
        running.wait_for("placed {'id': 1}")

        source = (shop.folder / "app.py").read_text()
        (shop.folder / "app.py").write_text("this is no Python")
        running.wait_for("Waiting for a change of the code.")
        (shop.folder / "app.py").write_text(source.replace("placed", "shipped"))
        running.wait_for("Console: http://127.0.0.1:", 2)
        shop.ok("send", "orders", '{"id": 2}')
        running.wait_for("shipped {'id': 2}")
        assert running.stop() == 0
    finally:
        running.process.kill()
        running.process.wait(TIMEOUT_SECONDS)


def test_a_handler_that_never_yields_delays_neither_the_owner_nor_other_workers(
    postroom: Postroom, up: Callable[..., Up]
) -> None:
    running = up(*WORKERS)
    running.wait_for("Console: ")
    postroom.ok("send", "computes", "x")
    wait_until((postroom.folder / "computing").exists)
    for number in range(3):
        postroom.ok("send", "orders", f"order {number}")
    wait_until(lambda: len(lines(postroom.folder / "handled")) == 3)
    (postroom.folder / "release").touch()
    assert running.stop() == 0


def test_a_handler_finishes_before_the_process_stops(postroom: Postroom, up: Callable[..., Up]) -> None:
    running = up(*WORKERS, "--stop-within", "5m")
    running.wait_for("Console: ")
    id_ = postroom.ok("send", "slow", "x").out.strip()
    wait_until((postroom.folder / "started").exists)
    running.process.send_signal(signal.SIGTERM)
    running.wait_for("Stopping.")
    (postroom.folder / "release").touch()
    assert running.process.wait(TIMEOUT_SECONDS) == 0
    assert (postroom.folder / "finished").exists()
    assert json.loads(postroom.ok("--json", "show", id_).out)["status"] == "acked"


def test_no_message_is_lost_when_the_process_is_killed(postroom: Postroom, up: Callable[..., Up]) -> None:
    sent = [f"order {number}" for number in range(12)]
    first = up(*WORKERS)
    first.wait_for("Console: ")
    for each in sent[:4]:
        postroom.ok("send", "orders", each)
    first.process.kill()
    for each in sent[4:8]:
        postroom.ok("send", "orders", each)
    second = up(*WORKERS)
    for each in sent[8:]:
        postroom.ok("send", "orders", each)
    wait_until(lambda: {*lines(postroom.folder / "handled")} == {*sent})
    assert second.stop() == 0


def test_a_part_that_fails_starts_again_and_readiness_names_it(
    postroom: Postroom, up: Callable[..., Up]
) -> None:
    postroom.ok("subscription", "set", "mail", "others.*")
    port = free_port()
    running = up("handlers:refused", "handlers:other", "--metrics-port", str(port))
    running.wait_for('"event": "part.failed", "part": "worker handlers:refused"')

    def missing() -> list[str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=TIMEOUT_SECONDS):
                return []
        except urllib.error.HTTPError as error:
            with error:
                found: list[str] = json.load(error)["missing"]
                return found

    wait_until(lambda: missing() == ["worker handlers:refused"])
    assert "worker handlers:refused" in asyncio.run(running.open_console())
    postroom.ok("send", "orders", "beside")
    wait_until(lambda: lines(postroom.folder / "handled") == ["beside"])

    postroom.ok("subscription", "set", "mail", "some.*")
    wait_until(lambda: missing() == [])
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_SECONDS) as answer:
        metrics = answer.read().decode()
    assert 'postroom_part_running{part="worker handlers:refused"} 1.0' in metrics
    assert (
        'postroom_worker_jobs_total{consumer="orders",outcome="handled",worker="handlers:other"} 1.0'
        in metrics
    )
    assert running.stop() == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing:worker"], "nothing:worker can't be imported"),
        (["broken:worker"], "can't be imported: BaseException: no license (broken.py, line 4)."),
        (["handlers:wrker"], "It has handlers:worker, handlers:other, handlers:refused, handlers:again"),
        (["handlers:worker", "handlers:again"], "are the same worker"),
        (["handlers:idle"], "has no handlers"),
        (["--http", "unix:/x"], "--http must be a host:port"),
        (["--stop-within", "soon"], "soon"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(
    postroom: Postroom, arguments: list[str], said: str
) -> None:
    (postroom.folder / "broken.py").write_text("\n\n\nraise BaseException('no license')")
    (postroom.folder / "handlers.py").write_text(f"{HANDLERS}\nagain, idle = worker, Worker()")
    done = postroom("up", *arguments)
    assert (done.code, said in done.err, postroom.store.exists()) == (2, True, False), done


def test_threads_of_the_application_do_not_keep_a_process_whose_command_has_ended(postroom: Postroom) -> None:
    (postroom.folder / "handlers.py").write_text(THREADS)
    postroom.ok("send", "orders", "x")
    done = subprocess.run(  # not a fork, as Python waits for threads at its own end
        [SCRIPT, "work", "handlers:worker", "--once"],
        cwd=postroom.folder,
        env=postroom.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_SECONDS,
    )
    assert (done.returncode, "0 handled, 1 failed" in done.stdout) == (0, True), done
    assert '"event": "process.threads_left"' in done.stderr
    assert "poller" in done.stderr


async def test_agents_and_clients_of_up_need_a_capability_of_the_store(postroom: Postroom, up: Any) -> None:
    postroom.ok("token", "rotate")
    token = postroom.ok("token", "mint", "agent", "--operation", "read-headers").out.strip()
    postroom.ok("send", "orders", "1")
    running = up()
    running.wait_for("Console: ")
    async with http_agent(running.address, token) as agent:
        assert [each["topic"] for each in (await call(agent, "list_topics"))["topics"]] == ["orders"]

    async def status(path: str, token: str) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        async with ClientSession(headers=headers) as client, client.get(f"{running.address}{path}") as answer:
            return answer.status

    assert await status("/v1/backlog", token) == 200
    assert await status("/v1/backlog", "junk") == 401
    assert await status("/mcp", "junk") == 401
    postroom.ok("token", "revoke", "--all", "--yes")

    async def is_refused() -> bool:
        return await status("/v1/backlog", token) == 401

    await until_answer(is_refused)
    assert "orders" in await running.open_console()  # the link of the process's user outlasts a revocation
    assert running.stop() == 0


async def test_up_has_no_tools_for_agents_if_serve_has_none(postroom: Postroom, up: Any) -> None:
    (postroom.folder / "postroom.toml").write_text("[serve]\nmcp = false\n")
    running = up()
    running.wait_for("Console: ")
    async with ClientSession() as client, client.post(f"{running.address}/mcp") as answer:
        assert answer.status == 404
