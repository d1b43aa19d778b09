import pytest


def events(postroom, message_id):
    return [entry["event"] for entry in postroom.ok("show", message_id, "--json").json["history"]]


def test_a_message_goes_from_process_to_process_until_it_is_settled(postroom):
    sent = postroom.ok(
        "send", "orders", "-", "--key", "customer-7", "--attr", "region=eu", "--json", stdin=b"a chair"
    )

    (received,) = postroom.ok("recv", "orders", "--json", "--consumer", "worker-1").lines
    settled = postroom.ok("ack", received["receipt"], "--json").json

    message_id = sent.json["msg_id"]
    assert sent.json == {"msg_id": message_id, "duplicate": False}
    assert (received["msg_id"], received["payload"], received["attempt"]) == (message_id, "a chair", 1)
    assert received["attrs"] == {"region": "eu"}
    assert settled == [{"receipt": received["receipt"], "ok": True}]
    assert postroom("recv", "orders").code == 3
    assert events(postroom, message_id) == ["MessageSent", "MessageReceived", "MessageAcked"]


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

    assert postroom.ok("dlq", "reprocess", "mail", "--json").json == {"reprocessed": 1}
    (again,) = postroom.ok("recv", "mail", "--json").lines
    assert (again["msg_id"], again["attempt"]) == (message_id, 1)


def test_dead_letters_are_purged_only_when_that_is_meant(postroom):
    postroom.ok("topic", "policy", "mail", "max_attempts=1")
    postroom.ok("send", "mail", "x")
    (received,) = postroom.ok("recv", "mail", "--json").lines
    postroom.ok("nack", received["receipt"])

    unsure = postroom("dlq", "purge", "mail")
    assert (unsure.code, "--yes" in unsure.err) == (2, True)
    assert postroom.ok("dlq", "purge", "mail", "--yes", "--json").json == {"purged": 1}
    assert postroom.ok("dlq", "list", "--json").json == {"dead_letters": []}


def test_sending_again_under_a_key_adds_nothing_and_another_payload_is_refused(postroom):
    first = postroom.ok("send", "orders", "one", "--idem-key", "k1", "--json").json
    again = postroom.ok("send", "orders", "one", "--idem-key", "k1", "--json").json
    other = postroom("send", "orders", "two", "--idem-key", "k1", "--json")

    assert again == {"msg_id": first["msg_id"], "duplicate": True}
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

    postroom.ok("extend", received["receipt"], "--visibility", "20s")

    assert events(postroom, received["msg_id"])[-1] == "MessageVisibilityExtended"
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
    shown = postroom.ok("recv", "orders").out
    assert f"{message_id}  orders  attempt 1  receipt " in shown
    assert "a chair" in shown
    assert "MessageReceived" in postroom.ok("show", message_id).out


def test_what_a_sender_writes_can_not_take_a_terminal_over(postroom):
    postroom.ok("send", "orders", "-", stdin=b"\x1b]0;owned\x07[bold]x")

    assert "\\x1b]0;owned\\x07[bold]x" in postroom.ok("recv", "orders").out
