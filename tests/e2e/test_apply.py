"""`postroom apply` and `postroom mailbox`: the settings of a mailbox become what the file says."""

import pytest

from tests.e2e.conftest import Postroom
from tests.e2e.test_streams import SEA, Streams

FILE = """
[policy]
max_attempts = 3
[topics."payments.*"]
visibility = "1m"
max_attempts = 4
[topics."payments.eu"]
shards = 2
"""
CHANGES = [
    {"name": "policy.max_attempts", "current": 5, "new": 3},
    {"name": "topics.payments.*.visibility_ms", "current": None, "new": 60_000},
    {"name": "topics.payments.*.max_attempts", "current": None, "new": 4},
    {"name": "topics.payments.eu.shards", "current": None, "new": 2},
]
WORKER = """
from postroom import Worker
worker = Worker()
@worker.consumer("payments.eu")
def handle(data: bytes) -> None: ...
"""


def write(postroom: Postroom, text: str, name: str = "postroom.toml") -> None:
    (postroom.folder / name).write_text(text)


def fail(postroom: Postroom, count: int) -> None:
    """Make dead letters."""
    for number in range(count):
        postroom.ok("send", "mail", str(number))
    received = postroom.ok("recv", "mail", "--json", "--max", str(count)).lines
    postroom.ok("nack", *(each["receipt"] for each in received))


def test_the_settings_file_is_applied_before_the_first_message_and_names_the_section_of_each_value(
    postroom: Postroom,
) -> None:
    write(postroom, FILE)

    applied = postroom.ok("apply", "--json").json

    assert applied == {"mailbox": "main@local", "effects": [], "changes": CHANGES}
    shown = postroom.ok("topic", "policy", "payments.eu", "--json").json
    fields = {name: (shown["policy"][name], section) for name, section in shown["sections"].items()}
    assert fields["max_attempts"] == (4, "payments.*")
    assert fields["visibility_ms"] == (60_000, "payments.*")
    assert fields["shards"] == (2, "payments.eu")
    assert fields["dead_capacity"] == (100_000, "policy")
    postroom.ok("send", "payments.eu", "1")
    assert postroom.ok("apply", "--json").json["changes"] == []


@pytest.mark.parametrize("option", ["--dry-run", "--check"])
def test_a_dry_run_and_a_check_show_the_changes_and_make_none(postroom: Postroom, option: str) -> None:
    write(postroom, FILE, "other.toml")
    code = {"--dry-run": 0, "--check": 6}[option]

    first = postroom("apply", "other.toml", option, "--json")
    existed = postroom.store.exists()
    postroom.ok("send", "mail", "1")
    log = postroom.ok("log", "show", "--json").out
    second = postroom("apply", "other.toml", option, "--json")

    assert not existed
    assert [(each.code, each.json["changes"]) for each in (first, second)] == [(code, CHANGES)] * 2
    assert postroom.ok("log", "show", "--json").out == log
    postroom.ok("apply", "other.toml")
    assert postroom("apply", "other.toml", "--check").code == 0


def test_what_the_file_leaves_out_gets_its_default(postroom: Postroom) -> None:
    write(postroom, FILE)
    postroom.ok("apply")
    write(postroom, "[policy]\nmax_attempts = 3\n")

    postroom.ok("apply")

    settings = postroom.ok("mailbox", "show", "--json").json["settings"]
    assert settings["topics"] == {}
    assert settings["default_policy"]["max_attempts"] == 3


def test_a_file_that_sets_nothing_resets_the_settings(postroom: Postroom) -> None:
    postroom.ok("mailbox", "set", "policy.max_attempts=3")
    write(postroom, "# max_attempts = 3\n", "empty.toml")

    applied = postroom.ok("apply", "empty.toml", "--json").json

    assert applied["changes"] == [{"name": "policy.max_attempts", "current": 3, "new": 5}]


