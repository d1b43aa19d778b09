import signal
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from tests.e2e.conftest import TIMEOUT_SECONDS
from tests.support.altered_commits import alter
from tests.support.servers.process import pause


def test_wrong_usage_is_one_line_and_exit_code_2(postroom):
    done = postroom("send", "--no-such-option")

    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "--no-such-option" in done.err


def test_an_unknown_command_names_the_closest_one(postroom):
    done = postroom("--json", "sned")

    assert (done.code, done.error["code"]) == (2, "E_USAGE")
    assert done.error["message"] == "Unknown command 'sned'; did you mean send? See postroom --help."
    assert postroom("dlq", "relist").err == (
        "postroom: Unknown command 'relist'; did you mean list? See postroom dlq --help.\n"
    )


def test_a_code_is_explained_also_with_an_invalid_settings_file(postroom):
    (postroom.folder / "postroom.toml").write_text("stroe = 'orders.db'\n")
    done = postroom("backlog", "--json")
    assert (done.code, done.error["code"]) == (2, "E_SCHEMA")

    text = " ".join(postroom.ok("explain", done.error["code"].lower()).out.split())
    assert text.startswith("E_SCHEMA: The request is malformed or out of bounds Cause: ")
    assert " Example: " in text
    assert " Remedy: Correct what the text names" in text
    entry = postroom.ok("explain", "store", "--json").json
    assert (entry["code"], entry["see"][0]) == ("E_STORE", "operations.md#files")
    listed = postroom.ok("explain", "--json").json
    assert {"E_STORE", "E_USAGE", "INVALID_OUTBOX"} < listed.keys()


def test_a_code_that_does_not_exist_names_the_closest_one(postroom):
    done = postroom("explain", "E_STROE", "--json")
    assert (done.code, done.error["code"]) == (3, "E_NOT_FOUND")
    assert done.error["message"].startswith("There is no error code E_STROE; did you mean E_STORE")
    hostile = postroom("explain", "\x1b[2J\u202e" * 100)
    assert (hostile.code, "\x1b" in hostile.err) == (3, False)


def test_the_version_and_the_exit_codes_are_told(postroom):
    assert postroom.ok("--version").out.startswith("postroom ")
    assert "Exit codes:" in postroom.ok("--help").out


def test_a_store_that_is_not_there_is_not_made_by_looking_for_messages(postroom):
    for command in (("recv", "orders"), ("backlog",), ("show", "x"), ("dlq", "list"), ("search",)):
        done = postroom(*command, "--json")
        assert (done.code, done.error["code"]) == (3, "E_NOT_FOUND"), command
    assert not postroom.store.exists()


def test_a_path_at_which_no_store_can_be_created_is_not_found_and_not_a_temporary_failure(postroom):
    for path in ("missing/orders.db", "."):
        for command in (("send", "orders", "{}"), ("backlog",)):
            done = postroom(*command, "--store", path, "--json")
            assert (done.code, done.error["code"]) == (3, "E_NOT_FOUND")
            assert "--store" in done.error["message"]
    assert list(postroom.folder.iterdir()) == []


def test_a_store_in_memory_is_refused_where_it_makes_no_sense(postroom):
    done = postroom("recv", "orders", "--store", "memory:")

    assert (done.code, "memory:" in done.err) == (1, True)


IN_MEMORY = [
    "apply",
    "apply --check",
    "mailbox set policy.shards=3",
    "topic policy orders shards=3",
    "topic pause orders",
    "send orders x",
    "schedule",
    "work tasks:worker --once",
]


@pytest.mark.parametrize("command", IN_MEMORY)
def test_what_would_be_lost_with_a_store_in_memory_is_refused_in_one_sentence(postroom, command):
    (postroom.folder / "postroom.toml").write_text(
        "[schedules.a]\ntopic = 'a'\ncron = '* * * * *'\n[policy]\nmax_attempts = 3\n"
    )
    (postroom.folder / "tasks.py").write_text("from postroom import Worker\nworker = Worker()\n")

    refused = postroom(*command.split(), "--store", "memory:")

    assert (refused.code in (1, 2), refused.out, refused.err.count("\n")) == (True, "", 1)
    assert refused.err.startswith("postroom: The store memory: ends with the command, so ")
    assert "name a file with --store or POSTROOM_STORE." in refused.err


def test_every_command_that_changes_a_mailbox_works_beside_the_process_that_owns_it(postroom, tmp_path):
    postroom.ok("send", "idle", "x", "--delay", "1h")
    lines = tmp_path / "lines.ndjson"
    lines.write_text('{"n": 1}\n')
    holder = postroom.start("recv", "idle", "--wait", "60s")
    try:
        postroom.wait_for_owner(holder)
        postroom.ok("topic", "policy", "orders", "max_attempts=1")
        postroom.ok("send", "orders", "1")
        postroom.ok("import", str(lines), "--topic", "orders", "--deliver", "--mailbox", "main@local")
        first, second = postroom.ok("recv", "orders", "--json").lines
        extended = postroom.ok("extend", first["receipt"], "--visibility", "10s")
        nacked = postroom.ok("nack", first["receipt"], "--reason", "broken")
        acked = postroom.ok("ack", second["receipt"])
        redriven = postroom.ok("dlq", "redrive", "orders")
        read = postroom.ok("backlog", "--json").json
        assert holder.poll() is None
    finally:
        holder.send_signal(signal.SIGINT)
    _, said = holder.communicate(timeout=TIMEOUT_SECONDS)

    assert [extended.out, nacked.out, acked.out] == ["1 extended\n", "1 nacked\n", "1 acked\n"]
    assert redriven.out == "1 dead letter redriven to orders\n"
    assert f"postroom recv, process {holder.pid} " in read["mailboxes"][0]["owner"]
    assert (holder.returncode, said) == (130, b"postroom: Interrupted.\n")


