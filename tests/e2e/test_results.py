"""Request and reply between processes, by the command line and by Python."""

import json
import signal
import subprocess

from tests.e2e.conftest import TIMEOUT_SECONDS, Postroom

HANDLERS = """
from postroom import PoisonMessage, Worker

worker = Worker()

@worker.consumer("sums", results=True)
def add(numbers: list[int]) -> int:
    if not numbers:
        raise PoisonMessage("there is nothing to add")
    return sum(numbers)
"""
REQUESTS = """
from postroom import NewMessage, connect

with connect("postroom.db") as mailbox:
    for number in range(20):
        sent = mailbox.send_message(NewMessage(topic="sums", payload=b"[1, %d]" % number))
        outcome = mailbox.wait_for_result(sent.message_id, wait_ms=30_000)
        assert outcome.payload == b"%d" % (number + 1), outcome
    sent = mailbox.send_message(NewMessage(topic="sums", payload=b"[]"))
    outcome = mailbox.wait_for_result(sent.message_id, wait_ms=30_000)
    print(outcome.status, outcome.reason, outcome.last_error)
"""


def stop(process: "subprocess.Popen[bytes]") -> tuple[bytes, bytes]:
    process.send_signal(signal.SIGTERM)
    return process.communicate(timeout=TIMEOUT_SECONDS)


def test_a_process_sends_and_another_one_returns_the_results(postroom: Postroom) -> None:
    (postroom.folder / "handlers.py").write_text(HANDLERS)
    (postroom.folder / "requests.py").write_text(REQUESTS)
    worker = postroom.start("work", "handlers:worker")
    try:
        postroom.wait_for_owner(worker)
        assert postroom.shell("python requests.py") == (
            "dead rejected PoisonMessage: there is nothing to add\n"
        )
        id_ = postroom.ok("send", "sums", "[2, 3]").out.strip()
        assert postroom.ok("result", id_, "--wait", "30s").out == "5\n"
        facts = json.loads(postroom.ok("--json", "result", id_).out)
        assert (facts["status"], facts["payload"], facts["content_type"]) == (
            "acked",
            "5",
            "application/json",
        )
    finally:
        stop(worker)


def test_the_owner_of_a_mailbox_that_is_killed_ends_no_wait(postroom: Postroom) -> None:
    postroom.ok("send", "sums", "[1, 2]", "--id", "own")
    owner = postroom.start("recv", "empty", "--wait", "60s")
    postroom.wait_for_owner(owner)
    waiting = postroom.start("result", "own", "--wait", "60s")
    receipt = json.loads(postroom.ok("--json", "recv", "sums").out)["receipt"]
    owner.kill()
    owner.communicate(timeout=TIMEOUT_SECONDS)
    postroom.ok("ack", receipt, "--result", "3")
    out, err = waiting.communicate(timeout=TIMEOUT_SECONDS)
    assert (waiting.returncode, out) == (0, b"3\n"), err


def test_results_are_given_and_shown_by_commands(postroom: Postroom) -> None:
    ids = [postroom.ok("send", "sums", f"[{n}]").out.strip() for n in range(4)]
    waiting = postroom("result", ids[0])
    assert (waiting.code, waiting.out) == (3, "")
    assert "is ready; wait with --wait 30s" in waiting.err
    received = [json.loads(line) for line in postroom.ok("--json", "recv", "sums").out.splitlines()]
    receipts = [each["receipt"] for each in received]
    assert [each["message_id"] for each in received] == ids
    for wrong in (["--content-type", "a/b"], ["--result", "x", "--result-file", "y"]):
        assert postroom("ack", receipts[0], *wrong).code == 2
    (postroom.folder / "result").write_bytes(b"\x00\xff")
    postroom.ok("ack", receipts[0], "--result", "the sum", "--content-type", "text/plain")
    postroom.ok("ack", receipts[1], "--result-file", "result")
    postroom.ok("ack", receipts[2])
    postroom.ok("nack", receipts[3], "--action", "reject", "--reason", "odd")
    assert postroom.ok("result", ids[0]).out == "the sum\n"
    shown = postroom.ok("show", ids[0]).out
    assert "text/plain" in shown
    assert "the sum" in shown
    assert json.loads(postroom.ok("--json", "show", ids[0]).out)["result"] == {
        "payload": "the sum",
        "content_type": "text/plain",
    }
    assert json.loads(postroom.ok("--json", "result", ids[1]).out)["payload_b64"] == "AP8="
    none = postroom.ok("result", ids[2])
    assert (none.out, none.err) == ("", f"Message {ids[2]} was acked without a result.\n")
    dead = postroom("result", ids[3])
    assert dead.code == 3
    assert "it is a dead letter (rejected: odd)" in dead.err
    assert postroom("result", "unknown").code == 3
    large = postroom("ack", receipts[0], "--result-file", "postroom.db")
    assert large.code == 0  # acked before
