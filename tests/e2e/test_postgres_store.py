"""The command line on a PostgreSQL store: migrated once, then like any other."""

from urllib.parse import urlsplit

import pytest


@pytest.fixture
def store(empty_database: str) -> str:
    """The address of an empty database, with a password that the server does not ask for."""
    parts = urlsplit(empty_database)
    if parts.password is not None:
        return empty_database
    return parts._replace(netloc=f"{parts.username}:sesame@{parts.hostname}:{parts.port}").geturl()


def test_a_database_is_migrated_and_then_serves_every_command(postroom, store):
    refused = postroom("send", "orders", "hello", "--store", store, "--json")
    assert (refused.code, "postroom migrate --store URL" in refused.error["message"]) == (2, True)

    planned = postroom.ok("migrate", "--dry-run", "--store", store, "--json").json
    assert planned["dry_run"]
    assert {each["set"] for each in planned["databases"][0]["migrations"]} == {"store"}
    assert "store/0001_log" in postroom.ok("migrate", "--store", store).out
    assert "is up to date" in postroom.ok("migrate", "--store", store).out

    sent = postroom.ok("send", "orders", "hello", "--id", "order-1", POSTROOM_STORE=store)
    assert sent.out == "order-1\n"
    (received,) = postroom.ok("recv", "orders", "--json", POSTROOM_STORE=store).lines
    assert received["message_id"] == "order-1"
    assert (
        postroom.ok("backlog", "--json", POSTROOM_STORE=store).json["mailboxes"][0]["shards"][0]["in_flight"]
        == 1
    )
    postroom.ok("ack", received["receipt"], POSTROOM_STORE=store)
    assert "MessageAcked" in postroom.ok("show", "order-1", POSTROOM_STORE=store).out
    assert "main@local: intact, records 1 to " in postroom.ok("verify", POSTROOM_STORE=store).out

    missing = postroom("show", "order-2", POSTROOM_STORE=store)
    assert missing.code == 3
    elsewhere = postroom("recv", "orders", "--mailbox", "nobody@here", POSTROOM_STORE=store)
    assert (elsewhere.code, "has no mailbox nobody@here" in elsewhere.err) == (3, True)
    assert not any("sesame" in done.out + done.err for done in (refused, sent, missing, elsewhere))


def test_the_tables_of_leases_are_migrated_where_admins_share_a_database(postroom, store):
    refused = postroom("migrate", "--leases", "leases.db")
    assert (refused.code, "The PostgreSQL URL is malformed" in refused.err) == (1, True)
    assert "leases/0001_leases" in postroom.ok("migrate", "--leases", store).out


def test_the_messaging_tables_are_migrated_where_the_settings_say(postroom, store):
    postroom.folder.joinpath("postroom.toml").write_text(f'[messaging]\ndatabase = "{store}"\n')
    (database,) = postroom.ok("migrate", "--json").json["databases"]
    assert {each["set"] for each in database["migrations"]} == {"messaging"}
    assert "sesame" not in database["database"]
    both = postroom.ok("migrate", "--store", store, "--json").json["databases"]
    assert [bool(each["migrations"]) for each in both] == [True, False]


def test_what_is_no_database_is_not_migrated(postroom):
    done = postroom("migrate")
    assert (done.code, "Nothing to migrate" in done.err) == (2, True)


def test_a_server_that_is_not_there_or_a_url_that_is_none_is_one_line(postroom):
    down = postroom("backlog", "--store", "postgresql://me:sesame@127.0.0.1:1/shop")
    assert (down.code, down.err.count("\n"), "sesame" in down.err) == (4, 1, False)
    assert "Connection refused" in down.err
    odd = postroom("backlog", "--store", "postgresql://me:ses@me@127.0.0.1:1/shop")
    assert (odd.code, "special characters of the password as %XX" in odd.err) == (1, True)
    other = postroom("backlog", "--store", "mysql://me:sesame@127.0.0.1/shop")
    assert (other.code, "sesame" in other.err, "postgresql://" in other.err) == (2, False, True)


def test_the_demo_leaves_databases_alone(postroom, store):
    done = postroom("demo", "--store", store)
    assert (done.code, "does not run on a server" in done.err) == (1, True)
