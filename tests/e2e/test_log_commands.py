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


def test_changes_of_settings_are_shown_with_the_values_before_and_after(postroom: Postroom) -> None:
    postroom.ok("mailbox", "set", "policy.max_attempts=3", "topics.a*.visibility=1m")
    postroom.ok("mailbox", "set", "limits.topics=5", "--unset", "topics.a*.visibility")

    shown = postroom.ok("log", "show", "--wide", "--event", "MailboxSettingsChanged").out
    lines = postroom.ok("log", "show", "--json", "--event", "MailboxSettingsChanged").lines
    later = postroom.ok("log", "tail", "--json", "--limit", "1", "--event", "MailboxSettingsChanged").lines

    assert "policy.max_attempts from 5 to 3, topics.a*.visibility from unset to 1m" in shown
    assert "limits.topics from 10000 to 5, topics.a*.visibility from 1m to unset" in shown
    assert [each["changes"] for each in lines] == [
        [
            {"name": "policy.max_attempts", "current": 5, "new": 3},
            {"name": "topics.a*.visibility_ms", "current": None, "new": 60_000},
        ],
        [
            {"name": "limits.topics", "current": 10_000, "new": 5},
            {"name": "topics.a*.visibility_ms", "current": 60_000, "new": None},
        ],
    ]
    assert later == lines[1:]
    assert later[0]["settings"]["limits"]["topics"] == 5
