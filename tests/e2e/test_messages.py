import signal

import pytest

from tests.e2e.conftest import TIMEOUT_SECONDS
from tests.projections.histories import build_without_spark
from tests.support.waiting import wait_until


def events(postroom, message_id):
    return [entry["event"] for entry in postroom.ok("show", message_id, "--json").json["history"]]


def test_a_message_goes_from_process_to_process_until_it_is_settled(postroom):
    sent = postroom.ok(
        "send", "orders", "-", "--key", "customer-7", "--attr", "region=eu", "--json", stdin=b"a chair"
    )

    (received,) = postroom.ok("recv", "orders", "--json", "--consumer", "worker-1").lines
    settled = postroom.ok("ack", received["receipt"], "--json").json

    message_id = sent.json["message_id"]
    assert sent.json == {"message_id": message_id, "duplicate": False}
    assert (received["message_id"], received["payload"], received["attempt"]) == (message_id, "a chair", 1)
    assert received["attrs"] == {"region": "eu"}
    assert settled == [{"receipt": received["receipt"], "ok": True}]
    assert postroom("recv", "orders").code == 3
    assert events(postroom, message_id) == ["MessageSent", "MessageReceived", "MessageAcked"]


def test_the_facts_of_a_message_have_one_name_each_in_json(postroom):
    postroom.ok("topic", "policy", "orders", "max_attempts=1")
    id_ = postroom.ok("send", "orders", "x", "--correlation-id", "order-7", "--json").json["message_id"]
    (peeked,) = postroom.ok("peek", "orders", "--json").lines
    (received,) = postroom.ok("recv", "orders", "--json").lines
    postroom.ok("nack", received["receipt"])
    (letter,) = postroom.ok("dlq", "list", "--json").json["dead_letters"]
    shown = postroom.ok("show", id_, "--json").json
    build_without_spark(postroom.store)
    (found,) = postroom.ok("search", "--json").lines
    (*_, logged) = postroom.ok("log", "show", "--json").lines

    assert {each["message_id"] for each in (peeked, received, letter, shown, found, logged)} == {id_}
    for name in ("message_id", "timestamp", "correlation_id"):
        assert received[name] == shown["headers"][name] == found[name], name
    assert {"msg_id", "ts", "corr_id"}.isdisjoint(received)


def test_a_payload_of_any_bytes_comes_back_byte_for_byte(postroom):
    payload = bytes(range(256))
    message_id = postroom.ok("send", "blobs", "-", stdin=payload).out.strip()

    (received,) = postroom.ok("recv", "blobs", "--ack", "--json").lines

    assert "payload" not in received
    assert received["payload_b64"].startswith("AAECAwQF")
    shown = postroom.ok("show", message_id, "--json").json
    assert (shown["payload_b64"], shown["status"]) == (received["payload_b64"], "acked")


def test_receipts_are_read_from_standard_input(postroom):
    for number in range(3):
        postroom.ok("send", "jobs", str(number))
    received = postroom.ok("recv", "jobs", "--json").lines

    tokens = "\n".join(message["receipt"] for message in received)
    settled = postroom.ok("ack", "-", "--json", stdin=tokens.encode()).json

    assert [message["payload"] for message in received] == ["0", "1", "2"]
    assert [answer["ok"] for answer in settled] == [True] * 3


def test_a_message_that_nobody_can_process_becomes_a_dead_letter_and_may_be_put_back(postroom):
    postroom.ok("topic", "policy", "mail", "max_attempts=1")
    message_id = postroom.ok("send", "mail", "{broken").out.strip()
    (received,) = postroom.ok("recv", "mail", "--json").lines

    postroom.ok("nack", received["receipt"], "--reason", "not JSON")
    (letter,) = postroom.ok("dlq", "list", "--json").json["dead_letters"]
    assert (letter["message_id"], letter["reason"], letter["last_error"]) == (
        message_id,
        "max_attempts",
        "not JSON",
    )
    assert "not JSON" in postroom.ok("dlq", "show", message_id).out

    assert postroom.ok("dlq", "redrive", "mail", "--json").json == {"redriven": 1}
    (again,) = postroom.ok("recv", "mail", "--json").lines
    assert (again["message_id"], again["attempt"]) == (message_id, 1)


def test_dead_letters_are_purged_only_when_that_is_meant(postroom):
    postroom.ok("topic", "policy", "mail", "max_attempts=1")
    postroom.ok("send", "mail", "x")
    (received,) = postroom.ok("recv", "mail", "--json").lines
    postroom.ok("nack", received["receipt"])

    unsure = postroom("dlq", "purge", "mail")
    assert (unsure.code, "--yes" in unsure.err) == (2, True)
    assert postroom.ok("dlq", "purge", "mail", "--yes", "--json").json == {"purged": 1}
    assert postroom.ok("dlq", "list", "--json").json["dead_letters"] == []