def test_apply_without_a_settings_file_changes_nothing(postroom: Postroom) -> None:
    postroom.ok("mailbox", "set", "policy.max_attempts=3")

    refused = postroom("apply", "--json")

    assert refused.code == 2
    assert refused.error["message"] == "There is no settings file postroom.toml to apply; name one."
    assert postroom.ok("mailbox", "show", "--json").json["settings"]["default_policy"]["max_attempts"] == 3


SEND, RECV, WORK = ("send", "mail", "2"), ("recv", "mail"), ("work", "tasks:worker", "--once")
SERVE = ("serve", "--dev", "--http", "127.0.0.1:0")


@pytest.mark.parametrize(("mailbox", "where"), [("main@local", ""), ("jobs@local", " --mailbox jobs@local")])
def test_a_command_whose_file_differs_is_refused_until_the_file_is_applied(
    postroom: Postroom, mailbox: str, where: str
) -> None:
    postroom.ok("send", "mail", "1", "--mailbox", mailbox)
    write(postroom, '[policy]\nvisibility = "1m"\n')
    write(postroom, WORKER, "tasks.py")

    refusals = [postroom(*each, "--mailbox", mailbox, "--json") for each in (SEND, RECV, WORK, SERVE)]

    change = f"postroom mailbox set{where} policy.visibility_ms=60000"
    message = (
        f"Mailbox {mailbox} has other settings than those given: policy.visibility_ms is 30000, not 60000. "
        f"Leave them out to use what is stored; to change it, run `{change}` or `postroom apply{where}`."
    )
    assert [(each.code, each.error["message"]) for each in refusals] == [(1, message)] * 4
    postroom.ok("backlog")
    postroom.ok(*change.split()[1:])
    postroom.ok("send", "mail", "2", "--mailbox", mailbox)


def test_work_applies_the_file_at_its_start_if_told_so(postroom: Postroom) -> None:
    postroom.ok("send", "payments.eu", "1")
    write(postroom, '[policy]\nvisibility = "1m"\n')
    write(postroom, WORKER, "tasks.py")

    done = postroom.ok("work", "tasks:worker", "--once", "--apply")

    assert "policy.visibility_ms changed from 30s to 1m." in done.err
    assert done.out == "1 handled, 0 failed\n"
    postroom.ok("send", "payments.eu", "2")


def test_a_change_by_which_something_is_lost_is_confirmed_first(postroom: Postroom) -> None:
    postroom.ok("mailbox", "set", "topics.mail.max_attempts=1")
    fail(postroom, 3)
    lossy = "[policy]\ndead_capacity = 1\n[topics.mail]\nmax_attempts = 1\n"
    write(postroom, lossy, "lossy.toml")
    write(postroom, WORKER, "tasks.py")

    refusals = [
        postroom("mailbox", "set", "policy.dead_capacity=1", "--json"),
        postroom("apply", "lossy.toml", "--json"),
        postroom("work", "tasks:worker", "--once", "--apply", "--config", "lossy.toml", "--json"),
    ]

    assert [each.code for each in refusals] == [1, 1, 1]
    for each in refusals:
        assert "lose data: 2 dead letters of mail expire now" in each.err
    assert len(postroom.ok("dlq", "list", "--json").json["dead_letters"]) == 3
    postroom.ok("mailbox", "set", "policy.dead_capacity=1", "--yes")
    assert len(postroom.ok("dlq", "list", "--json").json["dead_letters"]) == 1


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ("foo=1", 2, "There is no setting foo; write limits.NAME, policy.NAME or topics.TOPIC.NAME"),
        ("policy.foo=1", 2, "policy.foo: unknown key 'foo'"),
        (
            "policy.max_attempts=many",
            2,
            "policy.max_attempts: max_attempts is 'many'; expected a whole number",
        ),
        ("policy.max_attempts=0", 2, "Topic policy max_attempts must be at least 1; it was 0."),
        ("topics.a b.shards=1", 2, "Topic name 'a b' must be"),
        ("policy.max_attempts", 2, "Change 'policy.max_attempts' is not NAME=VALUE."),
    ],
)
def test_an_invalid_setting_is_refused_by_name(
    postroom: Postroom, change: str, code: int, message: str
) -> None:
    refused = postroom("mailbox", "set", "policy.shards=2", change, "--json")

    assert (refused.code, refused.json if refused.out else None) == (code, None)
    assert refused.error["message"].startswith(message)
    assert postroom.ok("mailbox", "set", "policy.shards=8", "--json").json["changes"] == []


