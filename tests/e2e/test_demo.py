import json
from urllib.request import HTTPCookieProcessor, build_opener


def test_the_demo_runs_to_its_end_and_leaves_a_store_to_explore(postroom):
    output = postroom.ok("demo").out

    for part in (
        "20,000 sent, 398 of them duplicates",
        "messages in flight; consumer-2 received them again",
        "19,584 acked; 18 that can't be processed were dead-lettered after 3 attempts",
        "19,602 messages from",
        "demo@local: 0 ready",
        "amount -",
        "visibility_expired",
        "shop-lima",
        "Try next",
    ):
        assert part in output, part
    there = {"POSTROOM_STORE": "postroom-demo.db", "POSTROOM_MAILBOX": "demo@local"}
    assert len(postroom.ok("dlq", "list", "--json", **there).json["dead_letters"]) == 18
    dead = postroom.ok("search", "--status", "dead", "--json", **there).out.splitlines()
    assert {json.loads(line)["attempts"] for line in dead} == {3}
    postroom.ok("verify", **there)


def test_the_demo_leaves_alone_a_store_it_did_not_make(postroom):
    postroom.ok("send", "orders", "precious")

    done = postroom("demo", "--store", "postroom.db")

    assert (done.code, "was not created by the demo" in done.err) == (1, True)
    assert postroom.ok("recv", "orders", "--json").lines[0]["payload"] == "precious"


def test_the_demo_runs_in_memory_too(postroom):
    facts = postroom.ok("demo", "--store", "memory:", "--json").json

    assert (facts["sent"], facts["duplicates"], facts["acked"], facts["dead"]) == (20_000, 398, 19_584, 18)
    assert 0 < len(facts["redelivered"]) <= 100
    assert list(postroom.folder.iterdir()) == []


def test_the_demo_needs_no_java_and_ends_with_a_link_to_the_console(postroom, tmp_path):
    (tmp_path / "bin").mkdir()
    postroom.environment.pop("JAVA_HOME", None)
    postroom.environment["PATH"] = str(tmp_path / "bin")

    process = postroom.start("demo", "--console")
    out = ""
    while "/start?code=" not in out:
        line = process.stdout.readline().decode()
        assert line, process.communicate()
        out += line

    browser = build_opener(HTTPCookieProcessor())
    link = out.split()[-1]
    start, _, query = link.partition("?")
    with browser.open(start, query.encode(), timeout=60) as page:  # what the button sends
        overview = page.read().decode()
    process.terminate()
    rest, err = process.communicate(timeout=60)
    assert (process.returncode, rest) == (0, b""), err
    for part in ("demo@local", "orders.created", "mail.requested", "18"):
        assert part in overview, part
    for part in (
        "19,584 acked",
        "19,602 messages from",
        "demo@local: 0 ready",
        "Dead letters",
        "visibility_expired",
        "postroom verify",
        "postroom console",
        "postroom search",
    ):
        assert part in out, part
