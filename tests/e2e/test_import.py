import base64
import gzip
import json
import signal
import sqlite3
import time
from contextlib import closing
from datetime import datetime
from fnmatch import fnmatchcase

import pytest

from postroom.adapters.compose.queries import read_mailbox
from postroom.domain.envelope.build import open_envelope
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.message import MessageSent
from tests.e2e.conftest import TIMEOUT_SECONDS, read_lines
from tests.support.envelopes import build_envelope

MAPPING = ("--topic", "web.{kind}", "--header", "principal=who.login")


def lines(count, start=0):
    return [
        json.dumps({"kind": f"k{n % 3}", "n": n, "who": {"login": f"user-{n % 5}"}}).encode()
        for n in range(start, start + count)
    ]


def write(postroom, name, content):
    (postroom.folder / name).write_bytes(b"".join(line + b"\n" for line in content))
    return name


def archived(postroom):
    """Return the payloads of the archive, in the order of its log."""
    with read_mailbox(str(postroom.store), "archive@local") as reader:
        events = [record.event for record in reader.log.read()]
    return [open_envelope(event.envelope).payload for event in events if isinstance(event, MessageSent)]


def counts(done):
    facts = done.json
    return facts["read"], facts["stored"], facts["duplicates"], len(facts["skipped"])


def test_any_json_is_imported_byte_for_byte_and_only_once(postroom):
    content = [*lines(3), b'{"kind": "odd",  "n": 1e400, "big": 123456789012345678901234567890.10}']
    file = write(postroom, "a.ndjson", content)

    assert counts(postroom.ok("import", file, *MAPPING, "--json")) == (4, 4, 0, 0)
    assert counts(postroom.ok("import", file, *MAPPING, "--json")) == (4, 0, 4, 0)
    assert archived(postroom) == content
    assert postroom("recv", "web.k0", "--mailbox", "archive@local").code == 3


def test_a_gzipped_file_and_standard_input_are_the_same_file(postroom):
    content = lines(5)
    (postroom.folder / "a.ndjson.gz").write_bytes(gzip.compress(b"\n".join(content)))

    assert counts(postroom.ok("import", "a.ndjson.gz", *MAPPING, "--json")) == (5, 5, 0, 0)
    plain = postroom.ok("import", "-", *MAPPING, "--json", stdin=b"\r\n".join(content))
    assert counts(plain) == (5, 0, 5, 0)
    assert archived(postroom) == content


def test_cloud_events_keep_their_identity_and_their_data(postroom):
    event = {
        "specversion": "1.0",
        "id": "17",
        "source": "/orders",
        "type": "order.created",
        "time": "2026-01-31T08:00:00.5Z",
        "datacontenttype": "application/json",
        "subject": "customer-7",
        "data": {"total": 12.50},
    }
    line = json.dumps(event).replace("12.5", "12.50").encode()
    file = write(postroom, "events.ndjson", [line])

    assert counts(postroom.ok("import", file, "--json")) == (1, 1, 0, 0)

    shown = postroom.ok("show", "/orders|17", "--json").json
    assert (shown["topic"], shown["payload"]) == ("order.created", '{"total": 12.50}')
    assert shown["headers"]["timestamp"] == 1_769_846_400_500
    assert shown["headers"]["custom_headers"]["ce_subject"] == "customer-7"


def test_envelopes_are_stored_and_come_only_once(postroom):
    envelope = build_envelope(
        message_id="outside-1", topic="t.a", namespace="n", published_at_us=1_000_000, payload=b"p", attrs={}
    )
    file = write(postroom, "envelopes.txt", [base64.b64encode(envelope)])

    assert counts(postroom.ok("import", file, "--json")) == (1, 1, 0, 0)
    assert counts(postroom.ok("import", file, "--json")) == (1, 0, 1, 0)
    assert postroom.ok("show", "outside-1", "--payload").out == "p"


def test_what_is_odd_about_a_stored_envelope_is_told(postroom):
    envelope = PrismEnvelope(envelope_version=1)
    envelope.metadata.message_id, envelope.metadata.topic = "outside-2", "t.a"
    file = write(postroom, "envelopes.txt", [base64.b64encode(envelope.SerializeToString())])

    (problem,) = postroom.ok("import", file, "--json").json["problems"]

    assert (problem["line"], "publish time" in problem["problem"]) == (1, True)


