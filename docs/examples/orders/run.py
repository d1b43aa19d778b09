"""Place an order, kill the shop before its event is published, start it again, and count the results."""

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import psycopg

from tests.support.servers.nats import NatsServer
from tests.support.servers.postgres import PostgresServer
from tests.support.servers.process import free_port

HERE = Path(__file__).parent
POSTROOM = Path(sys.executable).with_name("postroom")
START_SECONDS = 60


class Shop:
    """The shop's process.

    Arguments:
        environment: URL of its database, and the signing key.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process and wait until it responds."""
        command = [sys.executable, "-m", "uvicorn", "service:app", "--port", str(self.port)]
        self._process = subprocess.Popen(
            [*command, "--log-level", "warning"], cwd=HERE, env=self._environment
        )
        until = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                raise SystemExit("The shop did not start.")
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill the process with SIGKILL, to simulate a crash."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def place_order(self, order_id: str, item: str) -> None:
        """Send an order; raise `HTTPError` if the shop does not accept it."""
        body = json.dumps({"item": item}).encode()
        with urlopen(Request(f"{self.url}/orders/{order_id}", body, method="PUT")) as response:
            assert response.status == 200

    def _answers(self) -> bool:
        try:
            urlopen(f"{self.url}/openapi.json").close()
        except (URLError, HTTPError):
            return False
        return True


@contextmanager
def shop_and_servers() -> Iterator[tuple[Shop, dict[str, str]]]:
    """Start servers in a temporary folder, create tables and streams, and start the shop."""
    with (
        tempfile.TemporaryDirectory() as folder,
        NatsServer(Path(folder) / "nats") as nats,
        PostgresServer(Path(folder) / "postgres") as postgres,
    ):
        environment = os.environ | {
            "POSTROOM_NATS__URL": nats.url,
            "POSTROOM_MESSAGING__DATABASE": postgres.create_database(),
            "POSTROOM_INBOX__SIGNING_KEY": secrets.token_hex(32),
        }
        shop = Shop(environment)
        environment["POSTROOM_INBOX__HANDLER"] = f"{shop.url}/handle"
        environment["POSTROOM_INBOX__ALLOW"] = f"{shop.url}/handle 127.0.0.0/8"
        try:
            postroom(environment, "migrate")
            postroom(environment, "streams", "apply", "--yes")
            shop.start()
            yield shop, environment
        finally:
            shop.kill()


def postroom(environment: dict[str, str], *arguments: str) -> str:
    """Run the command line with the shop's settings and return its output."""
    command = [str(POSTROOM), *arguments, "--config", str(HERE / "postroom.toml")]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def count(environment: dict[str, str]) -> Iterator[tuple[str, int]]:
    """Yield the number of orders, events, inbox rows and shipments."""
    streams = json.loads(postroom(environment, "streams", "list", "--json"))["streams"]
    with psycopg.connect(environment["POSTROOM_MESSAGING__DATABASE"]) as database:
        (orders,), (inbox,), (shipments,) = (
            database.execute(f"SELECT count(*) FROM {table}").fetchall()[0]
            for table in ("orders", "inbox_messages", "shipments")
        )
    yield "orders", orders
    yield "events on the stream", next(each["messages"] for each in streams if each["name"] == "SHOP_EVENTS")
    yield "inbox rows", inbox
    yield "shipments", shipments


def main() -> None:
    """Run the scenario."""
    with shop_and_servers() as (shop, environment):
        shop.place_order("1001", "a lamp")
        print("Order 1001 and its event are committed; nothing is published yet.")
        shop.kill()
        print("The shop was killed (kill -9).")
        shop.start()
        shop.place_order("1001", "a lamp")
        print("The shop was restarted, and the customer sent order 1001 again.")
        print("relay:  ", postroom(environment, "outbox", "relay", "--once").strip())
        print("worker: ", postroom(environment, "inbox", "consume", "--once").strip())
        print()
        for name, number in count(environment):
            print(f"{name:<22}{number:>3}")


if __name__ == "__main__":
    main()
