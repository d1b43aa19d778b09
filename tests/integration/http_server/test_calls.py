"""The calls of the HTTP interface, over a real server."""

import time
import uuid
from base64 import b64decode
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

import pytest

from postroom.application.cloudevents import NATS, Mode
from tests.support.archived import sdk_event
from tests.support.cloud_events import write_by_sdk
from tests.support.http_messages import message, receive, send, topic
from tests.support.servers.http import PostroomServer

# -- send ---


def test_a_message_is_sent_received_and_acked(server: PostroomServer) -> None:
    name = topic()
    sent = server.call("POST", "/v1/send", message(name, b"\x00\xff", idem_key="k", attrs={"a": "b"}))
    assert (sent.status, sent.json["duplicate"]) == (200, False)
    (received,) = receive(server, name, visibility_ms=5_000)
    assert {received["message_id"], received["msg_id"], sent.json["msg_id"]} == {sent.json["message_id"]}
    assert received["correlation_id"] == received["corr_id"]
    since_1970 = datetime.fromisoformat(received["ts"]) - datetime(1970, 1, 1, tzinfo=UTC)
    assert since_1970 // timedelta(milliseconds=1) == received["timestamp"]
    assert received["payload_b64"] == "AP8="
    assert received["attrs"] == {"a": "b"}
    assert (received["idem_key"], received["attempt"]) == ("k", 1)
    assert received["payload_hash"].startswith("b3:")
    ack = f"/v1/ack/{received['msg_id']}"
    for _ in range(2):
        assert server.call("POST", ack, {"receipt": received["receipt"]}).json == {"ok": True}
    assert receive(server, name) == []


def test_a_repeated_send_is_a_duplicate_or_a_conflict_if_the_caller_asks_for_it(
    server: PostroomServer,
) -> None:
    body = message(topic(), idem_key="once")
    first = server.call("POST", "/v1/send", body)
    again = server.call("POST", "/v1/send", body)
    assert again.json == first.json | {"duplicate": True}
    conflict = server.call("POST", "/v1/send", body, {"X-Idempotency-Mode": "409-conflict"})
    assert (conflict.status, conflict.json["code"]) == (409, "E_DUPLICATE")
    assert conflict.json["message_id"] == conflict.json["msg_id"] == first.json["msg_id"]
    assert server.call("POST", "/v1/send", body, {"X-Idempotency-Mode": "yes"}).status == 400


@pytest.mark.parametrize("mode", ["binary", "structured"])
def test_a_cloud_event_of_the_official_sdk_is_sent_once(server: PostroomServer, mode: Mode) -> None:
    name = topic()
    event = sdk_event(name, {"total": 12}, type=name, datacontenttype="application/json", partitionkey="o-1")
    request = write_by_sdk(event, NATS, mode)  # its headers are those of HTTP
    sent, again = (server.call("POST", "/v1/send", request.payload, request.headers) for _ in range(2))
    id_ = f"/shop|{name}"
    assert (sent.status, sent.json) == (200, {"message_id": id_, "duplicate": False, "msg_id": id_})
    assert again.json == sent.json | {"duplicate": True}
    (received,) = receive(server, name)
    assert b64decode(received["payload_b64"]) == b'{"total": 12}'
    assert received["attrs"]["ce_subject"] == "Größe 100%"
    invalid = {name: value for name, value in request.headers.items() if name != "ce-source"}
    refused = server.call("POST", "/v1/send", b"{}", invalid)
    assert (refused.status, refused.json["code"]) == (400, "E_SCHEMA")
    assert "CloudEvent" in refused.json["message"]


def test_only_a_send_takes_cloud_events_and_no_batch(server: PostroomServer) -> None:
    batch = {"Content-Type": "application/cloudevents-batch+json"}
    assert "batch" in server.call("POST", "/v1/send", b"[]", batch).json["message"]
    event = {"Content-Type": "application/cloudevents+json"}
    assert server.call("POST", "/v1/recv", b"{}", event).status == 415