def test_a_malformed_envelope_is_stored_only_where_a_warning_is_enough(postroom):
    envelope = PrismEnvelope(envelope_version=1)
    envelope.metadata.message_id, envelope.metadata.topic = "outside-3", "t.a"
    envelope.metadata.published_at.nanos = -1
    file = write(postroom, "envelopes.txt", [base64.b64encode(envelope.SerializeToString())])

    refused = postroom("import", file, "--json")
    assert (refused.code, "publish time" in refused.error["message"]) == (1, True)
    assert counts(postroom.ok("import", file, "--validation", "warn", "--json")) == (1, 1, 0, 0)


def test_imported_messages_are_delivered_where_that_is_asked_for(postroom):
    file = write(postroom, "a.ndjson", lines(3))

    postroom.ok("import", file, *MAPPING, "--deliver", "--key", "who.login")
    (received,) = postroom.ok("recv", "web.k1", "--json").lines
    assert json.loads(received["payload"])["n"] == 1

    refused = postroom("import", file, *MAPPING, "--mailbox", "main@local")
    assert (refused.code, "--deliver" in refused.err) == (1, True)


def test_a_bad_line_is_named_and_all_before_it_is_stored(postroom):
    content = lines(1_200)
    bad = [*content[:700], b'{"kind": ', *content[701:]]
    file = write(postroom, "a.ndjson", bad)

    done = postroom("import", file, *MAPPING, "--json")

    assert (done.code, done.out) == (1, "")
    assert done.error["message"].startswith("a.ndjson, line 701: it is not valid JSON")
    assert archived(postroom) == content[:700]
    write(postroom, "a.ndjson", content)
    assert counts(postroom.ok("import", file, *MAPPING, "--json")) == (1_200, 500, 700, 0)


def test_a_line_that_the_mailbox_refuses_is_named_too(postroom):
    content = lines(3)
    content[1] = json.dumps({"kind": "k0", "pad": "x" * ((1 << 20) + (64 << 10))}).encode()
    file = write(postroom, "a.ndjson", content)

    done = postroom("import", file, *MAPPING, "--json")

    assert (done.code, done.error["code"]) == (1, "E_FRAME_TOO_LARGE")
    assert "a.ndjson, line 2:" in done.error["message"]


def test_bad_lines_are_skipped_and_listed_on_request(postroom):
    content = lines(4)
    file = write(postroom, "a.ndjson", [content[0], b"nonsense", content[2], b'{"kind":"a b"}', content[3]])

    done = postroom.ok("import", file, *MAPPING, "--on-error", "skip", "--json")

    assert counts(done) == (5, 3, 0, 2)
    assert [skipped["line"] for skipped in done.json["skipped"]] == [2, 4]
    assert archived(postroom) == [content[0], content[2], content[3]]


