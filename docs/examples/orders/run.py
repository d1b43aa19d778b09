"""Place an order, kill the shop before its event is published, start it again, and count what came of it."""

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

from postroom.adapters.compose.embedded import NatsServer, PostgresServer
from postroom.adapters.embedded.process import free_port

HERE = Path(__file__).parent
POSTROOM = Path(sys.executable).with_name("postroom")
PATIENCE_SECONDS = 60


class Shop:
    """The shop's process.

    Arguments:
        environment: where its database is, and the key of what comes in.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        command = [sys.executable, "-m", "uvicorn", "service:app", "--port", str(self.port)]
        self._process = subprocess.Popen(
            [*command, "--log-level", "warning"], cwd=HERE, env=self._environment
        )
        until = time.monotonic() + PATIENCE_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                raise SystemExit("The shop did not start.")
            time.sleep(0.05)

    def kill(self) -> None:
        """End it as a crash does: kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def place_order(self, order_id: str, item: str) -> None:
        """Send an order and wait until the shop has taken it."""
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
    """Have real servers in a temporary folder, the tables and streams of the shop, and the shop."""
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
    """Run the command line with the shop's settings and return what it said."""
    command = [str(POSTROOM), *arguments, "--config", str(HERE / "postroom.toml")]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def count(environment: dict[str, str]) -> Iterator[tuple[str, int]]:
    """Count what there is of everything."""
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
    """Tell the story."""
    with shop_and_servers() as (shop, environment):
        shop.place_order("1001", "a lamp")
        print("Order 1001 is committed, and its event with it; nothing is published yet.")
        shop.kill()
        print("The shop was killed (kill -9).")
        shop.start()
        shop.place_order("1001", "a lamp")
        print("It runs again, and the customer, who isn't sure, has sent order 1001 again.")
        print("relay:  ", postroom(environment, "outbox", "relay", "--once").strip())
        print("worker: ", postroom(environment, "inbox", "consume", "--once").strip())
        print()
        for what, number in count(environment):
            print(f"{what:<22}{number:>3}")


if __name__ == "__main__":
    main()
