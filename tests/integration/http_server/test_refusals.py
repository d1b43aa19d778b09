"""Requests that the HTTP interface refuses, and what they leave behind: nothing."""

from pathlib import Path

import pytest

from postroom.adapters.compose.access import open_capabilities, open_key_ring
from tests.support.http_messages import message, topic
from tests.support.servers.http import PostroomServer


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "Content-Type"),
        (b"{", "truncated"),
        (b"[]", "length"),
        (b'{"topic": "t"}', "payload_b64"),
        (b'{"topic": "t", "payload_b64": "", "x": 1}', "unknown field `x`"),
        (b'{"topic": "t", "topic": "u", "payload_b64": ""}', "twice"),
        (b'{"topic": "t", "payload_b64": "", "attrs": {"a": "1", "a": "2"}}', "twice"),
        (b'{"topic": "t", "payload_b64": "", "idem_key": "a\\u0000b"}', "NUL"),
        (b'{"topic": "t", "payload_b64": "", "attrs": {"a": "\\u0000"}}', "NUL"),
        (b'{"topic": "t", "payload_b64": "", "priority": 11}', "<= 10"),
        (b'{"topic": "t", "payload_b64": "", "ttl_seconds": 99999999999999999999999}', "ttl_seconds"),
        (b'{"topic": "t", "payload_b64": "", "ttl_seconds": 1e400}', "invalid"),
        (b'{"topic": "t", "payload_b64": "QQ"}', "base64"),
        (b'{"topic": "\\ud800", "payload_b64": ""}', "invalid"),
        (b'{"topic": "t", "payload_b64": "", "x": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "unknown"),
        (b'{"topic": "t", "payload_b64": "", "attrs": ' + b'{"a":' * 10_000, "attrs"),
        (b"[" * 10_000, "invalid"),
    ],
)
def test_a_malformed_body_is_refused_and_leaves_no_trace(
    server: PostroomServer, body: bytes, text: str
) -> None:
    headers = {"Content-Type": "application/json"} if body else {"Content-Type": "text/plain"}
    answer = server.call("POST", "/v1/send", body, headers)
    assert answer.status in (400, 415), answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert text in answer.json["message"]
    assert server.call("GET", "/v1/backlog?topic=t").json["shards"] == []


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=x", "nope=1", "topic=a&topic=b", "cursor=-1", "%ff=1", "topic=%00", "x", "at="],
)
def test_a_malformed_parameter_is_refused(server: PostroomServer, query: str) -> None:
    answer = server.call("GET", f"/v1/dlq?{query}")
    assert (answer.status, answer.json["code"]) == (400, "E_SCHEMA")


def test_what_is_not_there_is_not_found_and_other_methods_are_not_allowed(server: PostroomServer) -> None:
    assert server.call("GET", "/nothing").status == 404
    wrong = server.call("DELETE", "/v1/send")
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    assert server.call("HEAD", "/healthz").status == 200


def test_a_body_must_be_declared_as_json(server: PostroomServer) -> None:
    answer = server.call("POST", "/v1/send", b"{}", {"Content-Type": "text/plain"})
    assert (answer.status, answer.json["code"]) == (415, "E_MEDIA_TYPE")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "10.0.0.1", ""])
def test_a_host_that_is_not_this_machine_is_refused(server: PostroomServer, host: str) -> None:
    assert server.call("GET", "/healthz", headers={"Host": host}).status == 421


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:3000"])
def test_a_web_page_cannot_make_its_browser_purge_a_topic(server: PostroomServer, origin: str) -> None:
    form = {"Origin": origin, "Content-Type": "application/x-www-form-urlencoded"}
    refused = server.call("POST", f"/v1/topics/{topic()}/purge", b"", form)
    assert (refused.status, refused.json["code"]) == (403, "E_ORIGIN")
    assert server.call("GET", "/healthz", headers={"Origin": server.address}).status == 200


def test_a_body_above_the_frame_limit_is_refused(server: PostroomServer) -> None:
    answer = server.call("POST", "/v1/send", message(topic(), bytes(70_000)))
    assert (answer.status, answer.json["code"]) == (413, "E_FRAME_TOO_LARGE")


def test_a_full_shard_is_answered_429_with_a_time_to_retry(server: PostroomServer) -> None:
    name = topic()
    assert server.call("POST", "/v1/send", [message(name) for _ in range(50)]).status == 200
    full = server.call("POST", "/v1/send", message(name))
    assert (full.status, full.json["code"]) == (429, "E_SATURATED")
    assert int(full.headers["retry-after"]) >= 1
    assert full.json["retry_after_ms"] > 0


def test_the_type_of_a_problem_is_a_page_about_its_code(server: PostroomServer) -> None:
    for path in ("/nothing", "/v1/dlq?limit=0", "/v1/messages/unknown"):
        refusal = server.call("GET", path).json
        assert refusal["type"] == f"/v1/errors/{refusal['code']}"
        page = server.call("GET", refusal["type"])
        assert (page.status, page.headers["content-type"]) == (200, "text/plain; charset=utf-8")
        assert page.text.startswith(f"{refusal['code']}: ")
        assert "\n\nRemedy: " in page.text


def test_the_page_of_a_code_needs_no_token(tmp_path: Path) -> None:
    store = str(tmp_path / "store.db")
    with open_capabilities(store, open_key_ring(store)) as capabilities:
        capabilities.rotate()
    with PostroomServer(tmp_path, dev=False) as server:
        refusal = server.call("GET", "/v1/backlog")
        assert (refusal.status, refusal.json["type"]) == (401, "/v1/errors/E_CAP_AUTH")
        assert server.call("GET", refusal.json["type"]).status == 200


@pytest.mark.parametrize("code", ["E_NONE", "%00", "%ff", "..%2f..%2fetc", "E_STORE/x", "<script>"])
def test_a_code_that_does_not_exist_has_no_page(server: PostroomServer, code: str) -> None:
    answer = server.call("GET", f"/v1/errors/{code}")
    assert answer.status in (400, 404)
    assert answer.headers["content-type"] == "application/problem+json"