def test_a_list_is_answered_for_each_of_its_messages(server: PostroomServer) -> None:
    name = topic()
    body = [message(name, idem_key="a"), message("no spaces"), message(name, idem_key="a")]
    answer = server.call("POST", "/v1/send", body)
    sent, refused, duplicate = answer.json["results"]
    assert (answer.status, sent["duplicate"], duplicate["duplicate"]) == (200, False, True)
    assert refused["error"]["code"] == "E_SCHEMA"
    assert duplicate["message_id"] == duplicate["msg_id"] == sent["msg_id"] == sent["message_id"]


def test_binary_attributes_are_sent_in_base64(server: PostroomServer) -> None:
    name = topic()
    send(server, name, attrs={"text": "ü"}, attrs_b64={"raw": "AP8="})
    (received,) = receive(server, name)
    assert received["attrs"] == {"text": "ü", "raw": "base64:AP8="}


# -- recv ---


def test_a_long_poll_returns_as_soon_as_there_is_a_message(server: PostroomServer) -> None:
    assert receive(server, topic(), wait_ms=10) == []
    name = topic()
    send(server, name, deliver_after_ms=200)
    assert len(receive(server, name, wait_ms=30_000)) == 1


def test_a_receive_takes_several_topics(server: PostroomServer) -> None:
    first, second = topic(), topic()
    send(server, first), send(server, second)
    assert {each["topic"] for each in receive(server, [first, second])} == {first, second}  # type: ignore[arg-type]


def test_a_receive_returns_envelopes_to_those_who_ask_for_them(server: PostroomServer) -> None:
    name = topic()
    send(server, name, content_type="text/plain")
    (received,) = receive(server, name, with_envelope=True)
    assert received["envelope_b64"]
    assert "payload_b64" not in received


def test_a_message_whose_poller_has_gone_goes_to_the_next_one(server: PostroomServer) -> None:
    name = topic()
    gone = server.connect()
    body = f'{{"topic": "{name}", "wait_ms": 60000}}'.encode()
    gone.request("POST", "/v1/recv", body, {"Content-Type": "application/json"})
    time.sleep(0.3)
    gone.close()
    time.sleep(0.3)
    send(server, name)
    (received,) = receive(server, name, wait_ms=5_000)
    assert received["attempt"] == 1


# -- settling ---


def test_a_nacked_message_is_delivered_again(server: PostroomServer) -> None:
    name = topic()
    id_ = send(server, name)
    (received,) = receive(server, name)
    body = {"receipt": received["receipt"], "reason": "no stock", "delay_ms": 0}
    assert server.call("POST", f"/v1/nack/{id_}", body).json == {"ok": True}
    (again,) = receive(server, name, wait_ms=5_000)
    assert again["attempt"] == 2


def test_without_a_receipt_the_latest_delivery_is_settled(server: PostroomServer) -> None:
    name = topic()
    id_ = send(server, name)
    early = server.call("POST", f"/v1/ack/{id_}")
    assert (early.status, early.json["code"]) == (409, "E_STALE_RECEIPT")
    receive(server, name)
    assert server.call("POST", f"/v1/extend/{id_}", {"visibility_ms": 1_000}).json == {"ok": True}
    assert server.call("POST", f"/v1/nack/{id_}", {"delay_ms": 0}).json == {"ok": True}
    receive(server, name, wait_ms=5_000)
    for _ in range(2):
        assert server.call("POST", f"/v1/ack/{id_}").json == {"ok": True}


