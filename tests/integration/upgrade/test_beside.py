"""The last release and this version use one mailbox at the same time."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.integration.upgrade.conftest import WORKS, Version, outcome
from tests.support.servers.process import ServerProcess

ROLES = [("server", "client"), ("client", "server")]
"""What the last release is, and what this version."""


class Served(NamedTuple):
    """Addresses of a mailbox whose owner is a server."""

    store: str
    http: str
    grpc: str


@contextmanager
def serving(version: Version, folder: Path) -> Iterator[Served]:
    """Serve a mailbox by a version, which also answers processes that open its store."""
    store = folder / "shop.db"
    options = ["--dev", "--json", "--store", store, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    with running(version, folder / "server.log", "serve", *options) as report:
        yield Served(str(store), *report["addresses"])


@contextmanager
def running(version: Version, log: Path, *arguments: object) -> Iterator[dict[str, Any]]:
    """Run a command of a version, and yield the report that it prints when it is ready."""
    command: list[str | Path] = [version.programs / "postroom", *map(str, arguments)]
    server = ServerProcess(str(arguments[0]), command, log)
    log.touch()

    def reports() -> list[dict[str, Any]]:
        lines = (json.loads(line) for line in log.read_text("utf-8").splitlines() if line.startswith("{"))
        return [each for each in lines if "event" not in each]

    server.start(lambda: bool(reports()))
    try:
        yield reports()[0]
    finally:
        server.stop()


@pytest.mark.parametrize(("first", "second"), ROLES)
def test_a_client_calls_every_operation_of_the_last_release_at_a_server_of_the_other_version(
    first: str, second: str, former: Version, present: Version, tmp_path: Path
) -> None:
    server, client = (former, present) if first == "server" else (present, former)
    with serving(server, tmp_path) as served:
        for surface, address in (
            ("local socket", served.store),
            ("HTTP", served.http),
            ("gRPC", served.grpc),
        ):
            calls = client.run("call", address)
            assert len(calls) > 40
            assert {name: each for name, each in calls.items() if each != WORKS} == {}, surface
            assert outcome(surface, first, second) == WORKS
