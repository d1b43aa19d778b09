"""A server for clients of SQS, and clients of each protocol."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.servers.http import PostroomServer
from tests.support.sqs import (
    PROTOCOLS,
    SQS,
    new_queue,
    sqs_client,
    token,
)


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostroomServer]:
    """A server of a mailbox for HTTP and for clients of SQS."""
    with PostroomServer(tmp_path_factory.mktemp("sqs"), sqs=SQS, console=False) as running:
        yield running


@pytest.fixture(scope="package")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostroomServer]:
    """A server that asks for access keys."""
    folder = tmp_path_factory.mktemp("checked")
    token(folder, "rotate")
    with PostroomServer(folder, sqs=SQS, console=False, dev=False) as running:
        yield running


@pytest.fixture(scope="package")
def clients(server: PostroomServer) -> dict[str, Any]:
    """A client of each protocol."""
    return {protocol: sqs_client(server.addresses[1], protocol) for protocol in PROTOCOLS}


@pytest.fixture(params=PROTOCOLS)
def client(request: pytest.FixtureRequest, clients: dict[str, Any]) -> Any:
    """A client of one protocol."""
    return clients[request.param]


@pytest.fixture
def url(client: Any) -> str:
    """URL of a new queue."""
    return new_queue(client)