INVALID = [
    ('[policy]\nvisibility = "1s"\nvisibility_ms = 9', "backlog"),
    ('[topics."a*"]\nvisibility = "140s"\n[topics."*b"]\nreplay_window = "100s"', "apply"),
    ('[topics."a*"]\nvisibility = "140s"\n[topics."*b"]\nreplay_window = "100s"', "apply --check"),
    ("[limits]\ntopics = 0", "apply --dry-run"),
    ("[streams.A]\nsubjects = 3", "apply"),
    ("[streams.A]\nsubjects = ['a']\nmax_age = '1s'\nmax_age_ms = 9", "streams diff"),
    ("[erasure]\nkeys = 'k.db'", "apply"),
    ("timeout_ms = 0", "send mail 1"),
    ("[owner]\nlisten = 'nowhere'", "send mail 1"),
    ("[owner]\nlisten = 'nowhere'", "config show"),
    ("[cluster]\nadmin = 'nowhere'", "lease list"),
    ("[cluster]\nadmin = 'nowhere'", "proxy --proxy-id p"),
    ("[proxy]\nlisten = 'nowhere'", "proxy --proxy-id p"),
    ("[runner]\nlisten = 'nowhere'", "runner --dev --runner-id r --proxy-id p"),
    ("[admin]\nlisten = 'nowhere'\nstandalone = true", "admin"),
    ("[admin]\nttl = '0s'\nstandalone = true", "admin --listen 127.0.0.1:0"),
    ("[admin]\nnamespaces = 'no.yaml'\nstandalone = true", "admin --listen 127.0.0.1:0"),
    ("[serve]\nhttp = 'nowhere'", "serve --dev"),
    ("[serve]\nhttp = ''\ngrpc = '127.0.0.1:99999'", "serve --dev"),
    ("[serve]\nhttp = '0.0.0.0:0'", "serve --dev"),
    ("[schedules.a]\ntopic = 'a'\ncron = '61 * * * *'", "schedule"),
    ("[schedules.a]\ntopic = 'a b'\ncron = '* * * * *'", "schedule"),
    ("[messaging]\ndatabase = 'postgresql://x/y'\ncontext = 'a b'", "outbox backlog"),
]


@pytest.mark.parametrize(("text", "command"), INVALID)
def test_every_command_ends_with_exit_code_2_for_an_invalid_setting_that_it_reads(
    postroom: Postroom, text: str, command: str
) -> None:
    write(postroom, text)

    refused = postroom("--config", "postroom.toml", *command.split())

    assert (refused.code, refused.err.count("\n")) == (2, 1), refused
    assert not postroom.store.exists()


def test_a_change_of_a_topics_policy_sets_only_the_fields_that_it_names(postroom: Postroom) -> None:
    postroom.ok("mailbox", "set", "topics.payments.*.visibility=1m")

    postroom.ok("topic", "policy", "payments.eu", "shards=2")
    postroom.ok("topic", "policy", "payments.eu", "max_attempts=4")
    postroom.ok("mailbox", "set", "topics.payments.*.visibility=2m", "policy.dead_capacity=7")

    topics = postroom.ok("mailbox", "show", "--json").json["settings"]["topics"]
    assert topics["payments.eu"] == {"shards": 2, "max_attempts": 4}
    shown = postroom.ok("topic", "policy", "payments.eu", "--json").json
    values = {name: (shown["policy"][name], section) for name, section in shown["sections"].items()}
    assert values["visibility_ms"] == (120_000, "payments.*")
    assert values["dead_capacity"] == (7, "policy")
    assert values["shards"] == (2, "payments.eu")