def test_a_stale_receipt_is_a_conflict_and_an_unknown_message_is_not_found(server: PostroomServer) -> None:
    name = topic()
    id_ = send(server, name)
    (first,) = receive(server, name)
    server.call("POST", f"/v1/nack/{id_}", {"receipt": first["receipt"], "delay_ms": 0})
    receive(server, name, wait_ms=5_000)
    stale = server.call("POST", f"/v1/ack/{id_}", {"receipt": first["receipt"]})
    assert (stale.status, stale.json["code"]) == (409, "E_STALE_RECEIPT")
    unknown = server.call("POST", f"/v1/ack/{uuid.uuid4()}")
    assert (unknown.status, unknown.json["code"]) == (404, "E_NOT_FOUND")
    other = server.call("POST", f"/v1/ack/{uuid.uuid4()}", {"receipt": first["receipt"]})
    assert (other.status, other.json["code"]) == (400, "E_SCHEMA")


def test_a_message_id_may_contain_slashes_and_spaces(server: PostroomServer) -> None:
    name, id_ = topic(), f"order/7 of {uuid.uuid4()}"
    assert send(server, name, message_id=id_) == id_
    receive(server, name)
    path = id_.replace("/", "%2F").replace(" ", "%20")
    assert server.call("POST", f"/v1/ack/{path}").json == {"ok": True}
    assert server.call("GET", f"/v1/messages/{path}").json["status"] == "acked"


def test_many_deliveries_are_settled_at_once(server: PostroomServer) -> None:
    name = topic()
    for _ in range(3):
        send(server, name)
    receipts = [each["receipt"] for each in receive(server, name)]
    extended = server.call("POST", "/v1/extend", {"receipts": receipts, "visibility_ms": 10_000})
    assert [each["ok"] for each in extended.json["results"]] == [True] * 3
    assert server.call("POST", "/v1/nack", {"receipts": receipts[:1], "delay_ms": 60_000}).status == 200
    first, second, third = server.call("POST", "/v1/ack", {"receipts": receipts}).json["results"]
    assert first["error"]["code"] == "E_STALE_RECEIPT"
    assert second == third == {"ok": True}


# -- operators ---


def test_dead_letters_are_listed_in_pages_and_redriven(server: PostroomServer) -> None:
    name = topic()
    assert server.call("PUT", f"/v1/topics/{name}/policy", {"max_attempts": 1, "shards": 1}).status == 200
    assert server.call("GET", f"/v1/topics/{name}/policy").json["policy"]["max_attempts"] == 1
    for _ in range(3):
        send(server, name)
    receipts = [each["receipt"] for each in receive(server, name)]
    server.call("POST", "/v1/nack", {"receipts": receipts, "reason": "poison"})
    page = server.call("GET", f"/v1/dlq?topic={name}&limit=2").json
    rest = server.call("GET", f"/v1/dlq?topic={name}&limit=2&cursor={page['next_cursor']}").json
    assert [each["last_error"] for each in page["items"] + rest["items"]] == ["poison"] * 3
    assert rest["next_cursor"] is None
    redriven = server.call("POST", "/v1/dlq/reprocess", {"topic": name, "limit": 2})
    assert redriven.json == {"redriven": 2}
    assert len(receive(server, name)) == 2
    assert server.call("POST", f"/v1/topics/{name}/purge").json == {"removed": 1}


def test_the_backlog_counts_by_topic_and_shard_now_and_in_the_past(server: PostroomServer) -> None:
    name = topic()
    before = server.call("GET", f"/v1/backlog?topic={name}").json
    send(server, name)
    (row,) = server.call("GET", f"/v1/backlog?topic={name}").json["shards"]
    assert (row["topic"], row["ready"], row["in_flight"]) == (name, 1, 0)
    assert server.call("GET", f"/v1/backlog?topic={name}&at={before['position']}").json["shards"] == []
    assert server.call("GET", "/v1/backlog?at=2999-01-01T00:00:00Z").json["code"] == "E_SCHEMA"


