"""The server keeps its contract for every scope of a token: no defect, no undocumented answer, no bypass.

`POSTROOM_SCOPE_EXAMPLES` is the number of examples of each call, each of which is made with every scope.
"""

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import BaseSchema, checks

from postroom.adapters.compose.access import open_capabilities, open_key_ring
from postroom.domain.capability.rights import Right, Rights
from tests.integration.http_server.contract import CONTRACT, names_of_calls, try_call
from tests.support.access_matrix import FOREIGN, Scope, http_cases, known_of_nothing
from tests.support.servers.http import TIMEOUT_SECONDS, PostroomServer

EXAMPLES = int(os.environ.get("POSTROOM_SCOPE_EXAMPLES", "1"))
PHASES = (Phase.generate,) if EXAMPLES == 1 else tuple(Phase)
"""The explicit examples of the contract are many, and test_contract.py has them."""
SHORT_WAIT_MS = 10
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
ALL = frozenset(Right)
SCOPES = {
    "none": Scope(None),
    "junk": Scope(None),
    "send": Scope(frozenset({Right.SEND})),
    "consumer": Scope(frozenset({Right.RECV, Right.ACK, Right.NACK, Right.EXTEND})),
    "reader": Scope(frozenset({Right.READ_HEADERS, Right.READ_PAYLOAD})),
    "topic": Scope(ALL, topics=True),
    "mailbox": Scope(ALL, mailbox=False),
    "all but admin": Scope(ALL - {Right.ADMIN}),
}
NEEDS = {
    each.name: min(
        (other.needs for other in http_cases(known_of_nothing()) if other.name == each.name), key=len
    )
    for each in http_cases(known_of_nothing())
}
"""The operations that a call needs at least."""
PUBLIC = {"GET /healthz", "GET /readyz", "GET /openapi.json"}

config = schemathesis.Config.from_dict(
    {"phases": {"examples": {"enabled": False}, "coverage": {"enabled": False}}}
)


@pytest.fixture(scope="module")
def schema() -> BaseSchema:
    return schemathesis.openapi.from_path(CONTRACT, config=config if EXAMPLES == 1 else None)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PostroomServer, dict[str, str | None]]]:
    """A server that asks for tokens, with a message of a topic that not all of them cover; and the tokens."""
    folder = tmp_path_factory.mktemp("scopes")
    store = str(folder / "store.db")
    tokens: dict[str, str | None] = {"none": None, "junk": "prm1_junk"}
    with open_capabilities(store, open_key_ring(store)) as capabilities:
        capabilities.rotate()
        for name, (operations, is_limited, covers_mailbox) in SCOPES.items():
            if operations is not None:
                mailboxes = ("*",) if covers_mailbox else ("another",)
                rights = Rights(mailboxes, ("orders.*",) if is_limited else ("*",), tuple(operations))
                tokens[name] = capabilities.issue(name, rights)
    with PostroomServer(folder, store, dev=False) as server:
        sent = {"topic": FOREIGN, "payload_b64": "eA=="}
        headers = {"Authorization": f"Bearer {tokens['all but admin']}"}
        assert server.call("POST", "/v1/send", sent, headers).status == 200
        yield server, tokens


@pytest.mark.parametrize("call", names_of_calls())
def test_each_scope_gets_documented_answers_and_nothing_that_it_does_not_cover(
    call: str, schema: BaseSchema, place: tuple[PostroomServer, dict[str, str | None]]
) -> None:
    try_call(schema, call, check_answers, {"place": place})


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=PHASES,
)
def check_answers(case: Any, place: tuple[PostroomServer, dict[str, str | None]]) -> None:
    server, tokens = place
    if isinstance(case.body, dict) and case.path.startswith("/v1/recv"):
        case.body["wait_ms"] = SHORT_WAIT_MS
    for header in [each for each in case.headers or {} if each.lower() == "authorization"]:
        del case.headers[header]
    call = f"{case.method.upper()} {case.path}"
    named = json.dumps([case.path_parameters, case.query, case.body], default=str)
    for name, scope in SCOPES.items():
        headers = {} if tokens[name] is None else {"Authorization": f"Bearer {tokens[name]}"}
        answer = case.call_and_validate(
            base_url=server.address, timeout=TIMEOUT_SECONDS, checks=CHECKS, headers=headers
        )
        if call not in NEEDS:  # it is public, or there is none of this method
            assert call in PUBLIC or answer.status_code >= 400, (call, answer.text)
            continue
        operations = scope.operations if scope.mailbox else frozenset[Right]()
        if operations is None or not operations.issuperset(NEEDS[call]):
            is_refused = answer.status_code >= 400 or answer.text.startswith('{"error"')  # a stream has begun
            assert is_refused, (name, answer.text)
        if scope.topics and FOREIGN not in named:
            assert FOREIGN not in answer.text, (name, answer.text)