def test_a_policy_by_which_something_is_lost_is_confirmed_first(postroom: Postroom) -> None:
    postroom.ok("topic", "policy", "mail", "max_attempts=1")
    fail(postroom, 3)

    refused = postroom("topic", "policy", "mail", "dead_capacity=1", "--json")

    assert (refused.code, refused.out) == (1, "")
    assert "lose data: 2 dead letters of mail expire now" in refused.error["message"]
    assert len(postroom.ok("dlq", "list", "--json").json["dead_letters"]) == 3
    postroom.ok("topic", "policy", "mail", "dead_capacity=1", "--yes")
    assert len(postroom.ok("dlq", "list", "--json").json["dead_letters"]) == 1


@pytest.mark.parametrize("change", ["max_attempts=0", "max_attempts=many", "atempts=3", "max_attempts"])
@pytest.mark.parametrize("topic", ["mail", "payments.eu"])
def test_an_invalid_policy_is_invalid_usage(postroom: Postroom, topic: str, change: str) -> None:
    assert postroom("topic", "policy", topic, change, "--json").code == 2
    assert postroom("topic", "policy", "two words", "max_attempts=3", "--json").code == 2


def test_settings_and_sections_are_removed_by_name(postroom: Postroom) -> None:
    write(postroom, FILE, "first.toml")
    postroom.ok("apply", "first.toml")

    names = ("policy.max_attempts", "topics.payments.*.visibility", "topics.payments.eu")
    postroom.ok("mailbox", "set", *(word for name in names for word in ("--unset", name)))

    settings = postroom.ok("mailbox", "show", "--json").json["settings"]
    assert settings["topics"] == {"payments.*": {"max_attempts": 4}}
    assert settings["default_policy"]["max_attempts"] == 5


def test_apply_creates_the_streams_of_the_file(postroom: Postroom, nats_url: str) -> None:
    streams = Streams(postroom, nats_url)
    streams.define({"APPLIED": SEA})

    assert postroom("apply", "--check").code == 6
    postroom.ok("apply", "--yes")

    assert streams.server_config("APPLIED")["subjects"] == SEA["subjects"]
    assert postroom("apply", "--check").code == 0


def test_weights_of_keys_are_set_by_the_file_and_the_command_line_as_they_are_shown(
    postroom: Postroom,
) -> None:
    write(postroom, '[policy]\nfair_keys = true\n[topics."mail"]\nkey_weights = {"a:1" = 3, b = 2}\n')
    applied = postroom.ok("apply", "--json").json
    name = "topics.mail.key_weights"
    assert applied["changes"][1] == {"name": name, "current": None, "new": {"a:1": 3, "b": 2}}
    (postroom.folder / "postroom.toml").unlink()
    for text, weights in (
        ("x=y:3,ü:2", {"x=y": 3, "ü": 2}),
        ('{"a,b":3,"{":1}', {"a,b": 3, "{": 1}),
        ("{}", {}),
    ):
        postroom.ok("mailbox", "set", f"{name}={text}")
        shown = postroom.ok("topic", "policy", "mail", "--json").json
        assert (shown["policy"]["key_weights"], shown["sections"]["key_weights"]) == (weights, "mail")
        assert text in postroom.ok("topic", "policy", "mail").out
    postroom.ok("topic", "policy", "mail", "key_weights=a:7")
    (change,) = postroom.ok("log", "show", "--event", "MailboxSettingsChanged", "--json").lines[-1]["changes"]
    assert change == {"name": name, "current": {}, "new": {"a": 7}}
    for wrong in ("a", "a:x", "a:1,a:2", '{"a":', "a:1,,b"):
        refused = postroom("topic", "policy", "mail", f"key_weights={wrong}")
        assert refused.code == 2
        assert "expected weights such as a:3,b:2" in " ".join(refused.err.split())
