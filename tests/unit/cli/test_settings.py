import re

import pytest

from postroom.adapters.cli.admin import open_control_plane
from postroom.adapters.cli.config import all_settings
from postroom.adapters.cli.mailbox import parse_changes
from postroom.adapters.cli.output import Output
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import InvalidSettings, change_fields, load_settings
from postroom.adapters.cli.streams import read_definitions
from postroom.adapters.cli.values import WrongUsage, parse_pairs
from postroom.adapters.cli.views import body_rules
from postroom.adapters.compose.console import ConsoleSettings
from postroom.domain.policy import MailboxLimits, TopicPolicy
from postroom.domain.search import BodyRules
from postroom.domain.settings import SettingsChanges


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_any_setting_the_defaults_hold(folder):
    settings = load_settings({}, {})

    assert (settings.store, settings.mailbox, settings.durability) == (None, None, "full")
    assert (settings.policy, settings.limits, settings.file) == (TopicPolicy(), MailboxLimits(), None)
    assert settings.mailbox_settings() == SettingsChanges()


def test_flags_win_over_the_environment_which_wins_over_the_file(folder):
    (folder / "postroom.toml").write_text(
        'store = "file"\nmailbox = "file@x"\ndurability = "relaxed"\ntimeout_ms = "3s"\n'
    )

    settings = load_settings(
        {"store": "flag", "mailbox": None}, {"POSTROOM_STORE": "env", "POSTROOM_MAILBOX": "env@x"}
    )

    assert (settings.store, settings.mailbox, settings.durability) == ("flag", "env@x", "relaxed")
    assert (settings.timeout_ms, settings.file) == (3_000, "postroom.toml")


def test_only_what_the_file_and_the_environment_say_is_given_to_a_mailbox(folder):
    (folder / "mine.toml").write_text(
        '[policy]\nvisibility = "30s"\nmax_attempts = 7\n'
        '[topics."a.b"]\nmax_attempts = 2\n'
        "[limits]\ntopics = 3\n"
    )

    settings = load_settings({}, {"POSTROOM_POLICY__SHARDS": "2"}, "mine.toml")

    assert (settings.policy.visibility_ms, settings.policy.max_attempts, settings.policy.shards) == (
        30_000,
        7,
        2,
    )
    assert settings.limits.topics == 3
    assert settings.mailbox_settings() == SettingsChanges(
        {"topics": 3},
        {"visibility_ms": 30_000, "max_attempts": 7, "shards": 2},
        {"a.b": {"max_attempts": 2}},
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("stroe = 'x'", ("stroe", "did you mean store?")),
        ("[policy]\nmax_attemps = 3", ("[policy]", "max_attemps", "did you mean max_attempts?")),
        ("[policy]\nmax_attempts = 0", ("[policy]", "max_attempts", "at least 1")),
        ("[policy]\nmax_attempts = true", ("max_attempts", "whole number")),
        ("[policy]\npriorities = 1", ("[policy]", "priorities is 1", "true or false")),
        ("[policy]\npriorities = 'yes'", ("priorities is 'yes'", "true or false")),
        ("[policy]\nvisibility = 'soon'", ("visibility", "'soon'")),
        ("[policy]\nvisibility_ms = 10", ("[policy]", "visibility_ms", "250")),
        ("[topics.'a b']\nshards = 1", ("[topics]", "a b")),
        ("[topics.a]\nshard = 1", ('[topics."a"]', "shard")),
        ("[policy]\nshards = 65537", ("[policy]", "shards must be at most 65536; it was 65537")),
        ("[policy]\nmax_attempts = '--5'", ("max_attempts", "whole number")),
        ("[topics.a]\nvisibility = '31d'", ('[topics."a"]', "visibility_ms must be at most")),
        ("[limits]\nframe_bytes = -5", ("[limits]", "frame_bytes must be at least 1; it was -5")),
        ("[limits]\ntopics = 10000000000", ("[limits]", "topics must be at most")),
        ("[limits]\nframes = 1", ("[limits]", "frames")),
        ("policy = 3", ("[policy]", "must be a table")),
        ("topics = 3", ("[topics]", "must be a table")),
        ("[topics]\na = 3", ("topics", "must be a table")),
        ("durability = 'half'", ("durability", "full, relaxed")),
        ("mailbox = 'no body'", ("mailbox", "without spaces")),
        ("store = 3", ("store", "expected non-empty text")),
        ("store = ", ("not valid TOML",)),
    ],
)
def test_a_setting_that_can_not_be_is_named_with_its_file(folder, text, parts):
    (folder / "postroom.toml").write_text(text)

    with pytest.raises(InvalidSettings) as caught:
        load_settings({}, {})

    for part in ("postroom.toml", *parts):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("[policy]\nvisibility = '5s'\nvisibility_ms = 9_000", "visibility and visibility_ms"),
        (
            "[limits]\nhistory_retention_ms = 9\nhistory_retention = '1d'",
            "history_retention_ms and history_r",
        ),
        ("[topics.a]\nbackoff_max = '1s'\nbackoff_max_ms = 9", "backoff_max and backoff_max_ms"),
        ("[topics.'a*']\nbackoff_max = '1s'\nbackoff_max_ms = 9", "backoff_max and backoff_max_ms"),
        ("[console]\nidle_timeout = '1s'\nidle_timeout_ms = 9", "idle_timeout and idle_timeout_ms"),
        ("[streams.A]\nsubjects = ['a']\nmax_age = '1s'\nmax_age_ms = 9", "max_age and max_age_ms"),
        ("[consumers.a]\nstream = 'A'\nack_wait_ms = 9\nack_wait = '1s'", "ack_wait_ms and ack_wait"),
    ],
)
def test_a_setting_under_two_names_is_refused_with_both(folder, text, pair):
    (folder / "postroom.toml").write_text(text)

    with pytest.raises(
        InvalidSettings, match=rf"postroom\.toml.*: {pair}\w* are the same setting; keep one\."
    ):
        read_all()


