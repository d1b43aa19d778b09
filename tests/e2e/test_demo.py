import json
import os
import re
import signal
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, build_opener

import pytest

from tests.e2e.conftest import SCRIPT
from tests.support.fork_server import popen


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

    main, terminal = os.openpty()  # on a terminal, the console is shown at the end
    process = popen([SCRIPT, "demo"], tmp_path, postroom.environment, terminal, terminal, terminal)
    os.close(terminal)
    out = ""
    while "/start?code=" not in out:
        out += read(main)

    overview = open_link(out)
    process.terminate()
    while text := read(main):
        out += text
    assert process.wait(60) == 0, out
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_the_console_of_a_shop_is_read_only_and_leaves_nothing_behind(postroom, tmp_path, number):
    (tmp_path / "tmp").mkdir()
    postroom.environment |= {"TMPDIR": str(tmp_path / "tmp"), "HOME": str(tmp_path)}
    (tmp_path / "postroom.toml").write_text(
        '[policy]\nmax_attempts = 9\n[topics."orders.*"]\nmax_attempts = 7\n'
    )
    process = postroom.start("demo", "--console", "--json")
    facts = json.loads(process.stdout.readline() or process.communicate()[1])
    assert facts["mailbox"] == "shop@demo"

    browser = build_opener(HTTPCookieProcessor())
    overview = open_link(facts["link"], browser)
    (path,) = set(re.findall(r'href="(/[^"]+)/topics"', overview))
    base = facts["link"].partition("/console")[0] + path

    def get(path):
        with browser.open(base + path, timeout=60) as page:
            return page.read().decode()

    assert not re.search('aria-label="(Pause|Resume) |href="[^"]+/send"', overview)
    for path, parts in {
        "/": ("orders.created", "orders.paid", "mail.reminders", "billing", ">paused<"),
        "/topics/show?name=orders.paid&period=7d": ("shop/pack@", "Time from sending to the ack"),
        "/consumers": ("shop/charge@", "shop/book@"),
        "/dead-letters": ("bank.internal:443", "is negative", "max_attempts", "rejected"),
        "/subscriptions": ("billing", "reports"),
        "/schedules": ("invoices", "0 3 * * *", "newsletter"),
        "/redrives": ("anna@ops", "completed"),
        "/search?statuses=dead": ("shop-", "orders.paid", "CSV"),
    }.items():
        text = get(path)
        missing = [each for each in parts if each not in text]
        assert not missing, (path, missing)
    with pytest.raises(HTTPError) as refused:
        browser.open(base + "/topics/pause", urlencode({"topic": "orders.paid"}).encode(), timeout=60)
    with refused.value:
        assert refused.value.code == 403

    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["postroom.toml", "tmp"]


def test_a_shop_that_is_interrupted_while_it_is_made_leaves_nothing_behind(postroom, tmp_path):
    (tmp_path / "tmp").mkdir()
    postroom.environment |= {"TMPDIR": str(tmp_path / "tmp"), "HOME": str(tmp_path)}
    process = postroom.start("demo", "--console")
    assert b"Making a shop" in process.stderr.readline()
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert list((tmp_path / "tmp").iterdir()) == []


def open_link(out, browser=None):
    """Press the button of a link to the console; return the page to which it leads."""
    start, _, query = out.split()[-1].partition("?")
    with (browser or build_opener(HTTPCookieProcessor())).open(start, query.encode(), timeout=60) as page:
        return page.read().decode()


def read(terminal):
    """Return what a terminal shows next; nothing once its processes have ended."""
    try:
        return os.read(terminal, 65_536).decode(errors="replace")
    except OSError:
        return ""