def test_a_topic_is_purged_of_ready_messages_and_dead_letters_only_when_that_is_meant(postroom):
    for payload in "abc":
        postroom.ok("send", "mail", payload)
    (received,) = postroom.ok("recv", "mail", "--max", "1", "--json").lines

    unsure = postroom("topic", "purge", "mail")
    assert (unsure.code, "--yes" in unsure.err) == (2, True)
    assert postroom.ok("topic", "purge", "mail", "--yes").out == "2 messages purged from mail\n"
    assert postroom.ok("ack", received["receipt"], "--json").json[0]["ok"]


def test_a_job_redrives_the_dead_letters_of_a_query_and_is_undone(postroom):
    postroom.ok("topic", "policy", "mail", "max_attempts=1")
    postroom.ok("send", "mail", "x", "--attr", "n=1")
    (received,) = postroom.ok("recv", "mail", "--json").lines
    postroom.ok("nack", received["receipt"], "--reason", "not JSON")

    query = ("redrive", "start", "--topic", "ma*", "--header", "n=1", "--dead-since", "1h")
    assert "1 would be selected" in postroom.ok(*query, "--dry-run").err
    assert postroom("redrive", "start", "--topic", "other", "--dry-run", "--json").json["matched"] == 0
    job = postroom.ok(*query, "--json").json
    assert (job["status"], job["moved"]) == ("completed", 1)
    assert "completed" in postroom.ok("redrive", "list").out
    undone = postroom.ok("redrive", "undo", job["job_id"]).out
    assert f"Job {job['job_id']} is undone: 1 matched, 1 restored" in undone
    copies = postroom.ok("redrive", "start", "--to", "repair", "--set-header", "by=me", "--json").json
    (done,) = postroom.ok("redrive", "show", copies["job_id"], "--messages", "--json").json["messages"]
    assert "replaced" in postroom.ok("show", done["message_id"]).out
    assert done["message_id"] in postroom.ok("show", done["copy_id"]).out
    shown = postroom.ok("redrive", "show", job["job_id"]).out
    assert ("topics" in shown, "ma*" in shown) == (True, True)
    unsure = postroom("redrive", "start", "--action", "purge")
    assert (unsure.code, "--yes" in unsure.err) == (2, True)


def test_sending_again_under_a_key_adds_nothing_and_another_payload_is_refused(postroom):
    first = postroom.ok("send", "orders", "one", "--idem-key", "k1", "--json").json
    again = postroom.ok("send", "orders", "one", "--idem-key", "k1", "--json").json
    other = postroom("send", "orders", "two", "--idem-key", "k1", "--json")

    assert again == {"message_id": first["message_id"], "duplicate": True}
    assert (other.code, other.out, other.error["code"]) == (1, "", "E_DUPLICATE")


def test_a_receipt_of_an_earlier_delivery_settles_nothing(postroom):
    postroom.ok("send", "orders", "x")
    (early,) = postroom.ok("recv", "orders", "--json").lines
    postroom.ok("nack", early["receipt"], "--delay", "0")
    (late,) = postroom.ok("recv", "orders", "--wait", "10s", "--json").lines

    stale = postroom("ack", early["receipt"], late["receipt"], "--json")

    assert stale.code == 1
    assert [(answer["ok"], answer.get("code")) for answer in stale.json] == [
        (False, "E_STALE_RECEIPT"),
        (True, None),
    ]


def test_an_extended_message_stays_hidden_for_longer(postroom):
    postroom.ok("send", "orders", "x")
    (received,) = postroom.ok("recv", "orders", "--json").lines

    postroom.ok("extend", received["receipt"], "--visibility", "10m")

    assert events(postroom, received["message_id"])[-1] == "MessageVisibilityExtended"
    assert postroom("recv", "orders").code == 3


def test_a_delayed_message_waits_in_the_backlog(postroom):
    postroom.ok("send", "orders", "x", "--delay", "1h")

    assert postroom("recv", "orders").code == 3
    (mailbox,) = postroom.ok("backlog", "--json").json["mailboxes"]
    (shard,) = mailbox["shards"]
    assert (shard["topic"], shard["ready"], shard["delayed"]) == ("orders", 0, 1)


@pytest.mark.parametrize("arguments", [("--json", "send", "orders", "x"), ("send", "orders", "x", "--json")])
def test_the_shared_options_may_stand_before_or_after_the_command(postroom, arguments):
    assert postroom.ok(*arguments).json["duplicate"] is False


