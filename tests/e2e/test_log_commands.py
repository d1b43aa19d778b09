"""`postroom log`: the events of a log, from the beginning or as they are written."""

import json
import signal

from tests.e2e.conftest import TIMEOUT_SECONDS, Postroom


def test_the_log_is_shown_as_a_table_or_as_json_lines_and_followed(postroom: Postroom) -> None:
    postroom.ok("send", "orders", "x", "--id", "order-1", "--principal", "alice")
    table = postroom.ok("log", "show").out
    assert "MailboxCreated" in table
    assert "order-1" in table
    lines = postroom.ok("log", "show", "--json", "--event", "MessageSent", "--topic", "ord*").out.splitlines()
    (sent,) = map(json.loads, lines)
    assert (sent["message_id"], sent["headers"]["principal"]) == ("order-1", "alice")
    assert postroom("log", "show", "--message", "order-2").code == 3
    wrong = postroom("log", "show", "--event", "MessageSend")
    assert wrong.code == 2
    assert "MessageSent" in wrong.err

    process = postroom.start("log", "tail", "--limit", "1", "--follow", "--json", "--event", "MessageSent")
    assert process.stdout is not None
    try:
        assert json.loads(process.stdout.readline()) == sent
        postroom.ok("send", "orders", "y", "--id", "order-3")
        assert json.loads(process.stdout.readline())["message_id"] == "order-3"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        process.kill()