def test_a_message_is_shown_and_explained(server: PostroomServer) -> None:
    name = topic()
    id_ = send(server, name, principal="ann")
    assert server.call("GET", f"/v1/peek?topic={name}").json["messages"][0]["payload"] == "aGVsbG8="
    receive(server, name)
    detail = server.call("GET", f"/v1/messages/{id_}").json
    assert [each["event"] for each in detail["history"]] == ["MessageSent", "MessageReceived"]
    assert detail["item"]["principal"] == "ann"
    assert detail["envelope_b64"]
    assert server.call("GET", f"/v1/messages/{id_}/explanation").json["deliveries"]
    assert server.call("GET", "/v1/messages/none").status == 404


def test_a_search_needs_read_models(server: PostroomServer) -> None:
    answer = server.call("GET", "/v1/messages?topics=a&topics=b&headers[tenant]=acme&limit=5")
    assert (answer.status, answer.json["code"]) == (404, "E_NOT_FOUND")


# -- correlation, state, log ---


def test_the_correlation_id_is_echoed_or_made(server: PostroomServer) -> None:
    assert server.call("GET", "/healthz", headers={"X-Corr-Id": "mine"}).headers["x-corr-id"] == "mine"
    made = server.call("GET", "/nothing")
    assert uuid.UUID(made.headers["x-corr-id"]).version == 7
    assert made.json["corr_id"] == made.headers["x-corr-id"]
    assert server.call("GET", "/healthz", headers={"X-Corr-Id": "x" * 200}).status == 400
    name = topic()
    server.call("POST", "/v1/send", message(name), {"X-Corr-Id": "order-7"})
    assert receive(server, name)[0]["corr_id"] == "order-7"


def test_the_state_of_the_service_is_told(server: PostroomServer) -> None:
    name = topic()
    send(server, name)
    health = server.call("GET", "/healthz")
    assert health.json == {"ok": True}
    assert parsedate_to_datetime(health.headers["date"]).year > 2000
    assert server.call("GET", "/readyz").json == {"degraded": False, "missing": [], "writes": True}
    assert server.call("GET", "/v1/mailbox").json == {"mailbox": "main@local", "dlq_profile": "durable"}
    metrics = server.call("GET", "/metrics").text
    assert f'postroom_queue_depth{{shard="0",topic="{name}"}} 1.0' in metrics
    assert f'postroom_saturation{{shard="0",topic="{name}"}} 0.02' in metrics
    assert "postroom_enqueue_seconds_bucket" in metrics


def test_a_topic_is_paused_listed_and_resumed_and_its_dead_letterings_are_counted(
    server: PostroomServer,
) -> None:
    name = topic()
    server.call("PUT", f"/v1/topics/{name}/policy", {"max_attempts": 1})
    send(server, name)
    server.call("POST", "/v1/nack", {"receipts": [receive(server, name)[0]["receipt"]]})
    assert server.call("PUT", f"/v1/topics/{name}/pause").json == {"ok": True}
    (listed,) = [each for each in server.call("GET", "/v1/topics").json["topics"] if each["topic"] == name]
    assert (listed["paused"], listed["dead"], listed["policy"]["max_attempts"]) == (True, 1, 1)
    metrics = server.call("GET", "/metrics").text
    assert f'postroom_dlq_total{{reason="max_attempts",topic="{name}"}} 1.0' in metrics
    assert f'postroom_topic_paused{{topic="{name}"}} 1.0' in metrics
    assert server.call("PUT", f"/v1/topics/{name}/resume").json == {"ok": True}
    assert f'topic_paused{{topic="{name}"' not in server.call("GET", "/metrics").text
    unknown = server.call("PUT", f"/v1/topics/{name[:-1]}/pause")
    assert (unknown.status, f"did you mean {name}" in unknown.json["message"]) == (404, True)


def test_the_access_log_has_no_payloads_principals_or_tokens(server: PostroomServer) -> None:
    name = topic()
    send(server, name, b"secret payload", principal="secret-ann", idem_key="secret-key")
    headers = {"Authorization": "Bearer secret-token", "X-Corr-Id": "logged-7"}
    server.call("GET", "/v1/messages?principals=secret-ann", headers=headers)
    assert '"logged-7"' in server.log
    assert "secret" not in server.log