def test_people_get_tables_and_lines(postroom):
    message_id = postroom.ok("send", "orders", "a chair").out.strip()

    assert "orders" in postroom.ok("backlog").out
    received = postroom.ok("recv", "orders")
    message, attempt, receipt, payload = received.out.splitlines()
    assert (message, attempt, payload) == (f"message  {message_id}", "attempt  1", "a chair")
    assert "Hidden for 30s; acknowledge with: postroom ack RECEIPT" in received.err
    assert "MessageReceived" in postroom.ok("show", message_id).out

    label, token = receipt.split()
    assert (label, postroom.ok("ack", token).out) == ("receipt", "1 acked\n")


def test_looking_five_times_makes_no_dead_letter(postroom):
    message_id = postroom.ok("send", "orders", "a chair", "--attr", "region=eu").out.strip()
    before = postroom.store.stat().st_mtime_ns, postroom.ok("show", message_id, "--json").json

    for _ in range(5):
        postroom.ok("peek", "orders")
    (peeked,) = postroom.ok("peek", "orders", "--json").lines

    sent_at = before[1]["history"][0]["at"]
    assert peeked == {
        "message_id": message_id,
        "topic": "orders",
        "shard": 6,
        "attempts": 0,
        "sent_at": sent_at,
        "attrs": {"region": "eu"},
        "payload": "a chair",
    }
    assert (postroom.store.stat().st_mtime_ns, postroom.ok("show", message_id, "--json").json) == before
    assert postroom.ok("recv", "orders", "--json").lines[0]["attempt"] == 1


def test_receiving_from_an_empty_topic_appends_nothing(postroom):
    postroom.ok("send", "orders", "x", "--delay", "1h")
    end = postroom.ok("verify", "--json").json

    for topic, reason in (
        ("orders", "no ready messages"),
        ("orders", "no ready messages"),
        ("odrers", "no topic odrers; did you mean orders?"),
    ):
        done = postroom("recv", topic)
        assert (done.code, done.out) == (3, "")
        assert reason in done.err
    assert postroom("recv", "orders", "--max", "0").code == 1
    assert postroom("recv", "orders", "--visibility", "1ms").code == 1

    assert postroom.ok("verify", "--json").json == end


def test_receiving_from_an_empty_topic_ends_what_ran_out_of_time(postroom):
    postroom.ok("topic", "policy", "jobs", "max_attempts=1")
    message_id = postroom.ok("send", "jobs", "x").out.strip()
    postroom.ok("recv", "jobs", "--visibility", "250ms")

    def has_ended() -> bool:
        assert postroom("recv", "other").code == 3
        return bool(events(postroom, message_id)[-1] == "MessageDeadLettered")

    wait_until(has_ended)


def test_peek_shows_the_next_messages_in_the_order_they_are_received(postroom):
    for number in range(4):
        postroom.ok("send", "jobs", str(number))

    shown = postroom.ok("peek", "jobs", "--max", "2").out.splitlines()

    assert [shown[2], shown[6]] == ["0", "1"]
    assert [each["payload"] for each in postroom.ok("recv", "jobs", "--max", "2", "--json").lines] == [
        "0",
        "1",
    ]
    assert [each["payload"] for each in postroom.ok("peek", "jobs", "--json").lines] == ["2", "3"]


def test_peek_shows_what_is_ready_again_because_its_visibility_ended(postroom):
    postroom.ok("send", "jobs", "x")
    postroom.ok("recv", "jobs", "--visibility", "250ms")

    wait_until(lambda: postroom("peek", "jobs").code == 0)
    (peeked,) = postroom.ok("peek", "jobs", "--json").lines

    assert (peeked["payload"], peeked["attempts"]) == ("x", 1)


def test_peek_finds_nothing_in_a_topic_whose_messages_are_in_flight_or_unknown(postroom):
    postroom.ok("send", "jobs", "x")
    postroom.ok("recv", "jobs", "--visibility", "10m")

    for topic, note in (
        ("jobs", "Topic jobs has no ready messages.\n"),
        ("unknown", "Mailbox main@local has no topic unknown; choose one of jobs.\n"),
    ):
        done = postroom("peek", topic)
        assert (done.code, done.out, done.err) == (3, "", note)
    assert postroom("peek", "jobs", "--max", "0").code == 1


def test_peek_works_beside_the_owner_of_the_mailbox(postroom):
    postroom.ok("send", "jobs", "x")
    holder = postroom.start("recv", "orders", "--wait", "60s")
    try:
        postroom.wait_for_owner(holder)
        (peeked,) = postroom.ok("peek", "jobs", "--json").lines
    finally:
        holder.send_signal(signal.SIGINT)
        holder.communicate(timeout=TIMEOUT_SECONDS)

    assert peeked["payload"] == "x"


def test_what_a_sender_writes_can_not_take_a_terminal_over(postroom):
    postroom.ok("send", "orders", "-", stdin=b"\x1b]0;owned\x07[bold]x")

    assert "\\x1b]0;owned\\x07[bold]x" in postroom.ok("recv", "orders").out
