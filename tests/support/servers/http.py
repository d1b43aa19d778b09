"""`postroom serve` in a process of its own, and a client that hides nothing of HTTP."""

import http.client
import json
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tests.support.servers.process import ServerProcess

TIMEOUT_SECONDS = 60.0


class Answer(NamedTuple):
    """An answer; `json` is None if it is not JSON."""

    status: int
    headers: Mapping[str, str]
    text: str
    json: Any


class PostroomServer:
    """A server over a store, at a free port of loopback or at a Unix socket.

    Arguments:
        settings: fields of `[serve]`; `policy`, `limits` and `messaging`, tables of their own; `tables`,
            others; `dev`, by default true, to ask for no tokens.
        address: where to listen.
        command_prefix: program that runs the server, such as strace, with its arguments.
    """

    def __init__(
        self,
        folder: Path,
        store: str = "store.db",
        address: str = "127.0.0.1:0",
        log_level: str = "info",
        command_prefix: Sequence[str | Path] = (),
        **settings: Any,
    ) -> None:
        self.folder = folder
        is_path = ":" not in store
        self.store = str(folder / store) if is_path else store  # an absolute path stays itself
        folder.mkdir(exist_ok=True)
        config, is_dev = folder / "postroom.toml", settings.pop("dev", True)
        own = ("policy", "limits", "messaging")
        tables: dict[str, Any] = {each: settings.pop(each) for each in own if each in settings}
        tables |= settings.pop("tables", {})
        tables["serve"] = {"http": address} | settings
        config.write_text(
            "\n".join(
                f"[{name}]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in table.items())
                for name, table in tables.items()
            )
        )
        self._log = folder / "server.log"
        command: list[str | Path] = [
            *command_prefix,
            Path(sys.executable).parent / "postroom",
            *(
                "serve",
                *(("--dev",) if is_dev else ()),
                "--json",
                "--log-level",
                log_level,
                "--config",
                config,
                "--store",
                self.store,
            ),
        ]
        self.process = ServerProcess("postroom serve", command, self._log)
        self.addresses: list[str] = []

    def __enter__(self) -> "PostroomServer":
        self._log.write_bytes(b"")
        self.process.start(self._is_ready, TIMEOUT_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stop()

    @property
    def address(self) -> str:
        """Return the address of HTTP."""
        return self.addresses[0]

    @property
    def log(self) -> str:
        """Return what the server wrote."""
        return self._log.read_text()

    @property
    def port(self) -> int:
        """Return the port."""
        return urlsplit(self.address).port or 0

    def call(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Make a call with a JSON body, or with bytes as they are."""
        connection = self.connect()
        try:
            sent = dict(headers or {})
            if body is not None and not isinstance(body, bytes):
                body = json.dumps(body).encode()
            if body is not None:
                sent = {"Content-Type": "application/json"} | sent
            connection.request(method, path, body, sent)
            response = connection.getresponse()
            text = response.read().decode()
            kind = response.headers.get_content_type()
            parsed = json.loads(text) if kind.endswith("json") and text else None
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, text, parsed)
        finally:
            connection.close()

    def connect(self) -> http.client.HTTPConnection:
        """Return a client's connection."""
        if self.address.startswith("http+unix:"):
            return _UnixConnection(self.address.removeprefix("http+unix:"))
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_SECONDS)

    def raw(self) -> socket.socket:
        """Return a connected socket."""
        return socket.create_connection(("127.0.0.1", self.port), TIMEOUT_SECONDS)

    def _is_ready(self) -> bool:
        for line in self._log.read_text().splitlines():
            if line.startswith("{") and "addresses" in line:
                self.addresses = json.loads(line)["addresses"]
                return True
        return False


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_SECONDS)
        self._path = path

    def connect(self) -> None:
        """Connect to the path."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_SECONDS)
        self.sock.connect(self._path)


def receive_all(raw: socket.socket) -> bytes:
    """Return what a server sends until it closes the connection."""
    received = b""
    try:
        while piece := raw.recv(65_536):
            received += piece
    except ConnectionResetError:
        pass
    return received