def test_a_file_that_ends_in_the_middle_keeps_what_came_before(postroom):
    content = lines(2_000)
    whole = gzip.compress(b"\n".join(content), compresslevel=1)
    (postroom.folder / "a.gz").write_bytes(whole[: len(whole) * 3 // 4])

    done = postroom("import", "a.gz", *MAPPING, "--json")

    assert (done.code, "a.gz can't be read after line" in done.error["message"]) == (1, True)
    stored = archived(postroom)
    assert 0 < len(stored) < 2_000
    assert stored == content[: len(stored)]


def test_a_mailbox_that_stays_full_ends_the_import_where_it_can_go_on(postroom):
    (postroom.folder / "postroom.toml").write_text("[policy]\nshard_capacity = 10\n")
    content = [line.replace(b'"k1"', b'"k0"').replace(b'"k2"', b'"k0"') for line in lines(12)]
    file = write(postroom, "a.ndjson", content)

    done = postroom("import", file, *MAPPING, "--deliver", "--json")

    assert (done.code, done.error["code"]) == (4, "E_SATURATED")
    assert done.error["message"].startswith("a.ndjson, line 11:")
    assert len(postroom.ok("recv", "web.k0", "--ack", "--json").lines) == 10
    assert counts(postroom.ok("import", file, *MAPPING, "--deliver", "--json")) == (12, 2, 10, 0)


def test_a_dry_run_stores_nothing(postroom):
    file = write(postroom, "a.ndjson", lines(3))

    assert counts(postroom.ok("import", file, *MAPPING, "--store", "memory:", "--json")) == (3, 3, 0, 0)
    assert not postroom.store.exists()


@pytest.mark.extended
def test_an_import_that_was_killed_is_completed_by_importing_again(postroom):
    content = lines(20_000)
    file = write(postroom, "a.ndjson", content)
    process = postroom.start("import", file, *MAPPING)
    _wait_for_records(postroom.store, 2_000)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=TIMEOUT_SECONDS)

    survived = archived(postroom)
    assert 2_000 <= len(survived) < 20_000
    assert survived == content[: len(survived)]

    again = counts(postroom.ok("import", file, *MAPPING, "--json"))
    assert again == (20_000, 20_000 - len(survived), len(survived), 0)
    assert archived(postroom) == content
    postroom.ok("verify")


def test_search_finds_in_webhook_deliveries_what_a_scan_of_the_file_finds(postroom, webhooks):
    mapping = ("--topic", "github.{event}.{action}", "--header", "principal=payload.sender.login")
    timed = ("--time", "payload.repository.updated_at")
    deliveries = [(line, json.loads(line)) for line in read_lines(webhooks)]
    all_ = len(deliveries)
    assert counts(postroom.ok("import", str(webhooks), *mapping, *timed, "--json")) == (all_, all_, 0, 0)
    assert counts(postroom.ok("import", str(webhooks), *mapping, *timed, "--json")) == (all_, 0, all_, 0)
    postroom.ok("views", "rebuild", "--verify")

    def scan(is_wanted):
        return sorted(line for line, delivery in deliveries if is_wanted(delivery))

    def search(*arguments):
        found = postroom.ok("search", *arguments, "--json", "--limit", "50", "--all", "--envelope").lines
        return sorted(open_envelope(base64.b64decode(each["envelope_b64"])).payload for each in found)

    assert search("--topic", "github.issue*.opened") == scan(
        lambda d: fnmatchcase(_topic(d), "github.issue*.opened")
    )
    assert search("--topic", "github.push") == scan(lambda d: d["event"] == "push")
    assert search("--principal", "Octocoders", "--principal", "octocat") == scan(
        lambda d: (d["payload"].get("sender") or {}).get("login") in ("Octocoders", "octocat")
    )
    since, until = "2019-05-15T15:00:00Z", "2019-05-15T15:20:00Z"
    in_time = scan(lambda d: (t := _updated(d)) is not None and _time(since) <= t <= _time(until))
    assert search("--since", since, "--until", until) == in_time
    assert 0 < len(in_time) < all_
    status = postroom.ok("views", "status", "--json").json
    assert [(lag["mailbox"], lag["lag"]) for lag in status["lags"]] == [("archive@local", 0)]
    assert postroom.ok("stats", "--json").json["total_events"] == all_
    assert postroom("search", "--principal", "nobody").code == 3


def _topic(delivery):
    return ".".join(filter(None, ("github", delivery["event"], delivery.get("action"))))


def _updated(delivery):
    text = (delivery["payload"].get("repository") or {}).get("updated_at")
    return None if text is None else _time(text)


def _time(text):
    return datetime.fromisoformat(text)


def _wait_for_records(store, count):
    """Return once the log has `count` events."""
    while True:
        try:
            with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as connection:
                (found,) = connection.execute("SELECT coalesce(max(last), 0) FROM log").fetchone()
        except sqlite3.OperationalError:  # the store is being made
            found = 0
        if found >= count:
            return
        time.sleep(0.005)


def test_cloud_events_are_imported_after_a_byte_order_mark_in_arrays_and_on_several_lines(postroom):
    events = [{"specversion": "1.0", "id": str(n), "source": "/s", "type": "t", "data": n} for n in range(4)]
    text = json.dumps(events[:2]) + "\n" + json.dumps(events[2], indent=2) + "\n" + json.dumps(events[3])
    (postroom.folder / "events.json").write_text(text, encoding="utf-8-sig")
    assert counts(postroom.ok("import", "events.json", "--json")) == (4, 4, 0, 0)
    assert archived(postroom) == [b"0", b"1", b"2", b"3"]
    refused = postroom("import", "-", stdin=b'{"specversion": "1.0",\n"id": 1\n')
    assert (refused.code, "stdin, line 1: " in refused.err) == (1, True)


def test_an_archived_message_is_shown_without_a_time_of_expiry(postroom):
    (postroom.folder / "a.ndjson").write_bytes(b'{"specversion":"1.0","id":"1","source":"/s","type":"t"}')
    postroom.ok("import", "a.ndjson")
    archive = ("--mailbox", "archive@local")
    for command in (("show", "/s|1"), ("log", "show")):
        for options in ((), ("--json",), ("--wide",)):
            out = postroom.ok(*command, *archive, *options).out
            assert "expires_at" not in out
            assert "1970-01-01" not in out