def test_two_names_of_a_setting_in_the_environment_are_refused(folder):
    variables = {"POSTROOM_POLICY__VISIBILITY": "5s", "POSTROOM_POLICY__VISIBILITY_MS": "9000"}
    with pytest.raises(InvalidSettings, match="visibility and visibility_ms are the same setting; keep one"):
        load_settings({}, variables)


@pytest.mark.parametrize(("file", "variable"), [("", "_MS"), ("_ms", "")])
def test_the_environment_wins_over_the_file_also_under_another_name(folder, file, variable):
    (folder / "postroom.toml").write_text(
        f'[policy]\nvisibility{file} = "5s"\n[console]\nidle_timeout{file} = "5m"\n'
    )
    names = [f"POSTROOM_{each}{variable}" for each in ("POLICY__VISIBILITY", "CONSOLE__IDLE_TIMEOUT")]

    settings = load_settings({}, dict.fromkeys(names, "75s"))

    assert settings.policy.visibility_ms == 75_000
    assert settings.section("console", ConsoleSettings).idle_timeout_ms == 75_000
    shown = {each.name: each.source for each in all_settings(session(settings))}
    assert [shown["policy.visibility_ms"], shown["console.idle_timeout_ms"]] == names


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            '[topics."a*"]\nvisibility = "140s"\n[topics."*b"]\nreplay_window = "100s"\n',
            r'postroom\.toml: \[topics\."\*b"\] and \[topics\."a\*"\]: Topic policy replay_window_ms',
        ),
        ("".join(f'[topics."{n}*"]\nshards = 1\n' for n in range(51)), "use at most 50"),
        ("[limits]\ntopics = 1\n[topics.a]\nshards = 1\n[topics.b]\nshards = 1\n", "raise limits.topics"),
    ],
)
def test_sections_that_are_wrong_together_are_invalid_settings(folder, text, sentence):
    (folder / "postroom.toml").write_text(text)

    with pytest.raises(InvalidSettings, match=sentence):
        load_settings({}, {})


@pytest.mark.parametrize(
    ("changes", "unset", "pair"),
    [
        (
            ["policy.visibility=5s", "policy.visibility_ms=9"],
            [],
            "policy.visibility and policy.visibility_ms",
        ),
        (["topics.a.visibility_ms=9", "topics.a.visibility=5s"], [], "topics.a.visibility_ms and topics.a."),
        (["limits.topics=5"], ["limits.topics"], "limits.topics and --unset limits.topics"),
        (
            ["policy.visibility=5s"],
            ["policy.visibility_ms"],
            "policy.visibility and --unset policy.visibility_",
        ),
        (["topics.a.shards=5"], ["topics.a.shards"], "topics.a.shards and --unset topics.a.shards"),
        (["topics.a.shards=5"], ["topics.a"], "topics.a.shards and --unset topics.a"),
        ([], ["topics.a", "topics.a.shards"], "--unset topics.a.shards and --unset topics.a"),
    ],
)
def test_a_command_that_names_a_setting_twice_is_refused_with_both_names(changes, unset, pair):
    with pytest.raises(WrongUsage, match=rf"^{pair}\w* name the same setting; keep one\."):
        parse_changes(parse_pairs(changes, "Change"), unset)


def test_a_settings_file_that_was_named_must_be_there(folder):
    with pytest.raises(InvalidSettings, match=r"none\.toml"):
        load_settings({}, {}, "none.toml")


def test_a_settings_file_that_can_not_be_read_is_not_passed_over(folder):
    (folder / "postroom.toml").symlink_to("postroom.toml")
    with pytest.raises(InvalidSettings, match=r"^The settings file postroom\.toml can't be read: Too many"):
        load_settings({}, {})


