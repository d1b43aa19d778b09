import signal
import sqlite3
import subprocess
import sys
from contextlib import closing


def test_wrong_usage_is_one_line_and_exit_code_2(postroom):
    done = postroom("send", "--no-such-option")

    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "--no-such-option" in done.err
    assert postroom("--json", "sned").error["code"] == "E_USAGE"


def test_the_version_and_the_exit_codes_are_told(postroom):
    assert postroom.ok("--version").out.startswith("postroom ")
    assert "Exit codes:" in postroom.ok("--help").out


def test_a_store_that_is_not_there_is_not_made_by_looking_for_messages(postroom):
    for command in (("recv", "orders"), ("backlog",), ("show", "x"), ("dlq", "list"), ("search",)):
        done = postroom(*command, "--json")
        assert (done.code, done.error["code"]) == (3, "E_NOT_FOUND"), command
    assert not postroom.store.exists()


def test_a_store_in_memory_is_refused_where_it_makes_no_sense(postroom):
    done = postroom("recv", "orders", "--store", "memory:")

    assert (done.code, "memory:" in done.err) == (1, True)


def test_a_mailbox_that_another_process_owns_is_named_and_can_still_be_read(postroom):
    postroom.ok("send", "orders", "x", "--delay", "1h")
    holder = postroom.start("recv", "orders", "--wait", "60s")
    try:
        postroom.wait_for_owner(holder)
        refused = postroom("send", "orders", "y", "--json", POSTROOM_OWNER_WAIT_MS="0")
        read = postroom.ok("backlog", "--json").json
    finally:
        holder.send_signal(signal.SIGINT)
    _, said = holder.communicate(timeout=60)

    assert (refused.code, refused.error["code"]) == (4, "E_OWNED")
    assert f"postroom recv, process {holder.pid} " in refused.error["message"]
    assert refused.error["retry_after_ms"] > 0
    assert read["mailboxes"][0]["shards"][0]["delayed"] == 1
    assert (holder.returncode, said) == (130, b"postroom: Interrupted.\n")


def test_a_reader_that_leaves_early_is_no_error(postroom):
    postroom.ok("send", "orders", "x")
    process = postroom.start("backlog", "--json")
    process.stdout.close()

    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 141


def test_an_edited_log_is_found(postroom):
    for number in range(3):
        postroom.ok("send", "orders", str(number))
    (before,) = postroom.ok("verify", "--json").json["mailboxes"]
    expected = f"{before['last']}:{before['chain']}"
    postroom.ok("verify", "--expect", expected, "--mailbox", "main@local")

    with closing(sqlite3.connect(postroom.store)) as connection, connection:
        connection.execute("UPDATE log SET at = at + 1 WHERE type LIKE 'MessageSent%'")
    done = postroom("verify", "--json")

    assert (done.code, done.error["code"]) == (5, "E_INTEGRITY")


def test_a_file_that_is_no_store_is_one_clear_line(postroom):
    postroom.store.write_text("not a database, but long enough to be looked at as one " * 10)

    done = postroom("send", "orders", "x")

    assert (done.code, done.err.count("\n")) == (4, 1)
    assert str(postroom.store.name) in done.err


def test_settings_come_from_flags_then_environment_then_file(postroom):
    (postroom.folder / "postroom.toml").write_text(
        'store = "file.db"\n[policy]\nvisibility = "30s"\n[topics."orders.eu"]\nmax_attempts = 2\n'
    )
    postroom.ok("send", "orders.eu", "x")
    postroom.ok("send", "orders.eu", "x", POSTROOM_STORE="environment.db")
    postroom.ok("send", "orders.eu", "x", "--store", "flag.db", POSTROOM_STORE="environment.db")

    made = {path.name for path in postroom.folder.glob("*.db")}
    assert made == {"file.db", "environment.db", "flag.db"}
    policy = postroom.ok("topic", "policy", "orders.eu", "--json").json["policy"]
    assert (policy["visibility_ms"], policy["max_attempts"]) == (30_000, 2)
    there = postroom("topic", "policy", "orders.eu", "max_attempts=3")
    assert (there.code, "postroom.toml" in there.err) == (1, True)


def test_an_unknown_setting_names_the_key_and_the_file(postroom):
    (postroom.folder / "mine.toml").write_text("[policy]\nvisibilty_ms = 5000\n")

    done = postroom("send", "orders", "x", "--config", "mine.toml")

    assert done.code == 2
    assert "visibilty_ms" in done.err
    assert "mine.toml" in done.err
    assert "did you mean visibility_ms?" in done.err


def test_commands_start_without_what_they_do_not_need(postroom):
    program = "import sys, postroom.adapters.cli.main; print(*sys.modules, sep='\\n')"
    listing = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(listing.stdout.split())

    assert "postroom.adapters.cli.importer" in loaded
    assert not loaded & {"pyspark", "sqlalchemy", "pyarrow", "rich", "structlog", "postroom.adapters.compose"}
