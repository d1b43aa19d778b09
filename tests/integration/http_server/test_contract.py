"""The server keeps its contract whatever is sent: no defect, and no answer that is not documented."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import BaseSchema, checks

from tests.integration.http_server.contract import names_of_calls, read_contract, try_call
from tests.support.servers.http import TIMEOUT_SECONDS, PostroomServer

SHORT_WAIT_MS, MAX_WAIT_MS = 10, 60_000
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
    checks.allow_header_conformance,
]
REFUSALS = ["400", "404", "405", "409", "413", "415", "429"]

config = schemathesis.Config.from_dict(
    {"checks": {"negative_data_rejection": {"expected-statuses": REFUSALS}}}
)


def contract_without_tokens() -> dict[str, Any]:
    """Return the contract as a server keeps it that asks for no capability (`--dev`)."""
    contract = read_contract()
    contract.pop("security", None)
    for path in contract["paths"].values():
        for call in path.values():
            call.pop("security", None)
    return contract


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostroomServer]:
    """A server with its usual time limits, since a busy machine may take long to send a request."""
    policy = {"visibility": "30s", "shards": 1, "shard_capacity": 50}
    with PostroomServer(tmp_path_factory.mktemp("server"), frame_bytes=65_536, policy=policy) as running:
        yield running


@pytest.fixture(scope="module")
def schema() -> BaseSchema:
    return schemathesis.openapi.from_dict(contract_without_tokens(), config=config)


@pytest.mark.parametrize("call", names_of_calls())
def test_no_call_fails_or_is_answered_otherwise_than_documented(
    call: str, schema: BaseSchema, server: PostroomServer
) -> None:
    try_call(schema, call, check_answer, {"server": server})


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
def check_answer(case: Any, server: PostroomServer) -> None:
    if isinstance(case.body, dict) and case.path.startswith("/v1/recv"):
        wait_ms = case.body.get("wait_ms")
        if wait_ms is None or (type(wait_ms) is int and SHORT_WAIT_MS < wait_ms <= MAX_WAIT_MS):
            case.body["wait_ms"] = SHORT_WAIT_MS
    case.call_and_validate(base_url=server.address, timeout=TIMEOUT_SECONDS, checks=CHECKS)