def test_a_bad_flag_or_variable_is_named(folder):
    with pytest.raises(InvalidSettings, match="--durability is 'x'"):
        load_settings({"durability": "x"}, {})
    with pytest.raises(InvalidSettings, match="POSTROOM_LOG_LEVEL is 'loud'"):
        load_settings({}, {"POSTROOM_LOG_LEVEL": "loud"})


@pytest.mark.parametrize("text", ["stroe = 'x'", "[policy]\nmax_attemps = 3", "[policy]\nx = 3"])
def test_an_unknown_key_is_a_sentence_with_one_stop(folder, text):
    (folder / "postroom.toml").write_text(text)

    with pytest.raises(InvalidSettings) as refused:
        load_settings({}, {})

    assert re.search(r"\w[?.]$", str(refused.value))


@pytest.mark.parametrize("variable", ["POSTROOM_POLICY__SHARD", "POSTROOM_LIMITS__TOPIC"])
def test_an_unknown_field_of_the_environment_is_not_blamed_on_the_file_alone(folder, variable):
    with pytest.raises(InvalidSettings, match=f"or {variable.partition('__')[0]}__: unknown key"):
        load_settings({}, {variable: "1"})


@pytest.mark.parametrize("value", [3600, "3600"])
def test_a_duration_without_a_unit_is_refused_unless_its_key_says_ms(folder, value):
    with pytest.raises(InvalidSettings, match=r"ready_retention: '3600' is not a duration; .* 500ms"):
        change_fields(TopicPolicy(), {"ready_retention": value}, "here")
    assert change_fields(TopicPolicy(), {"ready_retention_ms": value}, "here").ready_retention_ms == 3_600


def test_bodies_are_opted_in_to_search_by_topics_and_globs(folder):
    assert body_rules(session()) == BodyRules()
    (folder / "postroom.toml").write_text('[search]\nbodies = ["github.*", "orders"]\n')
    assert body_rules(session()) == BodyRules(("github.*", "orders"))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ('bodies = "github.*"', r"\[search\] in postroom.toml.*Expected `array`"),
        ("bodies = [1]", r"Expected `str`"),
        ('bodies = [""]', "bodies contains an empty topic"),
        ("body = []", "unknown key 'body'; did you mean bodies"),
    ],
)
def test_bodies_that_are_no_topics_are_refused(folder, wrong, sentence):
    (folder / "postroom.toml").write_text(f"[search]\n{wrong}\n")
    with pytest.raises(InvalidSettings, match=sentence):
        body_rules(session())


def test_every_section_that_is_shown_can_be_set_in_the_file_and_in_the_environment(folder):
    shown = {each.name.partition(".")[0] for each in all_settings(session()) if "." in each.name}
    (folder / "postroom.toml").write_text("".join(f"[{name}]\n" for name in sorted(shown)))
    assert {each.name.partition(".")[0] for each in all_settings(session()) if "." in each.name} == shown
    (folder / "postroom.toml").write_text(
        '[console]\nread_only = true\nidle_timeout = "5m"\nmask_headers = ["authorization"]\n'
        'mask_payload_fields = ["/card/number"]\n'
    )
    settings = load_settings({}, {"POSTROOM_CONSOLE__PROXY_PREFIX": "/ops"}).section(
        "console", ConsoleSettings
    )
    assert settings.validate() == ConsoleSettings(
        read_only=True,
        idle_timeout_ms=300_000,
        mask_headers=("authorization",),
        mask_payload_fields=("/card/number",),
        proxy_prefix="/ops",
    )


async def test_without_a_section_cluster_no_admin_is_asked(folder):
    async with open_control_plane(session()) as control_plane:
        assert control_plane is None


def session(settings=None):
    return Session("views rebuild", settings or load_settings({}, {}), Output(as_json=True))


def read_all():
    """Read every section, as the commands do that need them."""
    settings = load_settings({}, {})
    list(all_settings(session(settings)))
    read_definitions(settings)


def test_a_policy_is_changed_field_by_field():
    changed = change_fields(TopicPolicy(), {"visibility": "2m", "backoff_base_ms": "50", "shards": 1}, "here")

    assert (changed.visibility_ms, changed.backoff_base_ms, changed.shards) == (120_000, 50, 1)
    assert changed.max_attempts == TopicPolicy().max_attempts


@pytest.mark.parametrize("value", [True, "true"])
def test_a_policy_is_given_priorities(value):
    changed = change_fields(TopicPolicy(), {"priorities": value, "priority_aging": "1m"}, "here")

    assert changed == TopicPolicy(priorities=True, priority_aging_ms=60_000)
    assert change_fields(changed, {"priorities": "false"}, "here").priorities is False


def test_a_received_message_is_hidden_for_30_seconds_by_default(folder):
    assert load_settings({}, {}).policy == TopicPolicy(visibility_ms=30_000)
    assert load_settings({}, {"POSTROOM_POLICY__VISIBILITY": "5s"}).policy.visibility_ms == 5_000
