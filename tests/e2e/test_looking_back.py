"""Time travel, accounts and what-if on the command line."""

import asyncio
import time

import pytest

from postroom.adapters.compose import open_mailbox
from postroom.application.messages import NewMessage
from postroom.domain.policy import TopicPolicy


@pytest.fixture
async def message_id(postroom):
    """A message that was nacked twice and died of it, and then another one."""
    policy = TopicPolicy(max_attempts=2, backoff_base_ms=1)
    async with open_mailbox(str(postroom.store), "main@local", default_policy=policy) as mailbox:
        start = time.monotonic()
        sent = await mailbox.send_message(NewMessage(topic="mail", payload=b"{", idem_key="order-1"))
        for consumer, reason in [("worker-1", "not JSON"), ("worker-2", "still not JSON")]:
            (received,) = await mailbox.receive_messages("mail", consumer=consumer)
            await mailbox.nack_messages([received.receipt], reason=reason, delay_ms=0)
        # Longer than any pause and any delivery so far: what would have come next is before the log's end.
        await asyncio.sleep(0.01 + time.monotonic() - start)
        await mailbox.send_message(NewMessage(topic="other", payload=b"x"))
    return sent.message_id


def position_of(postroom, message_id, event):
    history = postroom.ok("show", message_id, "--json").json["history"]
    return max(entry["position"] for entry in history if entry["event"] == event)


def test_the_backlog_and_the_dead_letters_of_a_position_are_those_of_then(postroom, message_id):
    sent = position_of(postroom, message_id, "MessageSent")
    died = position_of(postroom, message_id, "MessageDeadLettered")

    def counts(position):
        (mailbox,) = postroom.ok("backlog", "mail", "--at", str(position), "--json").json["mailboxes"]
        return [(row["ready"], row["in_flight"], row["dead"]) for row in mailbox["shards"]]

    def dead(position):
        letters = postroom.ok("dlq", "list", "--at", str(position), "--json").json["dead_letters"]
        return [letter["message_id"] for letter in letters]

    assert [counts(sent - 1), counts(sent), counts(died - 1), counts(died)] == [
        [],
        [(1, 0, 0)],
        [(0, 1, 0)],
        [(0, 0, 1)],
    ]
    assert (dead(died - 1), dead(died)) == ([], [message_id])


def test_the_backlog_of_a_time_is_that_of_then(postroom, message_id):
    at = postroom.ok("show", message_id, "--json").json["history"][-1]["at"]
    now = postroom.ok("backlog", "--at", at).out
    assert f", {at}" in now
    assert postroom.ok("backlog", "--at", "9h").out.startswith("(none)")
    (before,) = postroom.ok("backlog", "--at", "2020-01-01", "--json").json["mailboxes"]
    assert (before["position"], before["shards"]) == (0, [])


def test_a_moment_that_can_not_be_is_refused(postroom, message_id):
    assert postroom("backlog", "--at", "yesterday").code == 2
    assert "is not a point in time; write a log position" in postroom("backlog", "--at", "yesterday").err
    beyond = postroom("dlq", "list", "--at", "999", "--json")
    assert (beyond.code, beyond.error["code"]) == (3, "E_NOT_FOUND")
    assert "in the future" in postroom("backlog", "--at", "2999-01-01").err
    postroom.ok("send", "mail", "x", "--mailbox", "other@local")
    assert "name it with --mailbox" in postroom("backlog", "--at", "3").err


def test_show_why_tells_what_happened_and_why_it_was_delivered_twice(postroom, message_id):
    account = postroom.ok("show", message_id, "--why", "--json").json
    first, second = account["deliveries"]
    assert (first["consumer"], first["ended"], first["error"]) == ("worker-1", "nacked", "not JSON")
    assert (second["consumer"], second["ended"], second["error"]) == ("worker-2", "nacked", "still not JSON")
    assert f"ended at position {first['ended_position']}" in second["why"]
    assert account["now"].startswith("It has been a dead letter since")
    told = postroom.ok("show", message_id, "--why").out
    assert "with idempotency key 'order-1'" in told
    assert "Why it was delivered 2 times:" in told
    assert "attempt 2 of 2, the last one" in told
    assert postroom("show", message_id, "--why", "--payload").code == 2
    assert postroom("show", "unknown", "--why").code == 3


def test_simulate_says_what_is_known_and_gives_a_range_for_what_is_not(postroom, message_id):
    same = postroom.ok("views", "simulate", "--max-attempts", "2", "--json").json
    assert same["observed"] == same["best"] == same["worst"]
    assert (same["messages"], same["unchanged"], same["observed"]["dead"]) == (2, 2, 1)
    fewer = postroom.ok("views", "simulate", "--max-attempts", "1", "--topic", "ma*").out
    assert "of 1 message" in fewer
    assert "0 messages would be unaffected." in fewer
    more = postroom.ok("views", "simulate", "--max-attempts", "3", "--from", "1h", "--backoff-base", "1ms")
    assert "0 to 1" in more.out
    assert "1 message would have had deliveries that never took place, up to 1 in total" in more.out
    assert "Assumptions:" in more.err
    assert postroom("views", "simulate").code == 2
    assert postroom("views", "simulate", "--max-attempts", "3", "--topic", "nothing").code == 3