def test_an_owner_that_does_not_answer_in_time_is_a_temporary_failure(postroom):
    postroom.ok("send", "orders", "x", "--delay", "1h")
    holder = postroom.start("recv", "orders", "--wait", "60s")
    try:
        postroom.wait_for_owner(holder)
        pause(holder.pid)
        refused = postroom("send", "orders", "y", "--json", POSTROOM_TIMEOUT_MS="1000")
    finally:
        holder.send_signal(signal.SIGCONT)
        holder.send_signal(signal.SIGINT)
    holder.communicate(timeout=60)

    assert (refused.code, refused.error["code"]) == (4, "E_UNAVAILABLE")
    assert refused.error["retry_after_ms"] > 0


def test_a_reader_that_leaves_early_is_no_error(postroom):
    postroom.ok("send", "orders", "x")
    process = postroom.start("backlog", "--json")
    process.stdout.close()

    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=TIMEOUT_SECONDS) == 141


def test_an_edited_log_is_found(postroom):
    for number in range(3):
        postroom.ok("send", "orders", str(number))
    (before,) = postroom.ok("verify", "--json").json["mailboxes"]
    expected = f"{before['last']}:{before['chain']}"
    postroom.ok("verify", "--expect", expected, "--mailbox", "main@local")
    incomplete = postroom("verify", "--expect", expected[:-1], "--json")
    assert (incomplete.code, incomplete.error["message"].partition(" is not ")[2]) == (
        2,
        "POSITION:CHAIN, as postroom verify prints it.",
    )

    with closing(sqlite3.connect(postroom.store)) as connection, connection:
        connection.execute("UPDATE log SET at = at + 1 WHERE envelopes <> x''")
    done = postroom("verify", "--json")

    assert (done.code, done.error["code"]) == (5, "E_INTEGRITY")


def test_a_file_that_is_no_store_is_one_clear_line(postroom):
    postroom.store.touch(0o600)
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


def test_a_command_imports_only_what_it_needs(postroom):
    postroom.ok("send", "orders", "first")  # to create a store takes more
    program = """
import sys
present = set(sys.modules)  # what files beside the packages import at every start of this Python
from postroom.adapters.cli import main
sys.argv = ["postroom", "send", "orders", "x"]
try:
    main.main()
except SystemExit as end:
    print(end.code, *set(sys.modules) - present, sep="\\n")
"""
    listing = subprocess.run(
        [sys.executable, "-c", program], cwd=postroom.folder, capture_output=True, text=True, check=True
    )
    _, code, *loaded = listing.stdout.split()
    own = {name.removeprefix("postroom.") for name in loaded if name.startswith("postroom.")}
    packages = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names
    packages -= {name for name in packages if "cython" in name}  # made by uvloop

    assert code == "0"
    typer = {"annotated_doc", "shellingham", "typer", "typing_extensions"}
    assert packages <= {
        "blake3",
        "google",
        "msgspec",
        "postroom",
        "uuid_utils",
        "uvloop",
        "zstandard",
        *typer,
    }
    assert not {*loaded} & {"importlib.resources", "tomllib"}
    assert {name for name in own if name.startswith("adapters.cli.")} == {
        f"adapters.cli.{name}"
        for name in (
            "command",
            "logs",
            "main",
            "messages",
            "output",
            "remote",
            "session",
            "settings",
            "values",
        )
    }
    assert "adapters.compose.connect" in own
    unused = (
        "postgres.store memory.store grpc http http_client http_server nats compose.queries compose.serve"
    )
    assert not own & {f"adapters.{name}" for name in unused.split()}
    unused = "find_message_ids get_projection_status search_messages simulate_policy verify"
    assert not own & {f"application.queries.{name}" for name in unused.split()}
    assert not [name for name in own if name.startswith("projections")]


def test_records_altered_on_disk_end_with_exit_code_5_and_name_the_position(postroom):
    postroom.ok("send", "orders", "first", "--id", "own-1")
    postroom.ok("recv", "orders")
    alter(postroom.store, "events", lambda events: events.replace(b"own-1", b"own-2"))
    assert (postroom("verify").code, postroom("show", "own-1").code) == (5, 5)
    alter(postroom.store, "events", lambda events: events.replace(b"own-2", b"own-1"))
    assert postroom("verify").code == 0
    alter(postroom.store, "envelopes", lambda envelopes: envelopes.replace(b"first", b"frist"))
    shown = postroom("show", "own-1", "--json")
    assert (shown.code, shown.json["intact"]) == (5, False)
    shown = postroom("show", "own-1")
    assert (shown.code, "NO: it was altered on disk" in shown.out) == (5, True)
    alter(postroom.store, "events", lambda events: events.replace(b"MessageReceived.1", b"MessageReceived.9"))
    for command in (["recv", "orders"], ["backlog"], ["dlq", "list"], ["send", "orders", "second"]):
        done = postroom(*command, "--json")
        assert (done.code, done.error["code"]) == (5, "E_INTEGRITY")
        assert "commit of positions 5 to 5 can't be decoded" in done.error["message"]
