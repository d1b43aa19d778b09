"""Text of other people is escaped on the terminal: control characters, line breaks and bidi overrides."""

import pytest

HOSTILE = "x\x1b[31m\u202ey\nstatus       acked\u2028z"
ESCAPED = "x\\x1b[31m\\u202ey\\nstatus       acked\\u2028z"


@pytest.fixture
def sent(postroom):
    names = ("id", "principal", "correlation-id", "content-type")
    options = [part for name in names for part in (f"--{name}", HOSTILE)]
    postroom.ok("send", "orders", "payload", *options, "--attr", f"{HOSTILE}={HOSTILE}")
    return postroom


@pytest.mark.parametrize("command", [["show"], ["show", "--why"]])
def test_text_of_a_message_is_escaped_where_it_is_shown(sent, command):
    sent.ok("recv", "orders", "--visibility", "1h", "--consumer", HOSTILE)

    assert_escaped(sent.ok(*command, HOSTILE).out)


def test_text_of_a_message_is_escaped_in_answers_lists_and_errors(sent):
    received = sent.ok("recv", "orders", "--json").json
    sent.ok("nack", received["receipt"], "--reason", HOSTILE)
    for command in (["send", "orders", "other", "--id", f"{HOSTILE}2"], ["peek", "orders"], ["dlq", "list"]):
        assert_escaped(sent.ok(*command).out, required=command[0] == "send")
    for unknown in (
        ["show", f"{HOSTILE}3"],
        ["recv", HOSTILE],
        ["ack", HOSTILE],
        ["backlog", "--at", HOSTILE],
    ):
        done = sent(*unknown)
        assert done.code != 0
        assert_escaped(done.err, required=False)
        assert done.err.count("\n") == 1


def assert_escaped(shown, *, required=True):
    assert not {"\x1b", "\u202e", "\u2028"} & set(shown)
    assert not any(line.startswith("status       acked") for line in shown.split("\n"))
    assert ESCAPED in shown.replace("\n", "") or not required
