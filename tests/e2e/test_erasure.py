"""Messages of data subjects from the command line: encrypted, shown, and erased."""

import pytest

SETTINGS = """
[erasure]
keys = "secrets/keys.db"
master_key_file = "secrets/master.key"

[erasure.topics.orders]
subject = "principal"
encrypt = ["attrs.email"]
"""
SEND = ("send", "orders", "for-alice", "--principal", "alice", "--attr", "email=a@example.org", "--id", "m1")


@pytest.fixture
def encrypting(postroom):
    (postroom.folder / "secrets").mkdir()
    (postroom.folder / "postroom.toml").write_text(SETTINGS)
    return postroom


def test_commands_encrypt_what_they_send_and_decrypt_what_they_show(encrypting):
    refused = encrypting("--json", *SEND)
    assert (refused.code, refused.error["code"]) == (3, "E_NOT_FOUND")
    assert "postroom erasure init" in refused.error["message"]
    created = encrypting.ok("erasure", "init", "--json").json
    assert len(bytes.fromhex(created["public_key"])) == 32
    assert "never overwritten" in encrypting("erasure", "init").err
    encrypting.ok(*SEND)
    detail = encrypting.ok("show", "m1", "--json").json
    assert (detail["payload"], detail["erased"]) == ("for-alice", False)
    assert (detail["headers"]["principal"], detail["headers"]["custom_headers"]) == (
        "alice",
        {"email": "a@example.org"},
    )
    assert encrypting.ok("recv", "orders", "--json").lines[0]["attrs"] == {"email": "a@example.org"}
    (encrypting.folder / "postroom.toml").unlink()
    stored = encrypting.ok("show", "m1", "--json").json
    assert stored["headers"]["encryption"] == "postroom-aes-siv"
    assert "alice" not in repr(stored) + repr(encrypting.store.read_bytes())


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('keys = ""', "keys"),
        ("keys = 1", "keys"),
        ('other = "x"', "unknown key 'other'"),
        ('master_key_variable = "X"', "one master key"),
        ('topics = {orders = {subject = "topic"}}', "topic"),
        ("topics = {orders = {}}", "topic"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(encrypting, line, problem):
    key = line.partition(" ")[0]
    lines = [
        each for each in SETTINGS.partition("[erasure.topics")[0].splitlines() if not each.startswith(key)
    ]
    (encrypting.folder / "postroom.toml").write_text("\n".join([*lines, line]))
    done = encrypting("--json", *SEND)
    assert (done.code, done.error["code"]) == (2, "E_SCHEMA")
    assert done.error["message"].count("[erasure] in postroom.toml") == 1
    assert problem in done.error["message"]
    assert not encrypting.store.exists()


def test_a_subject_is_erased_after_a_dry_run_and_a_confirmation(encrypting):
    encrypting.ok("erasure", "init")
    encrypting.ok(*SEND)
    encrypting.ok("send", "orders", "for-bob", "--principal", "bob", "--id", "m2")
    preview = encrypting.ok("erase", "--subject", "alice", "--dry-run", "--json").json
    assert preview["messages"] == [
        {"mailbox": "main@local", "topic": "orders", "status": "ready", "messages": 1}
    ]
    for wrong in ((), ("--pending", "--subject", "alice"), ("--subject", "alice")):
        assert encrypting("erase", "--json", *wrong).code == 2
    assert encrypting("--json", "erase", "--subject", "carol", "--yes").error["code"] == "E_NOT_FOUND"
    (record,) = encrypting.ok("erase", "--subject", "alice", "--yes", "--json").json["erasures"]
    assert (record["pseudonym"], record["removed"]) == (preview["subject"]["pseudonym"], 1)
    assert "erased" in encrypting.ok("show", "m1").out
    shown = encrypting.ok("show", "m1", "--json").json
    assert (shown["status"], shown["erased"], shown["payload"]) == ("expired", True, None)
    assert "was erased" in encrypting("show", "m1", "--payload").err
    assert encrypting.ok("show", "m2", "--payload").out == "for-bob"
    verified = encrypting.ok("verify", "--json").json["erasures"]
    assert (verified["records"], verified["encrypted"], verified["erased"]) == (1, 2, 1)
    assert "1 of 1 log ends" in encrypting.ok("verify").out
    assert encrypting.ok("erase", "--pending", "--json").json == {"erasures": []}


def test_a_key_store_in_postgres_is_created_by_migrate_and_init(encrypting, empty_database):
    address = empty_database.replace("postgres@", "postgres:hidden@")
    settings = SETTINGS.replace("secrets/keys.db", address)
    (encrypting.folder / "postroom.toml").write_text(settings)
    assert "the file of the erasure log, with records" in encrypting("erasure", "init").err
    records = f'records = "secrets/records"\nkeys = "{address}"'
    (encrypting.folder / "postroom.toml").write_text(settings.replace(f'keys = "{address}"', records))
    refused = encrypting("erasure", "init")
    assert "postroom migrate --keys URL" in refused.err
    migrated = encrypting.ok("migrate")
    assert "keys/0001_subject_keys" in migrated.out
    created = encrypting.ok("erasure", "init")
    assert "postgresql://postgres@" in created.out
    assert "hidden" not in refused.err + migrated.out + created.out
    encrypting.ok(*SEND)
    (record,) = encrypting.ok("erase", "--subject", "alice", "--yes", "--json").json["erasures"]
    assert (record["removed"], (encrypting.folder / "secrets" / "records").exists()) == (1, True)
    assert encrypting.ok("verify", "--json").json["erasures"]["erased"] == 1
